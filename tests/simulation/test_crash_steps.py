"""Killed before or after any record of a tick, whatever else goes wrong.

The restart believes what a fold of the journal gives, comes to the plan of the one that lived within five ticks, and
asks for nothing twice. `$QM_CRASH_STEPS` half records are tried with each fault, four of them by default.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from autoscaler.adapters.journal import MemoryJournal
from autoscaler.core.beliefs import Beliefs
from autoscaler.core.events import LaunchGranted, LaunchTried
from autoscaler.core.learn import fold
from chaos.swarm.promises import keep
from chaos.world.drivers import Loop
from tests.worlds import fault, row, service, unit, world

STEPS = [half / 2.0 for half in range(int(os.environ.get("QM_CRASH_STEPS", "0")))] or [0.5, 2.5, 4.0, 4.5]
TICK_S = 10.0
CRASH_S = 300.0
RESTARTED_TICKS = 5
FAULTS: dict[str, list[dict[str, Any]]] = {
    "nothing else": [],
    "a dry pool": [fault("dry", 250.0, 100.0, target="od")],
    "answers that are lost": [fault("ambiguous", 250.0, 100.0)],
    "a listing that lags": [fault("describe_lag", 250.0, 100.0, value=30.0)],
    "a notice": [fault("reclaim", 295.0, target="spot")],
    "an instance that dies": [fault("kill", 295.0, target="od")],
    "metrics that are missing": [fault("metrics_gone", 250.0, 100.0)],
    "calls that are throttled": [fault("throttle", 250.0, 100.0, value=0.5)],
    "no view of the cluster": [fault("serving_gone", 250.0, 100.0)],
}


@dataclass
class Outcome:
    """Where a run stands `RESTARTED_TICKS` after the crash."""

    wanted: Counter[str]
    beliefs: Beliefs
    events: list[Any]
    staying: int


def outcome(faults: list[dict[str, Any]], left: float | None) -> Outcome:
    """`left`: the records that the controller writes in the tick of its crash; None: it lives."""
    crash = [] if left is None else [fault("controller_crash", CRASH_S - 1.0, value=left)]
    rows = (row("od", 3), row("spot", 3, market="spot", price_usd_per_h=1.0, notice_s=60.0))
    load = {"kind": "flash", "rps": 1.0, "at_s": 280.0, "factor": 12.0, "ramp_s": 10.0}
    made = world(
        *rows,
        policies=[unit(service(max_replicas=5))],
        demand=[{"service": "support/chat", "synthetic": load, "input_tokens": 500, "output_tokens": 100}],
        faults=[*faults, *crash],
    )
    loop = Loop(made, MemoryJournal())
    for step in range(int(CRASH_S / TICK_S) + RESTARTED_TICKS + 1):
        made.run_until(TICK_S * step)
        made.metrics.sample()
        loop.tick()
    controller = loop._controller
    assert controller is not None
    plan = controller.ledger.beliefs.last_plan
    assert plan is not None
    wanted = Counter({target.service: target.wanted for target in plan.targets})
    events = [record.event for record in loop._journal.kept.read()]
    staying = sum(machine.stays for machine in made.pools.machines.values())
    return Outcome(wanted, controller.ledger.beliefs, events, staying)


tried: list[str] = []


@pytest.mark.parametrize("name", FAULTS)
def test_a_crash_changes_neither_what_is_believed_nor_what_is_planned(name: str) -> None:
    lived = outcome(FAULTS[name], None)
    for left in STEPS:
        restarted = outcome(FAULTS[name], left)
        assert fold(restarted.events) == restarted.beliefs, left
        assert restarted.wanted == lived.wanted, left
        tokens = [event.token for event in restarted.events if isinstance(event, LaunchTried)]
        assert len(tokens) == len(set(tokens)), left
        owned = [key for event in restarted.events if isinstance(event, LaunchGranted) for key in event.instance_ids]
        assert len(owned) == len(set(owned)), left
        assert restarted.staying <= max(lived.staying, 5), left
    tried.append(name)
    if len(tried) == len(FAULTS):
        keep("crashes", {"steps": len(STEPS), "faults": len(FAULTS)})
