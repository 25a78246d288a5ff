"""The Metrics port over the world's engine: the same figures as the gateways' reports and the engines' exports give.

Every figure is taken once a tick (`sample`), before anybody asks. May not know a controller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from autoscaler.adapters.prometheus import MEAN_OVER_REQUESTS
from autoscaler.core.model import EngineLoad, Idle, Measured, Missing, ServiceLoad, Signal
from autoscaler.ports import Transient
from chaos.engine import Engine, ReplicaWindow, Window

from .cluster import Cluster
from .faults import Faults, value
from .timeline import Timeline

UNANSWERED = Missing(why="no request has got an answer yet")
NOT_MEASURED = Missing(why="nothing was made in the window")
GONE = Missing(why="the gateways do not report")
# Requests, prefill and decode tokens per second, queued, running; tasks begun, requests ended and met per second.
Figures = tuple[float, float | None, float | None, float, float, float, float, float]


@dataclass(slots=True)
class Means:
    """Decayed means of the tokens of recent requests, as the gateways' reports give them."""

    input_tokens: float = 0.0
    arrived: float = 0.0
    output_tokens: float = 0.0
    ended: float = 0.0
    running: int = 0

    def add(self, window: Window) -> None:
        """Count a window. Output counts as it flows, so a request still running counts as half ended."""
        keep = math.exp(-window.finished / MEAN_OVER_REQUESTS)
        self.input_tokens = keep * self.input_tokens + window.input_tokens
        self.arrived = keep * self.arrived + window.arrived
        self.output_tokens = keep * self.output_tokens + window.output_tokens
        self.ended = keep * self.ended + window.finished + (window.running - self.running) / 2.0
        self.running = window.running

    def of(self) -> tuple[float, float] | None:
        """Mean input and output tokens, or None before the first request has got anywhere."""
        if self.arrived < 1.0 or self.ended < 0.5 or self.output_tokens <= 0.0:
            return None
        return self.input_tokens / self.arrived, self.output_tokens / self.ended


@dataclass
class WorldMetrics:
    """ports.Metrics. `figures` are those of the last sample by service, as they are without any fault."""

    engine: Engine
    cluster: Cluster
    services: dict[str, int]
    faults: Faults
    timeline: Timeline
    figures: dict[str, Figures] = field(default_factory=dict)
    windows: dict[str, Window] = field(default_factory=dict)
    _means: dict[str, Means] = field(default_factory=dict)
    _frozen: dict[str, Figures] = field(default_factory=dict)
    _untold: dict[str, tuple[float, int, int]] = field(
        default_factory=dict
    )  # seconds, requests ended, and within limits
    _at_s: float = 0.0

    def sample(self) -> None:
        """Take every service's window since the last sample."""
        over_s = self.timeline.now_s - self._at_s
        self._at_s = self.timeline.now_s
        for service, number in self.services.items():
            window = self.windows[service] = self.engine.window(number)
            means = self._means.setdefault(service, Means())
            means.add(window)
            rps = window.arrived / over_s if over_s > 0.0 else 0.0
            more = (window.tasks / over_s if over_s > 0.0 else 0.0, *self._answered(service, window, over_s))
            tokens = means.of()
            rates = (rps * tokens[0], rps * tokens[1]) if tokens else (None, None)
            self.figures[service] = (rps, *rates, float(window.queued), float(window.running), *more)

    def _answered(self, service: str, window: Window, over_s: float) -> tuple[float, float]:
        """Requests that ended and those within every limit, per second. Counters go on while nobody reads them: what
        ended while the metrics were gone is told afterwards.
        """
        before_s, ended, met = self._untold.pop(service, (0.0, 0, 0))
        over_s += before_s
        ended, met = ended + window.finished + window.shed + window.failed, met + window.met
        if self.faults.active("metrics_gone", (service,)):
            self._untold[service] = over_s, ended, met
        return (ended / over_s, met / over_s) if over_s > 0.0 else (0.0, 0.0)

    def told(self, service: str) -> Figures | None:
        """The figures that a controller is given: None while they are gone, wrong while a fault says so."""
        if self.faults.active("metrics_gone", (service,)):
            return None
        seen = self.figures.get(service)
        if self.faults.active("metrics_frozen", (service,)):
            return self._frozen.setdefault(service, seen) if seen is not None else None
        self._frozen.pop(service, None)
        factor = 1.0
        for fault in self.faults.active("metrics_absurd", (service,)):
            factor *= value(fault)
        if seen is None or factor == 1.0:
            return seen
        rps, prefill, decode, *counts = (each and each * factor for each in seen)
        queued, running, begun, ended, met = (each or 0.0 for each in counts)
        return rps or 0.0, prefill, decode, queued, running, begun, ended, met

    # ---- the port ---------------------------------------------------------------------------------------------------
    def loads(self, now_s: float) -> tuple[ServiceLoad, ...]:
        """See ports.Metrics."""
        told = {service: self.told(service) for service in self.services}
        if all(figures is None for figures in told.values()):
            raise Transient("no gateway has reported", "NoGateway")
        return tuple(_load(service, figures, now_s) for service, figures in sorted(told.items()))

    def engines(self, now_s: float) -> tuple[EngineLoad, ...]:
        """See ports.Metrics. Draining engines still export."""
        told = [service for service in self.services if not self.faults.active("metrics_gone", (service,))]
        shown = [r for r in self.cluster.replicas() if r.handle >= 0 and r.deployment.app.service in told]
        windows = self.engine.replica_windows([replica.handle for replica in shown])
        rows = tuple(_engine(replica.name, window, now_s) for replica, window in zip(shown, windows, strict=True))
        return (*rows, *(ghost for service in told for ghost in self._ghosts(service, now_s)))

    def _ghosts(self, service: str, now_s: float) -> Iterator[EngineLoad]:
        """What is still exported of a replica that Serve no longer lists: a full cache, steps that last for ever."""
        for fault in self.faults.active("metrics_ghost", (service,)):
            window = ReplicaWindow(1, 1, 1.0, 0.05 * value(fault), value(fault), 1.0, 1.0, 1.0, 9, 9)
            yield _engine(f"{service}#gone", window, now_s)


