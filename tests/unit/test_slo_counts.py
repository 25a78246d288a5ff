"""How many requests keep their limits: counted in the gateway, told by rates, summed in the metrics, the same in the
simulated world as in its report.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from autoscaler.adapters.telemetry import PrometheusTelemetry
from autoscaler.core.events import Observed
from autoscaler.core.model import Measured, Missing
from autoscaler.ledger import Ledger
from chaos.world import simulate
from policies.model import Slo
from tests.gateway_fakes import FakeEngines, Rig, plan, routed, until, variant
from tests.scene import CHAT, Scene, offering, service, unit
from tests.unit.test_core_publish import message_of
from tests.unit.test_metrics_rates import Board, value
from tests.worlds import scenario


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ({}, 1),
        ({"ttft_s": 2.0, "tpot_s": 0.5, "e2e_s": 3.0}, 1),
        ({"ttft_s": 1.9}, 0),
        ({"tpot_s": 0.4}, 0),
        ({"e2e_s": 2.9}, 0),
    ],
)
async def test_an_answer_is_met_when_it_keeps_every_limit(limits: dict[str, float], met: int) -> None:
    """First token after 2 s, two more in the second after."""
    route = routed("u/s", variant("a")).model_copy(update=limits)
    rig = Rig(FakeEngines(a=1), route)
    rig.gateway.apply(plan(route, seq=2))
    replica = rig.engines.all()[0]
    replica.hold_after = 0
    caller = rig.stream(tokens=3)
    await until(lambda: replica.running)
    rig.now_s += 2.0
    replica.hold_after = 1
    replica.released.set()
    replica.released = asyncio.Event()
    await until(lambda: caller.text == "w0 ")
    rig.now_s += 1.0
    replica.released.set()
    await caller.done()
    assert (rig.counters().completed, rig.counters().met) == (1, met)


def test_gateways_are_told_the_limits_of_the_policy_and_the_nearer_end() -> None:
    scene = Scene([unit(service(slo=Slo(ttft_s=2.0, tpot_s=0.1, e2e_s=60.0, deadline_s=50.0)))], [offering("a")])
    scene.load(CHAT, 1.0)
    scene.run(10)
    (route,) = message_of(scene).services
    assert (route.ttft_s, route.tpot_s, route.e2e_s) == (2.0, 0.1, 50.0)


def test_what_ended_is_answered_anywhere_shed_or_failed() -> None:
    board = Board()
    board.report("g1", 1)
    board.chat()
    board.now_s += 10.0
    board.report("g1", 2, arrivals=40, completed=12, overflowed=4, shed=3, failed=1, met=15, queued=20)
    load = board.chat()
    assert (value(load.ended_rps), value(load.met_rps)) == pytest.approx((2.0, 1.5))


def test_the_metrics_sum_rates_over_the_time_between_observations_and_skip_what_was_not_seen() -> None:
    made = Scene([unit(service())], [offering("a")])
    telemetry = PrometheusTelemetry()
    made.controller.ledger.on_event = telemetry.event

    def sums() -> tuple[float | None, float | None]:
        of = telemetry.registry.get_sample_value
        return of("qm_slo_ended_total", {"service": CHAT}), of("qm_slo_met_total", {"service": CHAT})

    made.load(CHAT, 2.0, met=0.75)
    made.run(50.0)
    assert sums() == (80.0, 60.0), "the first observation has nothing before it"
    made.metrics.set_missing(CHAT)
    made.run(30.0)
    assert sums() == (80.0, 60.0)


def test_the_world_tells_its_controller_what_its_report_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = met = before_s = 0.0
    seen: list[Observed] = []
    record = Ledger.record

    def recorded(self: Ledger, happened: Any, *, durable: bool = False) -> Any:
        if isinstance(happened, Observed):
            seen.append(happened)
        return record(self, happened, durable=durable)

    monkeypatch.setattr(Ledger, "record", recorded)
    report = simulate(scenario(rps=2.0), "ours", 1).services[CHAT]
    for one in seen:
        loads = one.observation.loads
        assert not isinstance(loads, Missing)
        for load in loads:
            if isinstance(load.ended_rps, Measured) and isinstance(load.met_rps, Measured):
                ended += load.ended_rps.value * (one.at_s - before_s)
                met += load.met_rps.value * (one.at_s - before_s)
        before_s = one.at_s
    assert report.slo_attainment is not None
    assert ended == pytest.approx(report.requests, rel=0.02)
    assert met == pytest.approx(report.slo_attainment * report.requests, rel=0.02)
