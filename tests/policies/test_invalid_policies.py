"""A corpus of files that must be refused, each beside exactly what the person who wrote it reads.

`invalid/NAME.yaml` is the file, `invalid/NAME.txt` what follows its name in each line that `qm check` prints. What is
too large to keep is made here.
"""

# ruff: noqa: E501 - a table of file and message is read by the line

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from autoscaler.catalogue import resolve
from autoscaler.commands.outcome import BAD_INPUT
from autoscaler.commands.policy import check_command
from policies.load import PolicyProblems, load

CORPUS = {path.stem: path for path in sorted(Path(__file__).with_name("invalid").glob("*.yaml"))}
GOOD = """\
unit: support
owner: a@example.com
services:
  - name: chat
    model: Qwen/Qwen3-8B
    goal: cost
    variants: [{id: v1, instance_type: g6.2xlarge}]
"""


def read(folder: Path) -> list[str]:
    """What is wrong there, as far as reading alone tells."""
    with pytest.raises(PolicyProblems) as caught:
        load(folder)
    return [str(problem).removeprefix(f"{folder}/a.yaml") for problem in caught.value.problems]


def test_the_corpus_is_large_and_complete() -> None:
    assert len(CORPUS) >= 100
    assert {path.stem for path in next(iter(CORPUS.values())).parent.glob("*.txt")} == set(CORPUS)


@pytest.mark.parametrize("name", CORPUS)
def test_the_person_reads_exactly(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_bytes(CORPUS[name].read_bytes())
    try:
        load(tmp_path)
    except PolicyProblems as error:
        found = [str(problem) for problem in error.problems]
    else:  # well written, but no hardware or no money can hold it
        assert check_command(tmp_path) == BAD_INPUT
        found = capsys.readouterr().err.splitlines()
    expected = CORPUS[name].with_suffix(".txt").read_text().splitlines()
    assert [line.removeprefix(f"{tmp_path}/a.yaml") for line in found] == expected


def test_the_base_of_the_corpus_is_itself_valid(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    assert [key for key, _, _ in resolve(tmp_path).policy.services()] == ["support/chat"]


def test_a_number_with_an_exponent_is_a_number(tmp_path: Path) -> None:
    """To YAML 1.1 it is text."""
    (tmp_path / "a.yaml").write_text(
        GOOD + "    max_replicas: 1e2\nbudget_usd_per_month: 2.5e5\nbudget_usd_per_h: 1e-1\n"
    )
    (unit,) = load(tmp_path).units
    assert (unit.services[0].max_replicas, unit.budget_usd_per_month, unit.budget_usd_per_h) == (100, 250_000.0, 0.1)


# ---- hostile ---------------------------------------------------------------------------------------------------------
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "100 MB": ("# " + "x" * 100_000_000, ":1: is larger than 1 MiB; a file of this kind takes a few KiB, so check what it is"),
    "many values": ("unit: [" + "1," * 30_000 + "]\n", ":1: holds more than 20000 values; split it, or check what it is"),
    "deep brackets": ("[" * 500_000, ":1: is not valid YAML: exceeded maximum nesting depth; mend the syntax"),
    "deep maps": ("{a: " * 100_000, ":1: is nested deeper than 24 levels; check the brackets"),
    "alias bomb": (BOMB, ":2: uses a YAML alias (*name); write the value out"),
    "tag": ("unit: !!python/object/apply:os.system [echo]\n", ":1: uses the YAML tag tag:yaml.org,2002:python/object/apply:os.system; write plain values"),
    "endless key": ("? " * 200_000, ":1: is nested deeper than 24 levels; check the brackets"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_fast(name: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[name]
    (tmp_path / "a.yaml").write_text(content)
    before_s = time.process_time()
    assert read(tmp_path) == [expected]
    assert time.process_time() - before_s < 1.0


def test_an_endless_word_is_told_without_its_middle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD.replace("g6.2xlarge", "g6" * 100_000))
    with pytest.raises(PolicyProblems) as caught:
        resolve(tmp_path)
    (problem,) = caught.value.problems
    assert "..." in str(problem)
    assert len(str(problem)) < 3_000


def test_what_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"unit: a\nowner: \xff\xfe\n")
    assert read(tmp_path) == [":2: is not UTF-8 text; save it as UTF-8"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    assert read(tmp_path) == [": is not a regular file; remove it, or give it another name"]


def test_a_device_that_never_ends_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to("/dev/zero")
    assert read(tmp_path) == [": is not a regular file; remove it, or give it another name"]


def test_a_thousand_files_are_checked_in_three_seconds(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"{number}.yaml").write_text(GOOD.replace("unit: support", f"unit: support-{number}"))
    before_s = time.process_time()
    assert check_command(tmp_path) == 0
    assert time.process_time() - before_s < 3.0
