"""The controller's own Prometheus metrics: one more reading of the events that the loop journals.

What happened is counted as it happens; what is, is worked out at a scrape (`exposition`). Names and labels are public
(docs/operations.md). May not feed anything back into the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

from autoscaler.adapters.exposition import Exposition, Now
from autoscaler.core.beliefs import Beliefs
from autoscaler.core.events import (
    CheckFailed,
    Event,
    LaunchAmbiguous,
    LaunchGranted,
    LaunchRefused,
    Observed,
    Planned,
    PolicyRefused,
)
from autoscaler.core.model import Measured, Missing, Observation
from autoscaler.ports import Misconfigured

TICK_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class PrometheusTelemetry:
    """loop.Telemetry as Prometheus metrics in a registry of their own. `violated`: some plan broke an invariant.

    `seq` says the journal's number of the event at hand.
    """

    def __init__(self, seq: Callable[[], int] = lambda: 0) -> None:
        self.seq = seq
        self.violated = False
        self.now = Now()
        self.registry = CollectorRegistry()
        self.registry.register(Exposition(self.now))
        self.failures = self._counter("qm_telemetry_failures", "Events that could not be shown here")
        self.policy_refusals = self._counter("qm_policy_refusals", "Changed policies that were not taken")
        self.ended = self._counter("qm_slo_ended", "Requests that were answered, shed or failed", "service")
        self.met = self._counter("qm_slo_met", "Requests that were answered within every limit", "service")
        self.launches = self._counter("qm_launches", "Launch calls, by how they ended", "offering", "outcome")
        self.refusals = self._counter("qm_refusals", "Launch calls refused, by class", "class")
        self.violations = self._counter("qm_check_violations", "Invariants broken by plans, none of them acted on")
        self.tick = Histogram("qm_tick_seconds", "Duration of a tick", buckets=TICK_BUCKETS_S, registry=self.registry)

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
        self.now.beliefs = beliefs
        match event:
            case Observed():
                self._observed(event.observation)
            case Planned():
                self.now.plan_seq = self.seq()
            case LaunchGranted():
                self.launches.labels(event.offering, "granted").inc()
            case LaunchRefused():
                self.refusals.labels(event.error).inc()
                self.launches.labels(event.offering, "refused").inc()
            case LaunchAmbiguous():
                self.launches.labels(event.offering, "ambiguous").inc()
            case CheckFailed():
                self.violated = True
                self.violations.inc(len(event.violations))
            case PolicyRefused():
                self.policy_refusals.inc()
            case _:
                pass

    def _observed(self, seen: Observation) -> None:
        """What ended since the last observation is its rate times the time since; what was not seen is not counted."""
        before = self.now.seen
        over_s = seen.at_s - before.at_s if before is not None else 0.0
        for load in () if isinstance(seen.loads, Missing) else seen.loads:
            if isinstance(load.ended_rps, Measured) and isinstance(load.met_rps, Measured):
                self.ended.labels(load.service).inc(load.ended_rps.value * over_s)
                self.met.labels(load.service).inc(load.met_rps.value * over_s)
        self.now.take(seen)
