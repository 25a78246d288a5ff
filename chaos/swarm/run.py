"""One seed from its first second until it has settled: the verdict of a run, as plain values.

May not read a clock: how long a run took is measured by whoever starts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from pydantic import BaseModel, ConfigDict

from autoscaler.adapters.journal import MemoryJournal
from autoscaler.core.beliefs import Beliefs
from autoscaler.core.events import EVENT, Event
from autoscaler.core.model import CloudView
from autoscaler.loop import Controller
from autoscaler.ports import Cloud, Journal
from chaos.faults import INSTANT
from chaos.report import Violation
from chaos.scenario import Scenario
from chaos.world.drivers import Loop
from chaos.world.runs import SEGMENT_RECORDS, few_collections
from chaos.world.tally import RESERVED
from chaos.world.world import World

from .checks import Checks
from .draw import HEALING_S

STILL_S = 60.0
FULL_DISK = "journal_unwritable"


class Run(BaseModel):
    """What became of a run. `settled_after_s`: from the last fault's end, None when it never did, and `unsettled` says
    why. `tail`: the last events before the first violation, or before the end of a run that did not settle.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    seed: int
    kinds: tuple[str, ...]
    violations: tuple[Violation, ...]
    settled_after_s: float | None
    unsettled: str = ""
    transitions: tuple[str, ...] = ()
    attainment: float | None = None
    cost_usd: float = 0.0
    direction_changes: int = 0
    inversion_s: float = 0.0
    reaction_s: float | None = None
    tail: tuple[str, ...] = ()
    cpu_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a promise was broken, or it did not settle."""
        return bool(self.violations) or self.settled_after_s is None


class Inspected:
    """ports.Cloud, with somebody who looks before each call."""

    def __init__(self, cloud: Cloud, checks: Checks) -> None:
        self._cloud, self._checks = cloud, checks

    def describe(self, now_s: float) -> CloudView:
        """See ports.Cloud."""
        return self._cloud.describe(now_s)

    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        """See ports.Cloud."""
        self._checks.launching(token)
        return self._cloud.launch(offering, count, token)

    def terminate(self, instance_id: str) -> None:
        """See ports.Cloud."""
        self._checks.terminating(instance_id)
        self._cloud.terminate(instance_id)


class Watched(Loop):
    """The loop under the checkers' eyes; a second controller is nobody's business."""

    def __init__(self, world: World, journal: Journal) -> None:
        super().__init__(world, journal)
        self.checks = Checks(world, self._journal)

    def event(self, event: Event, beliefs: Beliefs) -> None:
        """See Loop."""
        super().event(event, beliefs)
        self.checks.event(event, beliefs)

    def start(self, journal: Journal) -> Controller:
        """See Loop."""
        controller = super().start(journal)
        if journal is self._journal:
            controller.cloud = Inspected(controller.cloud, self.checks)
        else:
            controller.ledger.on_event = _unwatched
        return controller

    @property
    def beliefs(self) -> Beliefs | None:
        """What the controller believes now; None while there is none."""
        return self._controller.ledger.beliefs if self._controller is not None else None


def _unwatched(event: Event, beliefs: Beliefs) -> None:
    """Nobody looks."""


def run(scenario: Scenario, *, until_broken: bool = False) -> Run:
    """Run it until it has settled after its last fault, its own duration at most; or until a promise is broken."""
    world = World(scenario, scenario.seed)
    loop = Watched(world, MemoryJournal(segment_records=SEGMENT_RECORDS))
    healed_s = max([end_s(fault) for fault in scenario.faults], default=0.0)
    least_s = max(healed_s, scenario.duration_s - HEALING_S)
    still_s, settled_s, why = 0.0, None, ""
    tail: tuple[str, ...] = ()
    with few_collections(), closing(loop):
        for step in range(math.ceil(scenario.duration_s / scenario.tick_s)):
            at_s = step * scenario.tick_s
            world.run_until(at_s)
            world.metrics.sample()
            loop.tick()
            world.scores.tick()
            loop.checks.tick(at_s)
            tail = tail or (_told(loop) if _real(world) else ())
            if tail and until_broken:
                break
            why = next(unsettled(world, loop.beliefs), "") if at_s > healed_s else "faults"
            still_s = 0.0 if why else still_s + scenario.tick_s
            settled_s = at_s - healed_s if still_s > STILL_S and settled_s is None else settled_s
            if settled_s is not None and at_s >= least_s:
                break
        world.finish()
    violations = tuple(_real(world))
    return Run(
        seed=scenario.seed,
        kinds=tuple(sorted({fault.kind for fault in scenario.faults})),
        violations=violations,
        settled_after_s=settled_s,
        unsettled="" if settled_s is not None else why,
        transitions=tuple(sorted(loop.checks.transitions)),
        tail=tail if violations else _told(loop) if settled_s is None else (),
        **_scores(world),
    )


def end_s(fault: Any) -> float:
    """When a fault is over."""
    return float(fault.at_s if fault.kind in INSTANT else fault.at_s + fault.for_s)


def _told(loop: Watched) -> tuple[str, ...]:
    return tuple(EVENT.dump_json(event).decode() for event in loop.checks.tail)


def _real(world: World) -> list[Violation]:
    """Violations but for ticks that a full disk stopped: to stop is what is promised there. Of more than are listed of
    a kind the world says the number in words.
    """
    failed = [each for each in world.violations if each.kind == "tick_failed"]
    other = [each for each in failed if FULL_DISK not in each.detail and not each.detail.endswith("are listed")]
    return [each for each in world.violations if each not in failed or each in other]


def _scores(world: World) -> dict[str, Any]:
    totals = [world.engine.totals(number) for number in world.numbers.values()]
    asked = sum(each.requests for each in totals)
    return {
        "attainment": sum(each.met for each in totals) / asked if asked else None,
        "cost_usd": world.tally.cost_usd(),
        "direction_changes": world.scores.direction_changes,
        "inversion_s": world.scores.priority_inversion_s,
        "reaction_s": max(world.tally.rungs_s.values(), default=None),
    }


# ---- after healing --------------------------------------------------------------------------------------------------
def unsettled(world: World, beliefs: Beliefs | None) -> Iterator[str]:
    """Why the world is not at rest: something leaks, is stuck, or is not what was asked for."""
    if beliefs is None or beliefs.last_plan is None:
        yield "no controller runs"
        return
    yield from _instances(world, beliefs)
    yield from _replicas(world)
    yield from _short(world, beliefs)


def _instances(world: World, beliefs: Beliefs) -> Iterator[str]:
    for name, machine in world.pools.machines.items():
        if machine.stopped_at_s < math.inf:
            continue
        node = world.cluster.nodes.get(name)
        if name not in beliefs.instances:
            yield f"{name} is paid for and nobody knows of it"
        elif node is None:
            yield f"{name} on {machine.row.id} is not in the cluster"
        elif not node.open:
            yield f"{name} on {machine.row.id} is being drained"
        elif not node.replicas and machine.row.supply.market not in RESERVED:
            yield f"{name} on {machine.row.id} serves nothing"


def _replicas(world: World) -> Iterator[str]:
    for app, target in world.serving.targets.items():
        ready = sum(replica.state == "ready" for replica in world.cluster.of(app))
        if ready != target:
            yield f"{app} has {ready} ready replicas of {target}"


def _short(world: World, beliefs: Beliefs) -> Iterator[str]:
    """A service that lacks replicas, or its floor, though there is room for it that its unit may use."""
    assert beliefs.last_plan is not None
    limited = {
        target.service
        for target in beliefs.last_plan.targets
        if any(reason.code in ("quota_gpus", "budget", "budget_month") for reason in target.reasons)
    }
    for shortfall in beliefs.last_plan.shortfalls:
        entry = world.entries[shortfall.service]
        kinds = {variant.instance_type for variant in entry.variants}
        roomy = [
            row.id
            for row in world.pools.rows.values()
            if row.supply.instance_type in kinds and row.supply.market in entry.markets
            and not (row.supply.market == "spot" and entry.on_demand_floor)
            and world.pools.count(row) > len(row.machines) and row.supply.end_s is None
        ]  # fmt: skip
        if roomy and shortfall.service not in limited and not world.scenario.quotas:
            yield f"{shortfall.service} lacks {shortfall.replicas} replicas, and {roomy[0]} has room"
