"""`qm bench decide`: what one decision costs, and what it decides, on problems made at random.

A problem has services with a few variants each, offerings of which three in ten are dry, unit quotas that bind, and
demand that moves by up to a fifth every tick, so that no tick finds nothing to do. What a plan asks for is carried out
between ticks: launches are granted at once, replicas stand where there is room, drained instances leave. Only `decide`
is timed, by the CPU's clock. Periods are consecutive ticks of one problem; the same seed makes the same problems.
"""

from __future__ import annotations

import json
import resource
import time  # noqa: TID251  # a benchmark times real code
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from autoscaler.commands.outcome import OK, write_json
from autoscaler.core.beliefs import EMPTY, Beliefs, OfferingBelief
from autoscaler.core.decide import decide
from autoscaler.core.events import Configured, Forecast, Forecasted, Observed, Planned
from autoscaler.core.learn import learn
from autoscaler.core.model import (
    CloudInstance,
    CloudView,
    Measured,
    Node,
    Observation,
    Offering,
    Plan,
    Replica,
    ServiceLoad,
    ServingView,
    Shape,
)
from policies.model import PolicySet, Service, Slo, Unit, Variant
from serve_apps.wire import app_name

from .bench import shapes_of
from .bench_bound import Fleet, least_usd_per_h

TICK_S = 10.0
WARM_UP = 3  # ticks that build the fleet
DRY, SWING = 0.3, 0.2
UNITS = 4
BINDS = 0.9  # a unit's quota, of what its services want on average
START_S = 1_800_000_000.0
LONG_S = 1e9


@dataclass(frozen=True, slots=True)
class Size:
    """Services × offerings × consecutive ticks."""

    services: int
    offerings: int
    periods: int


