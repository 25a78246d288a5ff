"""`simulate`: what controllers under test see, what their answers do, what becomes of those that misbehave."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from autoscaler.adapters.journal import read_all
from autoscaler.core.events import Forecasted, Opened, Planned
from autoscaler.ports import Misconfigured
from chaos.report import Report
from chaos.world import Sample, UnknownController, facts, simulate
from chaos.world.oracle import future_rps
from tests.worlds import BOOT_S, CHAT, TYPE, Wants, demand, fault, row, scenario, service, unit

KEY = ("support/chat", "l40s", "od")


def kinds(report: Report) -> list[str]:
    return sorted({violation.kind for violation in report.violations})


# ---- the loop --------------------------------------------------------------------------------------------------------
def test_the_loop_serves_a_calm_service() -> None:
    report = simulate(scenario(rps=2.0), "ours", 1)
    chat = report.services[CHAT]
    assert chat.requests == report.requests == pytest.approx(2400, rel=0.1)
    assert chat.slo_attainment is not None
    assert chat.slo_attainment > 0.85  # the first replica takes a minute and a half
    assert 50 < chat.cold_start_misses < 250
    assert (chat.fraction, chat.priority, chat.goal) == (0.95, 500, "latency")
    assert report.launches.granted >= 1
    assert report.violations == ()
    assert (report.scenario, report.controller, report.seed, report.wall_s) == ("small", "ours", 1, 0.0)


def test_a_crashed_controller_restarts_from_its_journal(tmp_path: Path) -> None:
    down = [fault("controller_down", 300, 200)]
    report = simulate(scenario(rps=2.0, faults=down), "quartermaster", 1, journal=tmp_path / "j")
    records = list(read_all(tmp_path / "j"))
    opened = [record.event for record in records if isinstance(record.event, Opened)]
    planned = [record.event.at_s - opened[0].at_s for record in records if isinstance(record.event, Planned)]
    assert len(opened) == 2
    assert not [at_s for at_s in planned if 300.0 <= at_s < 500.0]
    assert report.violations == ()
    assert report.launches.granted == 1


def test_a_journal_on_disk_changes_nothing(tmp_path: Path) -> None:
    """Files are read back for every event, memory keeps the events themselves: both must decide the same."""
    made = scenario(row("od", {"steps": [[0, 3], [600, 1]]}), rps=6.0, faults=[fault("dry", 100, 100)])
    assert simulate(made, "ours", 1, journal=tmp_path) == simulate(made, "ours", 1)


def test_a_journal_is_written_once(tmp_path: Path) -> None:
    simulate(scenario(duration_s=60.0), "ours", 1, journal=tmp_path)
    with pytest.raises(Misconfigured, match="holds a journal already"):
        simulate(scenario(duration_s=60.0), "ours", 1, journal=tmp_path)
    with pytest.raises(UnknownController, match="keeps no journal"):
        simulate(scenario(duration_s=60.0), "trivial", 1, journal=tmp_path / "other")


def test_a_plan_that_breaks_an_invariant_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoscaler.loop.check", lambda *_, **__: ("too many of everything",))
    report = simulate(scenario(duration_s=2000.0), "ours", 1)
    assert kinds(report) == ["check_failed"]
    assert len(report.violations) == 101  # what breaks at every tick does not fill the report
    assert report.violations[-1].detail == "200 in all; the first 100 are listed"
    assert report.violations[0].detail == "too many of everything"


def test_a_perfect_forecast_is_the_largest_rate_of_the_lead(tmp_path: Path) -> None:
    flash = {"kind": "flash", "rps": 1.0, "at_s": 600.0, "factor": 10.0, "hold_s": 300.0}
    made = scenario(demand=[demand(1.0, synthetic=flash)], duration_s=1800.0)
    rates = future_rps(made, CHAT, 1)
    assert rates.shape == (30,)
    assert rates[:9].max() < 3.0 < 8.0 < rates[12:14].mean()
    simulate(made, "oracle-demand", 1, journal=tmp_path)
    events = [record.event for record in read_all(tmp_path)]
    told = {e.at_s - events[0].at_s: e.forecasts[0] for e in events if isinstance(e, Forecasted)}
    assert all(row.member == "oracle" for row in told.values())
    assert told[300.0].quantiles[-1][1] < 3.0
    assert told[550.0].quantiles[-1][1] > 8.0


def test_perfect_supply_differs_in_supply_alone() -> None:
    rows = (row("od", 1), row("dear", 9, price_usd_per_h=9.0, instance_type=TYPE))
    ours, perfect = (simulate(scenario(*rows, rps=12.0), name, 1) for name in ("ours", "oracle-supply"))
    assert ours.requests == perfect.requests
    assert ours.launches.refused.get("no_capacity", 0) + ours.launches.granted > 1
    assert perfect.launches.refused == {}
    assert perfect.cost_usd < ours.cost_usd


# ---- controllers under test ------------------------------------------------------------------------------------------
def test_a_controller_sees_what_design_says() -> None:
    wants = Wants({"od": 2})
    rows = (row("od", 2), row("block", 0, market="block", end_s=9000.0, price_usd_per_h=5.0))
    simulate(scenario(*rows, rps=2.0), wants, 1)
    assert wants.scenario["name"] == "small"
    (shape,) = wants.scenario["shapes"]
    assert (shape["service"], shape["variant"], shape["instance_type"], shape["instance_gpus"]) == (
        CHAT,
        "l40s",
        TYPE,
        1,
    )
    assert shape["capacity_rps"] > 0.5
    assert shape["max_batch"] > 4
    first, late = dict(wants.views)[0.0], dict(wants.views)[600.0]
    assert set(first) == {"services", "offerings", "replicas"}
    assert set(first["services"][CHAT]) == {"arrival_rps", "prefill_tps", "decode_tps", "queued", "running"}
    assert late["services"][CHAT]["arrival_rps"] == pytest.approx(2.0, abs=1.2)
    assert late["offerings"]["od"] == {
        "ready": 2, "starting": 0, "draining": 0, "price_usd_per_h": 2.0, "last_refusal": None, "ends_at_s": None,
    }  # fmt: skip
    assert late["offerings"]["block"]["ends_at_s"] == 9000.0
    replica = {"service": CHAT, "variant": "l40s", "offering": "od", "state": "ready", "since_s": BOOT_S}
    assert late["replicas"] == [replica] * 2


def test_what_is_missing_is_none_and_what_was_refused_is_remembered() -> None:
    wants = Wants({"od": 2})
    faults = [fault("metrics_gone", 300, 100), fault("metrics_frozen", 500, 200), fault("metrics_absurd", 800, 100)]
    simulate(scenario(row("od", 1), rps=2.0, faults=faults), wants, 1)
    views = dict(wants.views)
    assert views[350.0]["services"][CHAT]["arrival_rps"] is None
    assert views[510.0]["services"][CHAT] == views[690.0]["services"][CHAT]
    assert views[850.0]["services"][CHAT]["arrival_rps"] > 1e5
    assert views[1000.0]["offerings"]["od"]["last_refusal"] == {"at_s": 990.0, "class": "no_capacity"}


def test_the_shortfall_is_tried_once_a_tick() -> None:
    report = simulate(scenario(row("od", 1), duration_s=100.0), Wants({"od": 2}), 1)
    assert (report.launches.attempted, report.launches.granted) == (10, 1)
    assert report.launches.refused == {"no_capacity": 9}


class Steps:
    """Wants what a table says from each instant on."""

    def __init__(self, table: dict[float, Any]) -> None:
        self.table = table
        self.views: dict[float, dict[str, Any]] = {}

    def __call__(self, scenario: dict[str, Any]) -> Steps:
        return self

    def decide(self, now_s: float, view: dict[str, Any]) -> Any:
        self.views[now_s] = view
        wanted = self.table[max(at_s for at_s in self.table if at_s <= now_s)]
        return wanted() if callable(wanted) else wanted


def both(count: int, replicas: int | None = None) -> dict[str, Any]:
    return {"instances": {"od": count}, "replicas": {KEY: count if replicas is None else replicas}}


def counts(steps: Steps, at_s: float) -> tuple[int, int, int]:
    offering = steps.views[at_s]["offerings"]["od"]
    return offering["ready"], offering["starting"], offering["draining"]


def test_surplus_goes_starting_first_then_empty_then_newest_drained() -> None:
    steps = Steps({0.0: both(3, 2), 100.0: both(5, 2), 110.0: both(3, 2), 300.0: both(2, 2), 600.0: both(1, 1)})
    simulate(scenario(rps=1.0), steps, 1)
    assert counts(steps, 100.0) == (3, 0, 0)
    assert counts(steps, 110.0) == (3, 2, 0)
    assert counts(steps, 120.0) == (3, 0, 2)
    states = [row["state"] for row in steps.views[320.0]["replicas"]]
    assert states == ["ready", "ready"]  # the empty one went
    assert counts(steps, 400.0) == (2, 0, 0)
    assert counts(steps, 700.0) == (1, 0, 0)
    assert [row["state"] for row in steps.views[700.0]["replicas"]] == ["ready"]


def test_what_is_missing_from_an_answer_is_zero() -> None:
    steps = Steps({0.0: both(2), 300.0: {}})
    report = simulate(scenario(rps=1.0), steps, 1)
    assert counts(steps, 500.0) == (0, 0, 0)
    assert report.services[CHAT].shed > 0
    assert kinds(report) == []


def test_noticed_instances_are_drained_and_replaced_and_what_never_joins_is_given_back() -> None:
    steps = Steps({0.0: both(2)})
    faults = [fault("reclaim", 400, value=0.5)]
    report = simulate(scenario(row("od", notice_s=300.0), rps=1.0, faults=faults), steps, 1)
    assert counts(steps, 410.0) == (1, 1, 1)
    assert counts(steps, 650.0) == (2, 0, 0)
    assert report.services[CHAT].failed == 0

    steps = Steps({0.0: both(1)})
    never = [fault("no_join", 0, 10)]
    report = simulate(scenario(duration_s=2000.0, faults=never), steps, 1)
    assert counts(steps, 1200.0) == (0, 1, 0)
    assert report.launches.granted == 2


# ---- controllers that misbehave --------------------------------------------------------------------------------------
def nan() -> dict[str, Any]:
    return {"instances": {"od": math.nan}}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "decide returned NoneType; it must return a dict"),
        ([1], "decide returned list; it must return a dict"),
        ({"instance": {}}, "decide returned the key 'instance'; there are instances and replicas"),
        ({"instances": [("od", 1)]}, "instances and replicas must be dicts"),
        ({"instances": {"odd": 1}}, "instances names 'odd', which is no offering"),
        ({"instances": {"od": -1}}, "od gets -1; it must be a whole number from 0 to 100,000"),
        ({"instances": {"od": 1.5}}, "od gets 1.5; it must be a whole number from 0 to 100,000"),
        ({"instances": {"od": math.inf}}, "od gets inf; it must be a whole number from 0 to 100,000"),
        (nan(), "od gets nan; it must be a whole number from 0 to 100,000"),
        ({"instances": {"od": "2"}}, "od gets '2'; it must be a whole number"),
        ({"instances": {"od": True}}, "od gets 'True'; it must be a whole number"),
        (
            {"replicas": {"support/chat": 1}},
            "replicas has the key 'support/chat'; it must be (service, variant, offering)",
        ),
        ({"replicas": {("x", "y", "od"): 1}}, "replicas names ('x', 'y'), which is no variant of a service"),
        ({"replicas": {("support/chat", "l40s", "odd"): 1}}, "replicas names 'odd', which is no offering"),
    ],
)
def test_nonsense_is_a_counted_violation_and_the_last_valid_answer_stays(answer: object, says: str) -> None:
    steps = Steps({0.0: both(1), 200.0: answer})
    report = simulate(scenario(duration_s=400.0), steps, 1)
    assert {(v.kind, v.detail) for v in report.violations} == {("controller_nonsense", says)}
    assert len(report.violations) == 20
    assert counts(steps, 390.0) == (1, 0, 0)


def test_numbers_of_numpy_are_numbers() -> None:
    steps = Steps({0.0: {"instances": {"od": np.int64(1)}, "replicas": {KEY: np.float64(1.0)}}})
    assert kinds(simulate(scenario(duration_s=100.0), steps, 1)) == []
    assert counts(steps, 90.0) == (1, 0, 0)


def raises() -> None:
    raise ZeroDivisionError("of load by capacity")


def test_a_controller_that_raises_is_a_counted_violation() -> None:
    report = simulate(scenario(duration_s=400.0), Steps({0.0: both(1), 390.0: raises}), 1)
    (violation,) = report.violations
    assert (violation.at_s, violation.kind) == (390.0, "controller_raised")
    assert violation.detail == "ZeroDivisionError: of load by capacity"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("a_stranger")
    monkeypatch.setitem(sys.modules, "a_stranger", made)
    return made


def test_a_controller_that_never_returns_is_a_violation_and_never_a_hang(module: ModuleType) -> None:
    release = threading.Event()
    module.make = Steps({0.0: both(1), 200.0: release.wait})  # type: ignore[attr-defined]
    started_s = time.monotonic()
    report = simulate(scenario(duration_s=400.0), "a_stranger:make", 1, limit_s=0.3)
    release.set()
    assert time.monotonic() - started_s < 10.0
    (violation,) = report.violations
    assert (violation.at_s, violation.kind) == (200.0, "controller_hung")
    assert violation.detail == "no answer within 0.3 s; its last valid answer stays in force"
    assert report.requests == pytest.approx(400, rel=0.2)


def leaves() -> None:
    sys.exit(3)


def ends() -> None:
    os._exit(0)


class Lazy(dict[str, Any]):
    """Leaves while its answer is read."""

    def items(self) -> Any:
        sys.exit(4)


def prints() -> dict[str, Any]:
    print("to the screen")
    return both(1)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (leaves, ("controller_raised", "SystemExit: 3")),
        (Lazy, ("controller_raised", "SystemExit: 4")),
        (
            ends,
            ("controller_ended", "its process ended with exit code 0; its last valid answer stays in force"),
        ),
        (object, ("controller_nonsense", "decide returned object; it must return a dict")),
        (prints, None),
    ],
)
def test_a_stranger_may_not_end_or_spoil_the_run(
    answer: object, says: tuple[str, str] | None, module: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    module.make = Steps({0.0: both(1), 390.0: answer})  # type: ignore[attr-defined]
    report = simulate(scenario(duration_s=400.0), "a_stranger:make", 1)
    assert [(each.kind, each.detail) for each in report.violations] == ([says] if says else [])
    assert report.services[CHAT].requests == pytest.approx(400, rel=0.2)
    assert capfd.readouterr().out == ""


def test_a_controller_may_lie_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "class Make:\n    def __init__(self, told): ...\n    def decide(self, now_s, view): return {}\n"
    (tmp_path / "lies_here_only.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    report = simulate(scenario(duration_s=60.0), "lies_here_only:Make", 1)
    assert report.controller == "lies_here_only:Make"
    assert report.violations == ()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no-such", "no-such is no controller; give module:attr, or one of ours, quartermaster,"),
        ("no_such_module:make", "cannot be imported: ModuleNotFoundError"),
        ("a_stranger:missing", "cannot be imported: AttributeError"),
        ("a_stranger:number", "a_stranger:number is int, not something that can be called"),
        ("a_stranger:broken", "its factory failed: ZeroDivisionError: of load by capacity"),
        ("a_stranger:stuck", "its factory failed: no answer within 0.2 s"),
        ("a_stranger:idle", "its factory failed: what it made is int, which has no decide(now_s, view)"),
    ],
)
def test_a_controller_that_cannot_be_had_is_said_before_anything_runs(name: str, says: str, module: ModuleType) -> None:
    def broken(_: object) -> None:
        raises()

    forever: Callable[[object], bool] = lambda _: threading.Event().wait(5.0)  # noqa: E731
    module.number, module.broken, module.stuck = 3, broken, forever  # type: ignore[attr-defined]
    module.idle = lambda _: 7  # type: ignore[attr-defined]
    with pytest.raises(UnknownController) as said:
        simulate(scenario(), name, 1, limit_s=0.2)
    assert says in str(said.value)


# ---- scores and samples ----------------------------------------------------------------------------------------------
def test_changes_of_direction_are_of_the_services_total() -> None:
    table = {0.0: both(1), 100.0: both(3), 200.0: both(2), 300.0: both(1), 350.0: both(2)}
    assert simulate(scenario(duration_s=400.0), Steps(table), 1).direction_changes == 2


def test_inversion_is_a_lower_priority_on_gpus_that_a_higher_one_waits_for() -> None:
    low = service("low", priority=10, min_replicas=0)
    high = service("high", priority=900, preemption_grace_s=60.0)
    policies = [unit(low, high)]
    load = [demand(0.2, "support/low"), demand(1.0, "support/high")]
    wants = Wants({"od": 1}, {("support/low", "l40s", "od"): 1})
    report = simulate(scenario(row("od", 1), policies=policies, demand=load), wants, 1)
    # Low is placed at 60 s; high waits from the first tick on, which its grace covers up to 70 s.
    assert report.priority_inversion_s == pytest.approx(1200.0 - 80.0, abs=20.0)
    fair = Wants({"od": 1}, {("support/high", "l40s", "od"): 1})
    assert simulate(scenario(row("od", 1), policies=policies, demand=load), fair, 1).priority_inversion_s == 0.0


class Seen:
    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def sample(self, sample: Sample) -> None:
        self.samples.append(sample)


def test_a_watch_sees_every_tick_and_changes_nothing() -> None:
    made, seen = scenario(rps=2.0, faults=[fault("dry", 0, 200)]), Seen()
    report = simulate(made, "ours", 1, watch=seen)
    assert report == simulate(made, "ours", 1)
    assert [sample.at_s for sample in seen.samples] == [10.0 * n for n in range(120)]
    last = seen.samples[-1]
    (chat,) = last.services
    assert chat.ready >= 1
    assert chat.forecast
    assert chat.lead_s > 0.0
    assert sum(sample.services[0].arrived for sample in seen.samples) == pytest.approx(report.requests, abs=40)
    assert last.cost_usd == pytest.approx(report.cost_usd, rel=0.02)
    assert last.refused == sum(report.launches.refused.values()) > 0
    (offering,) = last.offerings
    assert (offering.size, offering.price_usd_per_h, offering.ready) == (8, 2.0, chat.ready)


def test_the_mean_mix_of_agents_counts_their_growing_context() -> None:
    agents = {"kind": "agents", "rps": 1.0, "calls": [3, 3], "grow_tokens": 100.0}
    made = scenario(demand=[demand(1.0, synthetic=agents, input_tokens=1000, output_tokens=50)])
    single = facts(scenario(), 1)["shapes"][0]
    (shape,) = facts(made, 1)["shapes"]
    assert single["input_tokens"] == pytest.approx(500, rel=0.1)
    assert shape["output_tokens"] == pytest.approx(50, rel=0.1)
    assert shape["input_tokens"] == pytest.approx(1000 + 150, rel=0.15)
