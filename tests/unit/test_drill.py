"""`qm drill`: somebody's own policies under a scenario's load and faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from autoscaler.cli import app
from tests.worlds import MODEL, constant, demand, fault, row, service, unit

SCENARIO = {
    "name": "day",
    "duration_s": 900.0,
    "policies": [unit(service("chat"), service("code", priority=10))],
    "demand": [demand(2.0, "support/chat"), demand(0.5, "support/code")],
    "supply": [row("od", boot_s=constant(20.0), load_s=constant(10.0))],
    "faults": [fault("replica_crash", 600.0, target="support/chat")],
}


def drill(folder: Path, scenario: dict[str, Any], *units: dict[str, Any]) -> Any:
    (folder / "policies").mkdir()
    for each in units:
        (folder / "policies" / f"{each['unit']}.yaml").write_text(yaml.safe_dump(each))
    (folder / "day.yaml").write_text(yaml.safe_dump(scenario))
    words = [
        "drill",
        str(folder / "day.yaml"),
        "--policies",
        str(folder / "policies"),
        "--json",
        str(folder / "out.json"),
    ]
    return CliRunner().invoke(app, words)


def test_the_load_goes_to_ones_own_services_in_order_of_importance(tmp_path: Path) -> None:
    mine = unit(service("low", priority=1), service("top", priority=900), service("mid"), name="mine")
    done = drill(tmp_path, SCENARIO, mine)
    assert done.exit_code == 0, done.output
    (told,) = json.loads((tmp_path / "out.json").read_text())["units"]
    assert {each["service"]: each["load_of"] for each in told["services"]} == {
        "mine/top": "support/chat",
        "mine/mid": "support/code",
        "mine/low": "nobody",
    }
    assert "mine/low: nobody asked" in done.output


def test_a_unit_that_its_policies_starve_is_said_to_break(tmp_path: Path) -> None:
    poor = unit(service("chat", min_replicas=0, scale_to_zero=True), name="support", quota_gpus=0)
    done = drill(tmp_path, SCENARIO, poor)
    assert done.exit_code == 0, done.output
    assert "support: broke" in done.output


def test_policies_that_do_not_load_are_said_first(tmp_path: Path) -> None:
    done = drill(tmp_path, SCENARIO, {"unit": "mine", "services": [{"name": "x", "model": MODEL, "gaol": 1}]})
    assert done.exit_code == 2
    assert "gaol" in done.output