def decide_command(size: Size, problems: int, json_file: str | None, *, bound: bool = False) -> int:
    """Run the benchmark and show it; always 0, because a slow machine is no fault."""
    figures = bench_decide(size, problems) | (gap_to_bound(size, problems) if bound else {})
    if json_file:
        write_json(json_file, json.dumps(figures).encode())
    else:
        print("  ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    return OK


def bench_decide(size: Size, problems: int, seed: int = 1) -> dict[str, float]:
    """`{p50_ms, p99_ms, max_ms, rss_mib, decisions, replicas, instances}` over all periods of all problems."""
    took_ms: list[float] = []
    replicas = instances = 0
    for number in range(problems):
        problem = Problem(size, np.random.default_rng([seed, number]))
        for period in range(WARM_UP + size.periods):
            problem.tick()
            if period >= WARM_UP:
                took_ms.append(1000.0 * problem.decided_s)
        replicas, instances = max(replicas, len(problem.replicas)), max(instances, len(problem.instances))
    return {
        "p50_ms": float(np.percentile(took_ms, 50)),
        "p99_ms": float(np.percentile(took_ms, 99)),
        "max_ms": max(took_ms),
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
        "decisions": float(len(took_ms)),
        "replicas": float(replicas),
        "instances": float(instances),
    }


def gap_to_bound(size: Size, problems: int, seed: int = 1) -> dict[str, float]:
    """`{gap_to_bound, gap_p90, gap_first}`: price of the decided fleets ÷ HiGHS's dual bound for serving as much, − 1.

    The mean over the problems, each over all its periods together; the 90th percentile of that; and the mean of the
    first tick alone, in which there is no fleet yet that has to be kept.
    """
    gaps, firsts = [], []
    for number in range(problems):
        problem = Problem(size, np.random.default_rng([seed, number]))
        pairs = []
        for _ in range(WARM_UP + size.periods):
            problem.tick()
            fleet = problem.fleet()
            pairs.append((fleet.usd_per_h, least_usd_per_h(fleet)))
        timed = pairs[WARM_UP:]
        gaps.append(sum(usd for usd, _ in timed) / sum(least for _, least in timed) - 1.0)
        firsts.append(pairs[0][0] / pairs[0][1] - 1.0)
    return {
        "gap_to_bound": float(np.mean(gaps)),
        "gap_p90": float(np.percentile(gaps, 90)),
        "gap_first": float(np.mean(firsts)),
    }


@dataclass
class Problem:
    """One random problem and its fleet. `replicas` pairs each replica with its application and its instance."""

    size: Size
    rng: np.random.Generator
    at_s: float = START_S
    decided_s: float = 0.0
    beliefs: Beliefs = EMPTY
    instances: dict[str, str] = field(default_factory=dict)
    replicas: dict[str, tuple[Shape, str]] = field(default_factory=dict)
    plan: Plan | None = None
    _made: int = 0

    def __post_init__(self) -> None:
        self.offerings = _offerings(self.size.offerings, self.rng)
        kinds = sorted({one.instance_type for one in self.offerings})
        self.means = {f"u{n % UNITS}/s{n:04d}": float(self.rng.uniform(5.0, 50.0)) for n in range(self.size.services)}
        self.policy = _policy(self.means, kinds, self.rng)
        shapes = shapes_of(self.policy)
        dry = self.rng.permutation(len(self.offerings))[: round(DRY * len(self.offerings))]
        self._dry = frozenset(self.offerings[k].offering for k in dry)
        self.beliefs = learn(
            replace(EMPTY, offerings={name: _dry() for name in sorted(self._dry)}),
            Configured(at_s=self.at_s, policy=self.policy, shapes=shapes, digest="bench"),
        )
        self._by_app = {app_name(shape.service, shape.variant): shape for shape in shapes}

    def tick(self) -> Plan:
        """Demand moves, is observed and decided upon, and the plan is carried out."""
        self.at_s += TICK_S
        rates = {key: mean * float(self.rng.uniform(1 - SWING, 1 + SWING)) for key, mean in self.means.items()}
        seen = self._observation(rates)
        self.beliefs = learn(self.beliefs, Observed(at_s=self.at_s, observation=seen))
        rows = tuple(
            Forecast(service=key, lead_s=240.0, quantiles=tuple((q, rps) for q in (0.5, 0.8, 0.95)), member="bench")
            for key, rps in rates.items()
        )
        self.beliefs = learn(self.beliefs, Forecasted(at_s=self.at_s, forecasts=rows))
        self._made += 1
        began_s = time.process_time()
        plan = decide(seen, self.policy, self.beliefs, self.at_s, f"bench/{self._made}")
        self.decided_s = time.process_time() - began_s
        self.beliefs = learn(self.beliefs, Planned(at_s=self.at_s, plan=plan))
        self._carry_out(plan)
        self.plan = plan
        return plan

    def fleet(self) -> Fleet:
        """What the last plan decided, carried out."""
        assert self.plan is not None
        return Fleet(
            plan=self.plan,
            policy=self.policy,
            shapes=self.beliefs.shapes,
            offerings=self.offerings,
            open=frozenset(one.offering for one in self.offerings) - self._dry,
            instances=Counter(self.instances.values()),
        )

    def _observation(self, rates: dict[str, float]) -> Observation:
        def measured(value: float) -> Measured:
            return Measured(value=value, at_s=self.at_s)

        loads = tuple(
            ServiceLoad(
                service=key,
                arrival_rps=measured(rps),
                prefill_tps=measured(500.0 * rps),
                decode_tps=measured(100.0 * rps),
                queued=measured(0.0),
                running=measured(rps),
            )
            for key, rps in rates.items()
        )
        names = sorted(self.instances)
        replicas = tuple(
            Replica(
                replica_id=name, service=s.service, variant=s.variant, instance_id=on, state="ready", since_s=START_S
            )
            for name, (s, on) in sorted(self.replicas.items())
        )
        nodes = tuple(Node(node_id=name, instance_id=name, alive=True, draining=False) for name in names)
        listed = tuple(
            CloudInstance(
                instance_id=name, offering=self.instances[name], token=name, state="running", launched_at_s=START_S
            )
            for name in names
        )
        return Observation(
            at_s=self.at_s,
            loads=loads,
            serving=ServingView(at_s=self.at_s, replicas=replicas, nodes=nodes, targets=()),
            cloud=CloudView(at_s=self.at_s, offerings=self.offerings, instances=listed),
        )

    def _carry_out(self, plan: Plan) -> None:
        gone = {drain.instance_id for drain in plan.drains}
        self.instances = {name: offering for name, offering in self.instances.items() if name not in gone}
        self.replicas = {name: row for name, row in self.replicas.items() if row[1] in self.instances}
        for launch in plan.launches:
            for _ in range(launch.count):
                self._made += 1
                self.instances[f"i-{self._made:06d}"] = launch.alternates[0]
        wanted = {app_name(row.service, row.variant): row.wanted for row in plan.targets}
        for name in sorted(self.replicas, reverse=True):
            app = app_name(self.replicas[name][0].service, self.replicas[name][0].variant)
            wanted[app] -= 1
            if wanted[app] < 0:
                del self.replicas[name]
        self._stand(wanted)

    def _stand(self, wanted: dict[str, int]) -> None:
        """Replicas that are wanted and do not stand yet, where there is room."""
        types = {one.offering: one for one in self.offerings}
        free = {name: types[offering].gpus for name, offering in self.instances.items()}
        for shape, on in self.replicas.values():
            free[on] -= shape.gpus
        by_kind: dict[str, list[str]] = {}
        for name in sorted(self.instances):
            by_kind.setdefault(types[self.instances[name]].instance_type, []).append(name)
        for app, count in wanted.items():
            shape = self._by_app[app]
            for name in by_kind.get(shape.instance_type, ()) if count > 0 else ():
                while count > 0 and free[name] >= shape.gpus:
                    self._made += 1
                    self.replicas[f"r-{self._made:07d}"] = (shape, name)
                    free[name] -= shape.gpus
                    count -= 1


def _dry() -> OfferingBelief:
    return OfferingBelief(
        refusals_in_row=5,
        cool_until_s=START_S + LONG_S,
        last_refused_at_s=START_S - 60.0,
        refused=5,
        no=3.0,
        counted_at_s=START_S - 60.0,
        dry_since_s=START_S - 1800.0,
    )


def _offerings(count: int, rng: np.random.Generator) -> tuple[Offering, ...]:
    """A type for every five offerings, in zones and markets."""
    kinds = max(2, count // 5)
    gpus = [int(rng.choice((1, 4, 8))) for _ in range(kinds)]
    price = [float(rng.uniform(1.0, 4.0)) for _ in range(kinds)]
    rows = []
    for n in range(count):
        kind, market = n % kinds, ("on_demand", "spot")[(n // kinds) % 2]
        share = float(rng.uniform(0.3, 0.6)) if market == "spot" else 1.0
        rows.append(
            Offering(
                offering=f"o{n:04d}",
                pool=f"o{n:04d}",
                instance_type=f"t{kind:03d}",
                zone=f"z{n // kinds}",
                market="spot" if market == "spot" else "on_demand",
                gpus=gpus[kind],
                price_usd_per_h=price[kind] * gpus[kind] * share,
                region="r",
            )
        )
    return tuple(rows)


def _policy(means: dict[str, float], kinds: list[str], rng: np.random.Generator) -> PolicySet:
    services: dict[str, list[Service]] = {}
    for number, key in enumerate(sorted(means)):
        unit, name = key.split("/")
        picked = sorted(rng.choice(len(kinds), size=min(3, len(kinds)), replace=False))
        services.setdefault(unit, []).append(
            Service(
                name=name,
                model="m",
                goal=("latency", "throughput", "cost")[number % 3],
                priority=1000 - number % 1000,
                slo=Slo(ttft_s=2.0, tpot_s=0.1),
                max_replicas=100,
                markets=("on_demand", "spot"),
                variants=tuple(Variant(id=f"v{k}", instance_type=kinds[k]) for k in picked),
            )
        )
    rps_per_gpu = 5.0  # about what the timing above carries
    quotas = {
        unit: max(1, round(BINDS * sum(means[f"{unit}/{one.name}"] for one in rows) / rps_per_gpu))
        for unit, rows in services.items()
    }
    units = (
        Unit(unit=unit, owner="o", services=tuple(rows), quota_gpus=quotas[unit])
        for unit, rows in sorted(services.items())
    )
    return PolicySet(units=tuple(units))
