"""A small world for the whole loop: fakes with semantics under one clock, and the controller as it is.

`Scene` builds it from a few words, `run` moves time tick by tick, and every plan is checked as it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autoscaler.act import Inline
from autoscaler.adapters.journal import MemoryJournal
from autoscaler.adapters.local_supply import CloudConfig, OfferingConfig
from autoscaler.core.beliefs import Beliefs
from autoscaler.core.events import CheckFailed, Event, LaunchGranted, LaunchRefused
from autoscaler.core.model import Plan, Shape
from autoscaler.loop import Controller
from autoscaler.ports import Policy
from policies.model import PolicySet, Service, Slo, Unit, Variant
from serve_apps.timing import Timing
from tests.fakes import FakeClock, FakeCloud, FakeMetrics, FakeServing

TIMING = Timing(a_s=0.02, b_s_per_seq=0.001, c_s_per_ktoken=0.0, prefill_tps=10_000.0, max_num_seqs=8)
INPUT_TOKENS, OUTPUT_TOKENS = 500.0, 100.0
# One replica of a latency service then carries .7 × 8 / (100 × 28 ms + 8 × 50 ms) = 1.75 requests per second.
TICK_S = 10.0
CHAT = "support/chat"
BOOT_S, LOAD_S = 60.0, 60.0


def service(name: str = "chat", **over: Any) -> Service:
    """A latency service on one variant `l4` (one GPU of a g6.2xlarge), up to 8 replicas."""
    fields: dict[str, Any] = {
        "name": name,
        "model": "m",
        "goal": "latency",
        "priority": 500,
        "slo": Slo(ttft_s=2.0, tpot_s=0.1),
        "min_replicas": 1,
        "max_replicas": 8,
        "variants": (Variant(id="l4", instance_type="g6.2xlarge"),),
    }
    return Service(**fields | over)


def unit(*services: Service, name: str = "support", **over: Any) -> Unit:
    """A unit without limits."""
    return Unit(**{"unit": name, "owner": "o", "services": services} | over)


def shapes_of(policy: PolicySet) -> tuple[Shape, ...]:
    """One shape per variant, all with the same timing; TP is the number of GPUs."""
    return tuple(
        Shape(
            service=key,
            variant=variant.id,
            instance_type=variant.instance_type,
            gpus=variant.tp,
            nodes=variant.nodes_per_replica,
            timing=TIMING,
            load_prior_s=LOAD_S,
            boot_prior_s=BOOT_S,
            source="test",
        )
        for key, _, entry in policy.services()
        for variant in entry.variants
    )


def offering(name: str, price: float = 1.0, count: int = 8, **over: Any) -> OfferingConfig:
    """An on-demand pool of one-GPU g6.2xlarge instances, each in a pool and zone of its own."""
    fields: dict[str, Any] = {
        "offering": name,
        "pool": name,
        "instance_type": "g6.2xlarge",
        "zone": name,
        "region": "r",
        "market": "on_demand",
        "gpus": 1,
        "price_usd_per_h": price,
        "count": count,
        "boot_s": BOOT_S,
    }
    return OfferingConfig(**fields | over)


class Fixed:
    """A policy source that changes only when a test says so."""

    def __init__(self, policy: PolicySet) -> None:
        self.set(policy)

    def set(self, policy: PolicySet) -> None:
        self._next: Policy | None = Policy(policy=policy, shapes=shapes_of(policy), digest=policy.model_dump_json())

    def poll(self, now_s: float) -> Policy | None:
        found, self._next = self._next, None
        return found


@dataclass
class Scene:
    """The loop over fakes. `plans` are all plans made, in order."""

    units: Sequence[Unit]
    offerings: Sequence[OfferingConfig]
    load_s: float = LOAD_S
    clock: FakeClock = field(default_factory=FakeClock)
    metrics: FakeMetrics = field(default_factory=FakeMetrics)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = CloudConfig(cluster="c", ray_address="a", offerings=tuple(self.offerings))
        self.policy = PolicySet(units=tuple(self.units))
        self.cloud = FakeCloud(config, self.clock)
        self.serving = FakeServing(self.cloud, self.clock, shapes_of(self.policy), load_s=self.load_s)
        self.start()

    def start(self) -> None:
        """A controller process begins (again): nothing is known but the journal."""
        self.source = Fixed(self.policy)
        self.controller = Controller(
            clock=self.clock,
            metrics=self.metrics,
            serving=self.serving,
            cloud=self.cloud,
            journal=self.journal,
            policy_source=self.source,
            executor=Inline(),
            tick_s=TICK_S,
        )

    def load(self, key: str, rps: float, *, queued: float = 0.0, met: float = 1.0) -> None:
        """Offered load of ``unit/service`` from now on, of which the part `met` meets its limits; 0 is idle."""
        if rps == 0.0:
            self.metrics.set_idle(key)
        else:
            tokens = {"input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS}
            self.metrics.set(key, rps, **tokens, queued=queued, met=met)

    def run(self, for_s: float) -> Plan:
        """Ticks for so long; the last plan."""
        for _ in range(max(1, round(for_s / TICK_S))):
            plan = self.controller.tick()
            assert plan is not None
            self.plans.append(plan)
            self.clock.advance(TICK_S)
        failed = [event for event in self.events if isinstance(event, CheckFailed)]
        assert not failed, failed[0]
        return self.plans[-1]

    @property
    def beliefs(self) -> Beliefs:
        """What the controller believes now."""
        return self.controller.ledger.beliefs

    @property
    def events(self) -> list[Event]:
        """The whole journal."""
        return [record.event for record in self.journal.read()]

    def grants(self) -> list[tuple[str, int]]:
        """(offering, instances) of every grant, in order."""
        return [(e.offering, len(e.instance_ids)) for e in self.events if isinstance(e, LaunchGranted)]

    def refusals(self) -> list[str]:
        """Offerings that refused, in order."""
        return [e.offering for e in self.events if isinstance(e, LaunchRefused)]

    def ready(self, key: str) -> int:
        """Ready replicas of a service now."""
        view = self.serving.observe(self.clock.now_s())
        return sum(r.service == key and r.state == "ready" for r in view.replicas)

    def running(self) -> list[str]:
        """Offerings of the instances that exist now, sorted."""
        alive = ("pending", "running")
        return sorted(m.offering for m in self.cloud.supply.machines.values() if m.state in alive)

    def wanted(self, key: str) -> int:
        """Replicas that the last plan gives a service, placed or coming."""
        return sum(t.wanted for t in self.plans[-1].targets if t.service == key)


def crowd() -> Scene:
    """200 services of ten units on 60 pools, as far as two ticks bring them."""
    made = Scene(
        units=[unit(*(service(f"s{number}") for number in range(20)), name=f"u{part}") for part in range(10)],
        offerings=[offering(f"pool-{number}", count=4) for number in range(60)],
    )
    for part in range(10):
        for number in range(20):
            made.load(f"u{part}/s{number}", 0.1)
    made.run(20.0)
    return made


def codes(plan: Plan, key: str = CHAT) -> set[str]:
    """Codes of the reasons of a service's targets."""
    return {reason.code for target in plan.targets if target.service == key for reason in target.reasons}
