"""The controller's own Prometheus metrics: one more reading of the events that the loop journals.

Names and labels are documented in docs/metrics.md. Labels take values from the policy, the cloud's offerings and our
own enums only. May not feed anything back into the loop.
"""

from __future__ import annotations

import contextlib
from collections import Counter as Counts
from collections.abc import Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from autoscaler.core.beliefs import Beliefs
from autoscaler.core.events import (
    CheckFailed,
    Configured,
    Event,
    LaunchAmbiguous,
    LaunchGranted,
    LaunchRefused,
    Observed,
    Planned,
    PolicyRefused,
)
from autoscaler.core.lifecycle import STARTING
from autoscaler.core.model import Missing, Observation, Plan
from autoscaler.ports import Misconfigured

TICK_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class PrometheusTelemetry:
    """loop.Telemetry as Prometheus metrics in a registry of their own. `violated`: some plan broke an invariant."""

    def __init__(self) -> None:
        self.violated = False
        self.registry = CollectorRegistry()
        self.demand = self._gauge("qm_demand_rps", "Requests per second that a service is made ready for", "service")
        self.wanted = self._gauge("qm_wanted_replicas", "Replicas with a place now or coming", "service", "variant")
        self.target = self._gauge("qm_target_replicas", "Replicas published to Serve", "service", "variant")
        self.kv = self._gauge("qm_kv_cache_fraction", "KV cache in use by a service's fullest engine", "service")
        self.ready = self._gauge("qm_ready_replicas", "Replicas seen ready", "service", "variant")
        self.shortfall = self._gauge("qm_shortfall_replicas", "Replicas wanted that nothing can hold", "service")
        self.starting = self._gauge("qm_starting_instances", "Instances paid for, not in the cluster yet", "offering")
        self.cooldown = self._gauge("qm_cooldown_until", "UTC seconds until which it is not asked again", "offering")
        self.cost = self._gauge("qm_cost_usd_per_h", "Price of all instances that the cloud lists as ours")
        self.blind = self._gauge("qm_blind", "1 while a port says nothing", "port")
        self.policy_refused = self._gauge("qm_policy_refused", "1 while the policy folder holds a refused policy")
        self.failures = self._counter("qm_telemetry_failures", "Events that could not be shown here")
        self.policy_refusals = self._counter("qm_policy_refusals", "Changed policies that were not taken")
        self.launches = self._counter("qm_launches", "Launch calls, by how they ended", "offering", "outcome")
        self.refusals = self._counter("qm_refusals", "Launch calls refused, by class", "class")
        self.violations = self._counter("qm_check_violations", "Invariants broken by plans, none of them acted on")
        self.tick = Histogram("qm_tick_seconds", "Duration of a tick", buckets=TICK_BUCKETS_S, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def serve(self, port: int) -> None:
        """Answer scrapes on the loopback interface. Raises Misconfigured when the port is taken."""
        try:
            start_http_server(port, addr="127.0.0.1", registry=self.registry)
        except OSError as error:
            raise Misconfigured(f"--metrics-port {port}: {error.strerror}; give a free port") from error

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measures one tick."""
        began_s = perf_counter()
        yield
        self.tick.observe(perf_counter() - began_s)

    def event(self, event: Event, beliefs: Beliefs) -> None:
        """See loop.Telemetry."""
        match event:
            case Observed():
                self._observed(event.observation, beliefs)
            case Planned():
                self._planned(event.plan)
            case LaunchGranted():
                self._launch(event.offering, "granted", beliefs)
            case LaunchRefused():
                self.refusals.labels(event.error).inc()
                self._launch(event.offering, "refused", beliefs)
            case LaunchAmbiguous():
                self._launch(event.offering, "ambiguous", beliefs)
            case CheckFailed():
                self.violated = True
                self.violations.inc(len(event.violations))
            case PolicyRefused():
                self.policy_refused.set(1)
                self.policy_refusals.inc()
            case Configured():
                self.policy_refused.set(0)
            case _:
                pass

    def _observed(self, seen: Observation, beliefs: Beliefs) -> None:
        views = {"metrics": seen.loads, "engines": seen.engines, "serving": seen.serving, "cloud": seen.cloud}
        for port, view in views.items():
            self.blind.labels(port).set(isinstance(view, Missing))
        self.kv.clear()
        for service, known in beliefs.services.items():
            if known.kv_fraction is not None:
                self.kv.labels(service).set(known.kv_fraction)
        if not isinstance(seen.serving, Missing):
            self.ready.clear()
            ready = Counts((r.service, r.variant) for r in seen.serving.replicas if r.state == "ready")
            for shape in beliefs.shapes:
                self.ready.labels(shape.service, shape.variant).set(ready[shape.service, shape.variant])
        if not isinstance(seen.cloud, Missing):
            prices = {row.offering: row.price_usd_per_h for row in seen.cloud.offerings}
            paid = [row.offering for row in seen.cloud.instances if row.state != "terminated"]
            self.cost.set(sum(prices.get(offering, 0.0) for offering in paid))
            starting = Counts(row.offering for row in beliefs.instances.values() if row.state in STARTING)
            self.starting.clear()
            for offering in beliefs.offers:
                self.starting.labels(offering).set(starting[offering])

    def _planned(self, plan: Plan) -> None:
        for gauge in (self.demand, self.wanted, self.target, self.shortfall):
            gauge.clear()
        for demand in plan.demands:
            self.demand.labels(demand.service).set(demand.arrival_rps)
            self.shortfall.labels(demand.service).set(0)
        for target in plan.targets:
            self.wanted.labels(target.service, target.variant).set(target.wanted)
            self.target.labels(target.service, target.variant).set(target.replicas)
        for row in plan.shortfalls:
            self.shortfall.labels(row.service).set(row.replicas)

    def _launch(self, offering: str, outcome: str, beliefs: Beliefs) -> None:
        self.launches.labels(offering, outcome).inc()
        for name, belief in beliefs.offerings.items():
            self.cooldown.labels(name).set(belief.cool_until_s)