def _load(service: str, figures: Figures | None, now_s: float) -> ServiceLoad:
    signals: tuple[Signal, ...]
    if figures is None:
        signals = (GONE,) * 8
    elif figures[0] <= 0.0 and not figures[3] and not figures[4]:
        signals = (*(Idle(at_s=now_s),) * 6, *(Measured(value=each, at_s=now_s) for each in figures[6:]))
    else:
        signals = tuple(UNANSWERED if each is None else Measured(value=each, at_s=now_s) for each in figures)
    rps, prefill, decode, queued, running, begun, ended, met = signals
    return ServiceLoad(
        service=service,
        arrival_rps=rps,
        prefill_tps=prefill,
        decode_tps=decode,
        queued=queued,
        running=running,
        tasks_rps=begun,
        ended_rps=ended,
        met_rps=met,
    )


def _engine(name: str, window: ReplicaWindow, now_s: float) -> EngineLoad:
    running, waiting, kv_fraction, tpot_s, prefill_s, input_tokens, batch, kv_tokens, samples, steps = window
    decoded, prefilled = tpot_s == tpot_s, samples > 0  # nan where nothing was made
    return EngineLoad(
        replica_id=name,
        running=Measured(value=float(running), at_s=now_s),
        waiting=Measured(value=float(waiting), at_s=now_s),
        kv_fraction=Measured(value=kv_fraction, at_s=now_s),
        tpot_s=Measured(value=tpot_s, at_s=now_s) if decoded else NOT_MEASURED,
        prefill_s=Measured(value=prefill_s, at_s=now_s) if prefilled else NOT_MEASURED,
        input_tokens=Measured(value=input_tokens, at_s=now_s) if prefilled else NOT_MEASURED,
        batch=Measured(value=batch, at_s=now_s) if decoded else NOT_MEASURED,
        kv_tokens=Measured(value=kv_tokens, at_s=now_s) if decoded else NOT_MEASURED,
        steps=float(steps) if decoded else 0.0,
        samples=float(samples),
    )
