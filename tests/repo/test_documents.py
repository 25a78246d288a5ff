"""What README and the documents tell a reader to type exists: commands, options, make targets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from autoscaler.cli import app
from tests.repo.tree import ROOT, documents

CODE = re.compile(r"^```[a-z]*\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)


def typed(document: Path) -> list[str]:
    """Lines that a reader may type: fenced blocks line by line (continued lines joined), and inline code."""
    text = document.read_text(encoding="utf-8")
    code = "\n".join(block or inline for block, inline in CODE.findall(text))
    return [line.strip().removeprefix("$ ") for line in code.replace("\\\n", " ").splitlines()]


def complaint(line: str, root: Any) -> str | None:
    """Why a line that begins with `qm` cannot be typed as it stands, or None."""
    words = shlex.split(line.replace("…", ""), comments=True)[1:]
    command: Any = root
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in command.commands:
            return f"{line}: no command {name}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]} | {
        "--help"
    }
    wrong = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    return f"{line}: no option {wrong[0]}" if wrong else None


@pytest.fixture(scope="module")
def root_command() -> Any:
    """`qm` as click sees it."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_qm_command_in_a_document_exists(document: Path, root_command: Any) -> None:
    lines = [line.replace(".venv/bin/", "") for line in typed(document)]
    complaints = [complaint(line, root_command) for line in lines if re.match(r"qm( |$)", line)]
    assert [each for each in complaints if each] == []


def test_a_command_that_does_not_exist_would_be_seen(root_command: Any) -> None:
    assert complaint("qm conjure gpus", root_command) == "qm conjure gpus: no command conjure"
    assert complaint("qm up --engine vllm --gpus-from-nowhere 3", root_command) is not None
    assert complaint("qm up --engine vllm --minutes 5", root_command) is None


def test_every_make_target_in_a_document_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for document in documents() for line in typed(document)]
    named = {word for line in lines if line.startswith("make ") for word in line.partition("#")[0].split()[1:]}
    assert named - targets == set()


def test_the_first_screen_of_the_readme_shows_the_two_commands() -> None:
    screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:24]
    assert [line for line in screen if re.match(r"(\$ )?make (run|test)\b", line)] != []
    assert {"make run", "make test"} <= {line.split("#")[0].strip() for line in screen}
