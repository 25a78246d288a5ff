"""docs/policies.md says what is so: its examples pass, its refusals are what is printed, its keys are the format's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autoscaler.commands.outcome import BAD_INPUT, OK
from autoscaler.commands.policy import SCHEMAS, check_command
from policies.model import Service, Unit


def blocks(root: Path, language: str) -> list[str]:
    text = (root / "docs" / "policies.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_examples_are_good_and_the_last_is_refused_as_printed(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *good, hasty = blocks(root, "yaml")
    assert len(good) >= 3
    for number, text in enumerate(good):
        (tmp_path / f"{number}.yaml").write_text(text)
    assert check_command(tmp_path) == OK, capsys.readouterr().err
    folder = tmp_path / "hasty"
    folder.mkdir()
    (folder / "hasty.yaml").write_text(hasty)
    assert check_command(folder) == BAD_INPUT
    assert capsys.readouterr().err.replace(f"{folder}/", "") == blocks(root, "text")[0]


def test_every_key_of_the_format_is_told(root: Path) -> None:
    text = (root / "docs" / "policies.md").read_text(encoding="utf-8")
    for model in (Unit, Service):
        for key in model.model_fields:
            assert f"`{key}`" in text, key


def test_the_schema_for_editors_knows_every_key_and_refuses_others() -> None:
    schema = json.loads(json.dumps(SCHEMAS["policy"]()))
    assert set(schema["properties"]) == set(Unit.model_fields)
    assert set(schema["$defs"]["Service"]["properties"]) == set(Service.model_fields)
    assert schema["additionalProperties"] is False
    assert {kind["type"] for kind in schema["properties"]["lends"]["anyOf"]} == {"boolean", "integer"}
