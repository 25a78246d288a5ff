"""One simulated world: pools, cluster, engine, faults and sums on one timeline, and the ports to it.

May not decide anything: a driver (`drivers`) does that at every tick. All randomness comes from the seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autoscaler.core.publish import QUEUE_MIN, queue_timeout_s
from autoscaler.render import SHUTDOWN_MIN_S
from chaos.engine import Engine, ServiceSpec
from chaos.report import Violation
from chaos.scenario import Fault, Scenario
from chaos.streams import arrivals
from policies.model import Service

from .cloud import WorldCloud
from .cluster import App, Cluster
from .faults import Faults, value
from .metrics import WorldMetrics
from .scores import Scores
from .serving import Gateways, WorldServing
from .supply import Machine, Pools
from .tally import Tally
from .timeline import Timeline
from .truth import true_timing

VIOLATIONS_KEPT = 100  # of each kind; what breaks once a tick would fill the report
SETTLE_S = 900.0  # what is in flight at the end may finish


@dataclass
class Clock:
    """ports.Clock: the scenario's UTC, wrong by what the clock faults say."""

    timeline: Timeline
    faults: Faults
    epoch_s: float

    def now_s(self) -> float:
        """See ports.Clock."""
        now_s = self.timeline.now_s
        wrong_s = sum(value(fault) for fault in self.faults.active("clock_step"))
        wrong_s += sum(value(fault) * (now_s - fault.at_s) for fault in self.faults.active("clock_drift"))
        return self.epoch_s + now_s + wrong_s


class World:
    """Everything of one run. `generous`: perfect supply (`supply.Pools`)."""

    def __init__(self, scenario: Scenario, seed: int, *, generous: bool = False) -> None:
        self.scenario, self.seed = scenario, seed
        self.timeline = Timeline()
        self.tally = Tally()
        self.violations: list[Violation] = []
        self._seen: Counter[str] = Counter()
        epoch_s = scenario.start_at_s
        self.faults = Faults(scenario, seed, self.timeline)
        self.clock = Clock(self.timeline, self.faults, epoch_s)
        self.entries = {key: entry for key, _, entry in scenario.policy_set.services()}
        self.numbers = {key: number for number, key in enumerate(self.entries)}
        self.waits_s = {key: queue_timeout_s(entry, self._lead_s(key)) for key, entry in self.entries.items()}
        self.engine = Engine([self._spec(key, entry) for key, entry in self.entries.items()])
        self.pools = Pools(scenario, seed, self.timeline, self.faults, self.tally, generous)
        self.cluster = Cluster(
            scenario, seed, self.timeline, self.faults, self.tally, self.engine, self._apps(), epoch_s
        )
        self.pools.joined, self.pools.lost = self.cluster.join, self._lost
        self.cloud = WorldCloud(
            self.pools,
            self.timeline,
            self.faults,
            self.tally,
            epoch_s,
            scenario.describe_lag_s,
            scenario.api_rate_per_s,
        )
        self.gateways = Gateways(self.engine, self.cluster.apps, self.numbers)
        self.serving = WorldServing(
            self.cluster,
            self.gateways,
            self.faults,
            self.timeline,
            epoch_s,
            dict.fromkeys(sorted(self.cluster.apps), 0),
        )
        self.metrics = WorldMetrics(self.engine, self.cluster, self.numbers, self.faults, self.timeline)
        quotas = {unit.unit: unit.quota_gpus for unit in scenario.policy_set.units}
        self.scores = Scores(self.entries, quotas, self.cluster, self.metrics, self.timeline)
        self.faults.on("overflow_gone", self._overflow)
        self.faults.begin()

    # ---- building ---------------------------------------------------------------------------------------------------
    def _lead_s(self, service: str) -> float:
        leads = [s.boot_prior_s + s.load_prior_s for s in self.scenario.shapes if s.service == service]
        return min(leads, default=0.0)

    def _spec(self, key: str, entry: Service) -> ServiceSpec:
        slo, overflow = entry.slo, entry.overflow if "overflow" in entry.sacrifice else None
        return ServiceSpec(
            service=key,
            priority=entry.priority,
            arrivals=arrivals(self.scenario, key, self.seed),
            ttft_s=slo.ttft_s or math.inf,
            tpot_s=slo.tpot_s or math.inf,
            e2e_s=slo.e2e_s or math.inf,
            deadline_s=slo.deadline_s or math.inf,
            queue_timeout_s=self.waits_s[key],
            max_queued=QUEUE_MIN,
            can_queue="queue" in entry.sacrifice,
            can_shed="shed" in entry.sacrifice,
            overflow_first=_before("overflow", "queue", entry.sacrifice),
            overflow_rpm=float(overflow.rpm) if overflow else 0.0,
            overflow_usd_per_1m_tokens=overflow.usd_per_1m_tokens if overflow else 0.0,
        )

    def _apps(self) -> dict[str, App]:
        """Every variant of every service, numbered within it in order of name."""
        true = true_timing(self.scenario, self.seed)
        apps: dict[str, App] = {}
        variants: Counter[str] = Counter()
        for shape in sorted(self.scenario.shapes, key=lambda shape: (shape.service, shape.variant)):
            app = App(
                service=shape.service,
                variant=shape.variant,
                number=(self.numbers[shape.service], variants[shape.service]),
                shape=shape,
                timing=true[shape.service, shape.variant],
                shutdown_s=max(SHUTDOWN_MIN_S, self.entries[shape.service].slo.e2e_s or 0.0),
                slots=shape.timing.max_num_seqs,
            )
            variants[shape.service] += 1
            apps[app.name] = app
        return apps

    # ---- time -------------------------------------------------------------------------------------------------------
    def run_until(self, at_s: float) -> None:
        """Let the world go on up to `at_s`."""
        self.timeline.run_until(at_s, self.engine.advance)

    def finish(self) -> None:
        """The scenario is over: sums are closed, and what is in flight ends as it would."""
        self.tally.settle(self.timeline.now_s)
        self.engine.advance(self.timeline.now_s + SETTLE_S)
        for key, number in self.numbers.items():
            self.tally.pay("overflow", key.split("/")[0], self.engine.totals(number).overflow_usd)
        for kind, count in self._seen.items():
            if count > VIOLATIONS_KEPT:
                self._add(kind, f"{count} in all; the first {VIOLATIONS_KEPT} are listed")

    def violate(self, kind: str, detail: str) -> None:
        """A broken invariant, counted; of each kind only the first are kept in full."""
        self._seen[kind] += 1
        if self._seen[kind] <= VIOLATIONS_KEPT:
            self._add(kind, detail)

    def _add(self, kind: str, detail: str) -> None:
        self.violations.append(Violation(at_s=self.timeline.now_s, kind=kind, detail=detail))

    # ---- what happens -----------------------------------------------------------------------------------------------
    def _lost(self, machine: Machine) -> None:
        self.cluster.lose(machine)

    def _overflow(self, fault: Fault) -> None:
        gone = self.faults.active("overflow_gone")
        for key, entry in self.entries.items():
            if entry.overflow is not None and "overflow" in entry.sacrifice and fault.target in ("*", key):
                out = any(each.target in ("*", key) for each in gone)
                self.engine.set_overflow_rpm(self.numbers[key], 0.0 if out else float(entry.overflow.rpm))


def _before(first: str, second: str, words: Sequence[str]) -> bool:
    """Whether `first` stands before `second` in `words`, or alone."""
    return first in words and (second not in words or words.index(first) < words.index(second))
