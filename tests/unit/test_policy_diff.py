"""`qm diff`: two folders of policies in one world, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autoscaler.cli import app
from chaos.policy_diff import PolicyDiff
from tests.worlds import constant

UNIT = """\
unit: {unit}
owner: o@example.com
services:
  - name: chat
    model: meta-llama/Meta-Llama-3.1-8B
    goal: latency
    priority: {priority}
    slo: {{ttft_s: 2.0, tpot_s: 0.1}}
    max_replicas: 4
    variants: [{{id: l40s, instance_type: g6e.2xlarge}}]
"""


def qm(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def folder(path: Path, *, a: int, b: int) -> Path:
    path.mkdir()
    for unit, priority in (("a", a), ("b", b)):
        (path / f"{unit}.yaml").write_text(UNIT.format(unit=unit, priority=priority))
    return path


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """Two services that want three instances each, and three there are."""
    tokens = {"input_tokens": 500, "output_tokens": 100}
    pool = {"id": "od", "instance_type": "g6e.2xlarge", "zone": "z", "market": "on_demand", "count": 3}
    scenario = {
        "name": "short",
        "duration_s": 1800,
        "policies": "old",
        "demand": [
            {"service": f"{unit}/chat", "synthetic": {"kind": "constant", "rps": 16}, **tokens} for unit in "ab"
        ],
        "supply": [{**pool, "price_usd_per_h": 2.0, "boot_s": constant(30.0), "load_s": constant(30.0)}],
    }
    (tmp_path / "short.yaml").write_text(json.dumps(scenario))
    folder(tmp_path / "old", a=500, b=100)
    folder(tmp_path / "new", a=100, b=500)
    return tmp_path


def test_a_change_of_priority_has_a_winner_and_a_loser(short: Path) -> None:
    out = short / "diff.json"
    done = qm("diff", short / "old", short / "new", "--scenario", short / "short.yaml", "--json", out)
    assert done.exit_code == 0, done.output
    found = PolicyDiff.model_validate_json(out.read_text())
    assert (found.wins, found.loses) == (("b/chat",), ("a/chat",))
    assert [(c.key, c.old, c.new) for c in found.changes] == [
        ("a/chat.priority", 500, 100),
        ("b/chat.priority", 100, 500),
    ]
    met = found.services["b/chat"].slo_attainment
    assert met.old is not None
    assert met.new is not None
    assert met.old < 0.6 < 0.9 < met.new
    assert "who would win: b/chat" in done.output
    assert "a/chat.priority: 500 -> 100" in done.output
    again = short / "again.json"
    qm("diff", short / "old", short / "new", "--scenario", short / "short.yaml", "--json", again)
    assert again.read_bytes() == out.read_bytes()


def test_the_same_policy_changes_nothing(short: Path) -> None:
    done = qm("diff", short / "old", short / "old", "--scenario", short / "short.yaml")
    assert done.exit_code == 0
    assert "0 values differ" in done.output
    assert "who would win: nobody" in done.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("old", "new", "--scenario", "nowhere"), "nowhere: does not exist; give a scenario's file, or one of"),
        (("old", "gone", "--scenario", "short.yaml"), "does not exist"),
        (("old", "new", "--scenario", "short.yaml", "--seeds", "3:1"), "--seeds 3:1: give A:B"),
        (("old", "lone", "--scenario", "short.yaml"), "b/chat is in no policy"),
    ],
)
def test_bad_input_is_one_clear_line(
    short: Path, arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(short)
    folder(short / "lone", a=1, b=1)
    (short / "lone" / "b.yaml").unlink()
    done = qm("diff", *arguments)
    assert done.exit_code == 2
    assert text in done.output
    assert "Traceback" not in done.output
