"""The swarm: what holds in random bad days, that its checkers see what they are for, that failures are made small."""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from autoscaler.cli import app
from chaos.faults import KINDS
from chaos.scenario import load_scenario, scenario_of
from chaos.swarm import promises
from chaos.swarm.command import ChaosReport, one, report_of
from chaos.swarm.draw import HOUR, LONG, Size, drawn
from chaos.swarm.mutations import MUTATIONS, seen_by
from chaos.swarm.run import Run, run
from chaos.swarm.shrink import shrunk, what_broke
from chaos.swarm.soak import Day, judged, soak

CORPUS = sorted((Path(__file__).parents[1] / "corpus").glob("*.yaml"))
SEEDS = int(os.environ.get("QM_CHAOS_SEEDS", "3"))
BREAKS = os.environ.get("QM_CHAOS_BREAKS", "ladder_skipped,hold_removed,intent_not_durable").split(",")


def qm(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [one(seed, HOUR) for seed in range(SEEDS)]


def test_promises_hold_and_all_is_well_again_after_a_bad_day(runs: list[Run]) -> None:
    failed = {each.seed: (what_broke(each), each.unsettled) for each in runs if each.failed}
    assert not failed


def test_a_seed_gives_the_same_world_and_the_same_run_every_time(runs: list[Run]) -> None:
    again = one(0, HOUR)
    assert again.model_copy(update={"cpu_s": 0.0}) == runs[0].model_copy(update={"cpu_s": 0.0})


def test_every_kind_of_fault_is_in_five_of_a_hundred_worlds_at_least() -> None:
    for size in (HOUR, LONG):
        share = Counter(fault["kind"] for seed in range(400) for fault in drawn(seed, size)["faults"])
        assert share.keys() == KINDS.keys()
        assert min(share.values()) >= 0.05 * 400, share.most_common()[-3:]


@pytest.mark.parametrize("size", [HOUR, LONG])
def test_a_world_is_an_ordinary_scenario_that_heals(size: Size, tmp_path: Path) -> None:
    data = drawn(7, size)
    path = tmp_path / "seven.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    made = load_scenario(path)
    assert made.model_dump() == scenario_of(data).model_dump()
    assert (len(made.policy_set.services()), len(made.supply)) == (size.services, size.pools)
    assert all(fault.at_s + fault.for_s <= 1.01 * size.healed_s for fault in made.faults)


def test_one_more_fault_moves_no_other_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn(3)
    monkeypatch.setattr("chaos.swarm.draw.MOST_FAULTS", 30)
    after = drawn(3)
    assert before["faults"] != after["faults"]
    assert before | {"faults": 0} == after | {"faults": 0}


@pytest.mark.parametrize("name", BREAKS)
def test_a_deliberate_break_of_the_core_is_seen(name: str) -> None:
    assert seen_by(name, range(300)) is not None


def test_the_twelve_breaks_are_named() -> None:
    assert len(MUTATIONS) == 12


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("autoscaler.core.demand.short_forecast", "defect"),
        ("autoscaler.core.learn._learn_load", "defect"),
        ("autoscaler.core.decide.place", "check_failed"),
    ],
)
def test_code_of_ours_that_raises_now_and_then_is_seen_and_borne(
    where: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every eleventh call for half an hour: seen as what it is, no other promise breaks, all is well after it."""
    module, name = where.rsplit(".", 1)
    real, calls = getattr(importlib.import_module(module), name), [0]
    data = drawn(3) | {"faults": []}
    until = 1800.0 / data["tick_s"]

    def sometimes(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] < until and calls[0] % 11 == 5:
            raise ArithmeticError("one in eleven")
        return real(*given)

    monkeypatch.setattr(where, sometimes)
    result = run(scenario_of(data))
    assert {each.kind for each in result.violations} == {kind, *(["check_failed"] if "learn" in where else [])}
    assert all("ArithmeticError: one in eleven" in each.detail for each in result.violations)
    assert result.settled_after_s is not None


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_broke_once_does_not_again(path: Path) -> None:
    result = run(load_scenario(path))
    assert not result.failed, (what_broke(result), result.violations[:2], result.unsettled)


def test_a_failure_is_made_as_small_as_what_causes_it() -> None:
    def judge(data: dict[str, Any]) -> frozenset[str]:
        guilty = any(fault["kind"] == cause for fault in data["faults"])
        return frozenset({"x"} if guilty and len(data["supply"]) > 2 else ())

    data = drawn(5)
    cause = data["faults"][2]["kind"]
    small = shrunk(data, 500, judge)
    assert [fault["kind"] for fault in small["faults"]] == [cause]
    assert (len(small["supply"]), len(small["demand"])) == (3, 1)


def test_readmes_promises_are_written_from_the_results_and_say_what_does_not_hold(tmp_path: Path) -> None:
    report = report_of([Run(seed=1, kinds=("dry",), violations=(), settled_after_s=60.0, transitions=("a > b",))], 1.0)
    results = {
        "chaos": json.loads(report.model_dump_json()),
        "mutations": {"hold_removed": 3, "drain_skipped": None},
        "journal": {"kills": 1000, "lost": 0},
        "crashes": {"steps": 40, "faults": 9},
        "soak": asdict(judged([Day(day=n, rss_mib=200.0, journal_mib=5.0, tick_ms=20.0) for n in range(8)], 80, 400)),
    }
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"before\n{promises.BEGIN}\nold\n{promises.END}\nafter\n")
    promises.publish(results, tmp_path)
    readme = (tmp_path / "README.md").read_text()
    assert (readme[:7], readme[-6:]) == ("before\n", "after\n")
    held = {line.split(" | ")[0][2:]: line.endswith("| yes |") for line in readme.splitlines() if " | " in line}
    assert held.pop("what must hold") is False
    assert held == {
        "no promise is broken at any tick": True,
        "after the last fault all comes to rest": True,
        "every fault and every change is met": False,
        "the checkers see what they are for": False,
        "no launch intent is lost, no journal unreadable": True,
        "a crash changes neither beliefs nor plan": True,
        "nothing grows": True,
    }
    assert "| drain skipped | never |" in (tmp_path / "docs" / "promises.md").read_text()


def test_what_grows_over_the_days_is_a_problem() -> None:
    def days(rss: float, tick: float, journal: float) -> list[Day]:
        return [
            Day(day=n, rss_mib=200.0 + rss * n, tick_ms=20.0 + tick * n, journal_mib=journal) for n in range(12)
        ]  # fmt: skip

    assert judged(days(0.0, 0.0, 6.0), 1, 1).problems == ()
    assert [text.split(" ")[0] for text in judged(days(9.0, 2.0, 40.0), 1, 1).problems] == ["memory", "a", "the"]


def test_months_are_made_of_bad_days_and_run(tmp_path: Path) -> None:
    found, (day,) = soak(1, 1800.0, tmp_path)
    assert (found.days, found.ticks, found.problems) == (1, 48, ())
    assert found.records > 100
    assert 0.0 < day.journal_mib < 6.0


def test_qm_chaos_goes_on_where_it_was_and_reports(tmp_path: Path) -> None:
    words = ("chaos", "--seeds", "0:1", "--jobs", "1", "--results", str(tmp_path), "--json", "-")
    first = qm(*words)
    (kept,) = tmp_path.glob("*.jsonl")
    kept.write_text(kept.read_text() + '{"seed": 1, "kin')
    again = qm(*words)
    assert (first.exit_code, again.exit_code) == (0, 0)
    reports = [ChaosReport.model_validate_json(each.output) for each in (first, again)]
    told = [each.model_dump(exclude={"wall_s"}) for each in reports]
    assert told[0] == told[1]
    assert reports[0].seeds == 1
    assert json.loads(first.output).keys() >= {"seeds", "violations", "not_converged", "coverage", "wall_s"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--seeds", "5"), "--seeds 5: give FROM:TO"),
        (("--seeds", "5:5"), "--seeds 5:5: give FROM:TO"),
        (("--hours", "0"), "--hours 0: give a number"),
        (("no-such.yaml",), "no-such.yaml"),
    ],
)
def test_qm_chaos_refuses_what_it_cannot_do(words: tuple[str, ...], says: str) -> None:
    done = qm("chaos", *words)
    assert done.exit_code == 2
    assert says in done.output
