"""What our own code raises: the tick goes on with what it has, says so, and neither a restart nor a replay stumbles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from autoscaler.adapters.telemetry import PrometheusTelemetry
from autoscaler.commands.run import _Watch
from autoscaler.core import demand, learn, series
from autoscaler.core.beliefs import EMPTY
from autoscaler.core.defects import defect
from autoscaler.core.events import CheckFailed, Forecasted, Observed, Planned, PolicyRefused
from autoscaler.core.learn import fold
from autoscaler.core.model import Missing
from autoscaler.core.reasons import ReasonCode
from autoscaler.core.snapshot import save
from autoscaler.replay import replay
from autoscaler.software import versions
from tests.scene import Scene, offering, service, unit

CHAT, CODE = "support/chat", "support/code"
UNLEARNABLE_RPS = 13.0


def scene() -> Scene:
    """Two services that run, one replica each."""
    made = Scene(units=[unit(service("chat"), service("code"))], offerings=[offering("a", count=8)])
    made.load(CHAT, 0.5)
    made.load(CODE, 0.5)
    made.run(300.0)
    return made


def raising(*_: Any, **__: Any) -> Any:
    raise ValueError("boom")


def last(made: Scene, kind: type) -> Any:
    return [event for event in made.events if isinstance(event, kind)][-1]


def tick(made: Scene) -> None:
    made.controller.tick()
    made.clock.advance(10.0)


@pytest.fixture
def unlearnable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that `learn` trips over."""
    real = learn._learn_load

    def load(known: Any, seen: Any, at_s: float) -> Any:
        if getattr(seen.arrival_rps, "value", 0.0) == UNLEARNABLE_RPS:
            raise KeyError("p3")
        return real(known, seen, at_s)

    monkeypatch.setattr(learn, "_learn_load", load)


@pytest.mark.usefixtures("unlearnable")
def test_an_observation_that_cannot_be_learnt_leaves_the_last_targets_in_force() -> None:
    made = scene()
    before, launches = made.serving.published[-1], len(made.cloud.launches)
    made.load(CHAT, UNLEARNABLE_RPS)
    tick(made)
    (violation,) = last(made, CheckFailed).violations
    assert violation.startswith("defect: KeyError: 'p3' at learn.py:")
    assert violation.endswith("(observed not learnt)")
    assert made.serving.published[-1].targets == before.targets
    assert made.serving.published[-1].seq == before.seq + 1
    assert len(made.cloud.launches) == launches


@pytest.mark.usefixtures("unlearnable")
def test_a_journal_whose_tail_cannot_be_learnt_is_started_from_and_replays() -> None:
    made = scene()
    made.load(CHAT, UNLEARNABLE_RPS)
    tick(made)
    assert made.controller.ledger.beliefs.defect
    made.start()
    tick(made)  # met again in the journal, and again in the world
    assert last(made, CheckFailed).plan_id.startswith(made.beliefs.run_id)
    made.start()
    made.load(CHAT, 6.0)
    tick(made)
    assert made.beliefs.defect == ""
    assert sum(target.wanted for target in last(made, Planned).plan.targets if target.service == CHAT) > 1
    assert save(fold(made.events)) == save(made.beliefs)
    found = replay(made.journal.records, versions())
    assert (found.check_failures, found.differences) == (2, [])


def test_what_is_mended_shows_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scene()
    with monkeypatch.context() as patched:
        patched.setattr("autoscaler.loop.decide", raising)
        tick(made)
    (found,) = replay(made.journal.records, versions()).differences
    assert found.changes[0].startswith("violations: defect: ValueError: boom at ")
    assert found.changes[0].endswith(" → none")
    monkeypatch.setattr("autoscaler.loop.check", raising)
    broken = replay(made.journal.records, versions()).differences
    assert broken[0].changes[0].startswith("violations: none → defect: ValueError: boom")


