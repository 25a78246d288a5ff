"""Each alert fires in a run of the loop that was made for it, and none in a calm one: promtool evaluates the rules."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repo.test_metric_names import RULES, rules
from tests.system.alert_scenes import CASES, START_S, Case, calm, simulated
from tests.system.prometheus_server import binary

ALERTS = {rule["alert"]: rule for rule in rules("alert")}


def promtool(folder: Path, series: list[dict[str, str]], asked: list[dict[str, Any]]) -> str:
    """What `promtool test rules` objects to, nothing when all is as `asked`."""
    test = {"interval": "10s", "input_series": series, "alert_rule_test": asked}
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "10s", "tests": [test]}))
    done = subprocess.run([binary("promtool"), "test", "rules", str(path)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def expected(alert: str, minutes: float, *firing: dict[str, str]) -> dict[str, Any]:
    """The alert at so many minutes since the scene began: with each of these labels, or silent."""
    rows = []
    for labels in firing:
        text = ALERTS[alert]["annotations"]["summary"]
        for name, value in labels.items():
            text = text.replace(f"{{{{ $labels.{name} }}}}", value)
        rows.append({"exp_labels": labels | ALERTS[alert]["labels"], "exp_annotations": {"summary": text}})
    return {"eval_time": f"{START_S + 60.0 * minutes:.0f}s", "alertname": alert, "exp_alerts": rows}


def test_the_rules_are_well_formed() -> None:
    done = subprocess.run(
        [binary("promtool"), "check", "rules", str(RULES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {case.alert for case in CASES} == ALERTS.keys()


@pytest.mark.parametrize("case", CASES, ids=[case.alert for case in CASES])
def test_it_fires_in_the_run_that_was_made_for_it_and_not_before(case: Case, tmp_path: Path) -> None:
    asked = [expected(case.alert, case.before_min), expected(case.alert, case.at_min, *case.labels)]
    assert promtool(tmp_path, case.play().series(), asked) == ""


def test_all_are_silent_in_calm(tmp_path: Path) -> None:
    asked = [expected(alert, minutes) for alert in ALERTS for minutes in (2.0, 10.0, 25.0, 44.0)]
    assert promtool(tmp_path, calm().series(), asked) == ""


def test_all_are_silent_in_the_calm_scenario_once_its_first_replicas_are_ready(tmp_path: Path) -> None:
    """An hour of 82 requests a second. Its first minutes are a cold start, in which every request is missed."""
    asked = [expected(alert, minutes) for alert in ALERTS for minutes in (16.0, 30.0, 45.0, 59.0)]
    assert promtool(tmp_path, simulated("calm", tmp_path / "journal"), asked) == ""


def test_what_is_blind_in_the_blind_scenario_is_told_while_it_is(tmp_path: Path) -> None:
    """The gateways' reports are gone from 90 to 105 minutes."""
    chat = {"service": "support/chat"}
    asked = [expected("QmServiceBlind", minutes) for minutes in (60.0, 89.0, 110.0)]
    asked.append(expected("QmServiceBlind", 100.0, chat))
    series = simulated("blind", tmp_path / "journal", "duration_s=6700")
    assert promtool(tmp_path, series, asked) == ""
