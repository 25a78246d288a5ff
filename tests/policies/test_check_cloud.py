"""`qm check` reads the cloud's file beside the policies: every problem of both at once, none when there is no cloud."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from autoscaler.commands.outcome import BAD_INPUT, OK
from autoscaler.commands.policy import check_command

GOOD = """\
cluster: test
region: us-east-1
launch_template: qm-node
subnets: {us-east-1a: subnet-a}
instance_types: [g6.12xlarge]
"""


@pytest.fixture
def folder(tmp_path: Path, root: Path) -> Path:
    copy = tmp_path / "policies"
    shutil.copytree(root / "policies" / "local" / "sim", copy)
    (copy / "cloud").mkdir()
    return copy


def told(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    (folder / "cloud" / "ec2.yaml").write_text(text)
    assert check_command(folder) == BAD_INPUT
    return [line.removeprefix(f"{folder}/") for line in capsys.readouterr().err.splitlines()]


def test_a_good_cloud_file_is_no_problem(folder: Path) -> None:
    (folder / "cloud" / "ec2.yaml").write_text(GOOD)
    assert check_command(folder) == OK


def test_a_wrong_type_is_named_with_its_line_and_the_remedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = told(folder, GOOD.replace("g6.12xlarge", "g6.12xlrage"), capsys)
    assert line.startswith("cloud/ec2.yaml:5: instance_types[0]: g6.12xlrage is not in the catalogue; did you mean g6")


def test_problems_of_the_policies_and_of_the_cloud_come_together(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.yaml").write_text("unit: a\nowner: a@example.com\n")
    lines = told(folder, GOOD.replace("us-east-1a", "eu-west-1a") + "surprise: 1\n", capsys)
    assert lines[0] == "a.yaml:1: services: is missing; add it"
    assert [line.split(": ")[:2] for line in lines[1:]] == [["cloud/ec2.yaml:6", "surprise"]]


def test_what_is_no_cloud_file_at_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(folder, "", capsys) == ["cloud/ec2.yaml:1: holds no keys; write it as docs/ec2.md shows"]
    (folder / "cloud" / "ec2.yaml").unlink()
    os.mkfifo(folder / "cloud" / "ec2.yaml")
    assert check_command(folder) == BAD_INPUT
    assert "cloud/ec2.yaml: is not a regular file; " in capsys.readouterr().err


def test_a_link_that_leads_nowhere_is_not_taken_for_no_cloud(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cloud" / "ec2.yaml").symlink_to(folder / "gone.yaml")
    assert check_command(folder) == BAD_INPUT
    assert "cloud/ec2.yaml: does not exist; " in capsys.readouterr().err


def test_a_broken_catalogue_is_told_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "catalogue").mkdir(exist_ok=True)
    (folder / "catalogue" / "wrong.yaml").write_text("a: 1\n")
    lines = told(folder, GOOD, capsys)
    assert [line.split(";")[0] for line in lines] == ["catalogue/wrong.yaml:1: is not a catalogue file"]