@pytest.mark.parametrize("step", ["decide", "check"])
def test_a_decision_that_raises_is_not_acted_on_and_the_next_one_is(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scene()
    targets, launches = made.serving.published[-1].targets, len(made.cloud.launches)
    made.load(CHAT, 6.0)
    with monkeypatch.context() as patched:
        patched.setattr(f"autoscaler.loop.{step}", raising)
        tick(made)
    assert last(made, CheckFailed).violations[0].startswith("defect: ValueError: boom at loop.py:")
    assert made.serving.published[-1].targets == targets
    assert len(made.cloud.launches) == launches
    tick(made)
    assert len(made.cloud.launches) > launches


def test_a_plan_that_cannot_be_learnt_is_not_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scene()
    launches = len(made.cloud.launches)
    made.load(CHAT, 6.0)
    real, at_s = learn._planned, made.clock.at_s
    monkeypatch.setitem(learn._HANDLERS, Planned, lambda b, e: raising() if e.at_s == at_s else real(b, e))
    tick(made)
    assert last(made, CheckFailed).violations[0].endswith("(planned not learnt)")
    assert len(made.cloud.launches) == launches
    tick(made)
    assert len(made.cloud.launches) > launches
    assert replay(made.journal.records, versions()).differences == []


# ---- forecasts ------------------------------------------------------------------------------------------------------
def failing_for(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = series.mix_ahead

    def mix_ahead(known: Any, name: str, lead: float) -> Any:
        return raising() if name == key else real(known, name, lead)

    monkeypatch.setattr(demand, "mix_ahead", mix_ahead)


def test_a_service_whose_forecaster_raises_keeps_its_last_forecast_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scene()
    before = made.beliefs.forecasts
    failing_for(CHAT, monkeypatch)
    plan = made.run(10.0)
    chat, code = (made.beliefs.forecasts[key] for key in (CHAT, CODE))
    assert chat.failed.startswith("defect: ValueError: boom at demand.py:")
    assert (chat.quantiles, chat.member) == (before[CHAT].quantiles, before[CHAT].member)
    assert code.failed == ""
    reasons = {row.service: [reason.code for reason in row.reasons] for row in plan.demands}
    assert ReasonCode.FORECAST_FAILED in reasons[CHAT]
    assert ReasonCode.FORECAST_FAILED not in reasons[CODE]


def test_while_forecasts_fail_what_is_seen_is_followed_upwards(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scene()
    failing_for(CHAT, monkeypatch)
    made.load(CHAT, 6.0)
    assert dict(made.run(10.0).demands[0].reasons[0].numbers)["arrival_rps"] == 6.0
    made.load(CHAT, 0.5)
    assert dict(made.run(10.0).demands[0].reasons[0].numbers)["arrival_rps"] == 6.0


def test_a_forecaster_that_never_worked_leaves_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "short_forecast", raising)
    made = Scene(units=[unit(service("chat"))], offerings=[offering("a")])
    made.load(CHAT, 3.0)
    made.run(20.0)
    row = made.beliefs.forecasts[CHAT]
    assert (row.member, {rps for _, rps in row.quantiles}) == ("last_value", {3.0})


# ---- ports ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("port", "call", "view"),
    [("metrics", "loads", "loads"), ("serving", "observe", "serving"), ("cloud", "describe", "cloud")],
)
def test_a_port_with_a_defect_says_nothing_and_why(
    port: str, call: str, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene()
    with monkeypatch.context() as patched:
        patched.setattr(getattr(made, port), call, raising)
        tick(made)
    seen = getattr(last(made, Observed).observation, view)
    assert isinstance(seen, Missing)
    assert seen.why.startswith("defect: ValueError: boom at loop.py:")


def test_a_policy_source_with_a_defect_is_a_refused_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scene()
    monkeypatch.setattr(made.controller.policy_source, "poll", raising)
    made.run(10.0)
    assert last(made, PolicyRefused).problems[0].startswith("defect: ValueError: boom")
    assert made.beliefs.policy == made.policy


def test_metrics_that_raise_are_logged_and_counted_and_the_plan_is_carried_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene()
    metrics = PrometheusTelemetry()
    monkeypatch.setattr(metrics, "event", raising)
    made.controller.ledger.on_event = _Watch(metrics).event
    launches = len(made.cloud.launches)
    made.load(CHAT, 6.0)
    made.run(10.0)
    assert len(made.cloud.launches) > launches
    assert "event not shown in the metrics: kind=planned why=defect: ValueError: boom" in capsys.readouterr().err
    assert (metrics.registry.get_sample_value("qm_telemetry_failures_total") or 0.0) >= 4.0


@pytest.mark.usefixtures("unlearnable")
def test_what_was_not_learnt_forecast_or_acted_on_is_a_line_in_the_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene()
    made.controller.ledger.on_event = _Watch(PrometheusTelemetry()).event
    failing_for(CODE, monkeypatch)
    made.load(CHAT, UNLEARNABLE_RPS)
    tick(made)
    lines = [line.split("] ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    begins = ("event not learnt: why=defect: KeyError", "forecast failed, ", "plan not acted on, ")
    assert len(lines) == 3
    assert all(line.startswith(words) for line, words in zip(lines, begins, strict=True))
    assert f"service={CODE} why=defect: ValueError: boom" in lines[1]
    assert " why=defect: KeyError: 'p3'" in lines[2]


# ---- how a defect is told -------------------------------------------------------------------------------------------
def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return defect(error)
    raise AssertionError


def test_the_same_fault_is_told_in_the_same_words_on_one_line() -> None:
    def fault() -> None:
        raise RuntimeError(f"{object()} is\nodd{'!' * 900}")

    first, second = told(fault), told(fault)
    assert first == second
    assert first.startswith("defect: RuntimeError: <object object> is odd!!!")
    assert "\n" not in first
    assert len(first) < 400
    assert first.split(" at ")[-1].split(" ")[-1].startswith("test_defects.py:")


def test_an_unreadable_snapshot_does_not_keep_a_controller_from_starting() -> None:
    from autoscaler.core.events import Snapshot

    after = learn.learn(EMPTY, Snapshot(at_s=5.0, beliefs_json='{"at_s": "long ago"}'))
    assert after.defect.startswith("defect: ValidationError")
    assert after.at_s == 5.0


HANGS = """
import threading, types
from autoscaler.commands import run
run.HANG_MIN_S, run.HANG_TICKS = 0.3, 0.0
class Hung:
    def tick(self):
        threading.Event().wait(60.0)
options = types.SimpleNamespace(tick_s=0.1, once=True, json_file=None)
run._Ticker(Hung, run.PrometheusTelemetry(), threading.Event(), options).run()
"""


def test_a_tick_that_hangs_ends_the_process_and_says_where() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"in tick" in done.stderr
    assert b"Timeout" in done.stderr


def test_forecasts_of_a_journal_from_before_have_not_failed() -> None:
    made = scene()
    assert {row.failed for event in made.events if isinstance(event, Forecasted) for row in event.forecasts} == {""}
