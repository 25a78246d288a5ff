"""Why answers missed their limits: every miss that a journal counts, attributed to one cause, with what speaks for it.

Pure: folds records with `core.learn`; may not read files or a clock, or decide anything. A miss is counted when its
request ends, so it is put down to what was wrong while the request was there: the cause (`causes`) that spoke last
within `BACK_S` before. What clogs a queue is the cause of its misses until the queue is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from autoscaler.causes import Cause, Memory, Scene, cause_of, crashes, measured, remember
from autoscaler.core.beliefs import EMPTY, Beliefs, ServiceBelief
from autoscaler.core.events import LaunchRefused, Observed, Planned, Record
from autoscaler.core.learn import learn
from autoscaler.core.model import Missing, Observation, Plan, ServiceLoad

BACK_S = 120.0  # a request that ends now was there so long ago
SLOW_SEEN = 3  # observations before a pace is believed
PERIOD_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The misses of one cause, from when to when (UTC seconds), and the evidence at the worst moment."""

    cause: Cause
    misses: float
    share: float
    from_s: float
    to_s: float
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Misses of each cause in `PERIOD_S` from `from_s`, most first."""

    from_s: float
    misses: tuple[tuple[Cause, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDiagnosis:
    """One service: requests that ended, misses of its limits, and whose fault they were, most first."""

    service: str
    ended: float
    misses: float
    top_cause: Cause | None
    causes: tuple[Share, ...]
    periods: tuple[Period, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All services, the one that missed most first. `top_cause` is that of most misses, None without any."""

    top_cause: Cause | None
    ended: float
    misses: float
    services: tuple[ServiceDiagnosis, ...]


@dataclass(slots=True)
class _Tally:
    misses: float = 0.0
    worst: float = 0.0
    from_s: float = 0.0
    to_s: float = 0.0
    evidence: str = ""


@dataclass(slots=True)
class _Service:
    """What is counted of one service, and what is remembered of it."""

    memory: Memory = field(default_factory=Memory)
    seen_at_s: float | None = None  # when its ended requests were last counted
    ended: float = 0.0
    tallies: dict[Cause, _Tally] = field(default_factory=dict)
    periods: dict[float, dict[Cause, float]] = field(default_factory=dict)
    spoke: deque[tuple[float, Cause, str]] = field(default_factory=deque)


def diagnose(records: Iterable[Record], service: str | None = None) -> Diagnosis:
    """Every miss that the journal counts (of `service` alone), attributed."""
    causes = Causes(service)
    for record in records:
        causes.take(record)
    return causes.told()


def _top(misses: Mapping[Cause, float]) -> Cause | None:
    """The cause of most misses; of equals the one named first in `Cause`."""
    order = list(Cause)
    return max(misses, key=lambda cause: (misses[cause], -order.index(cause)), default=None)


def _service(key: str, known: _Service) -> ServiceDiagnosis:
    misses = {cause: tally.misses for cause, tally in known.tallies.items()}
    whole = sum(misses.values())
    shares = [
        Share(
            cause=cause,
            misses=tally.misses,
            share=tally.misses / whole,
            from_s=tally.from_s,
            to_s=tally.to_s,
            evidence=tally.evidence,
        )
        for cause, tally in known.tallies.items()
    ]
    return ServiceDiagnosis(
        service=key,
        ended=known.ended,
        misses=whole,
        top_cause=_top(misses),
        causes=tuple(sorted(shares, key=lambda row: (-row.misses, row.cause))),
        periods=tuple(
            Period(from_s=from_s, misses=tuple(sorted(row.items(), key=lambda each: (-each[1], each[0]))))
            for from_s, row in sorted(known.periods.items())
        ),
    )


@dataclass
class Causes:
    """The fold behind `diagnose`: records in, in the journal's order, and what they say so far, at any time."""

    only: str | None
    services: dict[str, _Service] = field(default_factory=dict)
    beliefs: Beliefs = EMPTY
    plan: Plan | None = None
    asked_for: dict[str, str] = field(default_factory=dict)  # launch intent → service
    pace: dict[str, tuple[float, int]] = field(default_factory=dict)  # replica → mean log of its pace, observations

    def told(self) -> Diagnosis:
        """What is known so far."""
        rows = sorted((_service(key, known) for key, known in self.services.items()), key=lambda row: -row.misses)
        total: dict[Cause, float] = {}
        for share in (share for row in rows for share in row.causes):
            total[share.cause] = total.get(share.cause, 0.0) + share.misses
        return Diagnosis(
            top_cause=_top(total),
            ended=sum(row.ended for row in rows),
            misses=sum(row.misses for row in rows),
            services=tuple(rows),
        )

    def take(self, record: Record) -> None:
        """One more record."""
        event = record.event
        self.beliefs = learn(self.beliefs, event)
        match event:
            case Planned():
                self.plan = event.plan
                self.asked_for = {launch.id: launch.service for launch in event.plan.launches}
            case LaunchRefused():
                known = self.services.get(self.asked_for.get(event.intent, ""))
                if known is not None:
                    known.memory.refused_at_s, known.memory.refused = (
                        event.at_s,
                        f"{event.offering} answered {event.code}",
                    )
            case Observed():
                self._observed(event.observation)
            case _:
                pass

    def _observed(self, seen: Observation) -> None:
        scene = Scene(seen, self.beliefs, self.plan, self._paced(seen))
        if isinstance(seen.loads, Missing):
            for known in self.services.values():
                known.memory.blind_at_s = seen.at_s
            return
        for load in seen.loads:
            if self.only in (None, load.service):
                _add(self.services.setdefault(load.service, _Service()), load, scene)

    def _paced(self, seen: Observation) -> dict[str, float]:
        """How much slower each ready replica is than the median of its like, where that was seen often enough."""
        if isinstance(seen.engines, Missing) or isinstance(seen.serving, Missing):
            return {}
        engines = {engine.replica_id: engine for engine in seen.engines}
        alike: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for replica in seen.serving.replicas:
            engine = engines.get(replica.replica_id)
            tpot_s = measured(engine.tpot_s) if engine is not None else None
            if replica.state == "ready" and tpot_s:
                alike.setdefault((replica.service, replica.variant), []).append((replica.replica_id, tpot_s))
        for rows in alike.values():
            usual = median(tpot_s for _, tpot_s in rows)
            for replica_id, tpot_s in rows if len(rows) > 1 else ():
                mean, count = self.pace.get(replica_id, (0.0, 0))
                keep = min(count, 9) / (min(count, 9) + 1.0)
                self.pace[replica_id] = (keep * mean + (1.0 - keep) * log(tpot_s / usual), count + 1)
        return {key: exp(mean) for key, (mean, count) in self.pace.items() if count >= SLOW_SEEN and key in engines}


def _add(known: _Service, load: ServiceLoad, scene: Scene) -> None:
    at_s = scene.seen.at_s
    if scene.beliefs.services.get(load.service, ServiceBelief()).blind_why:
        known.memory.blind_at_s = at_s
    crashes(known.memory, load.service, scene)
    found = cause_of(known.memory, load, scene)
    if found is not None:
        known.spoke.append((at_s, *found))
    while known.spoke and known.spoke[0][0] < at_s - BACK_S:
        known.spoke.popleft()
    if not isinstance(load.ended_rps, Missing):  # idle is none that ended, and no gap
        ended, met = measured(load.ended_rps) or 0.0, measured(load.met_rps) or 0.0
        over_s = at_s - known.seen_at_s if known.seen_at_s is not None else 0.0
        known.seen_at_s = at_s
        known.ended += ended * over_s
        _count(known, max(0.0, ended - met) * over_s, at_s)
    remember(known.memory, load, scene)


def _count(known: _Service, misses: float, at_s: float) -> None:
    if misses <= 0.0:
        return
    said = [row for row in known.spoke if row[1] is not Cause.QUEUEING] or known.spoke
    _, cause, evidence = said[-1] if said else (at_s, Cause.QUEUEING, "no lack of capacity, no queue")
    tally = known.tallies.setdefault(cause, _Tally(from_s=at_s))
    tally.misses, tally.to_s = tally.misses + misses, at_s
    if misses > tally.worst:
        tally.worst, tally.evidence = misses, evidence
    period = known.periods.setdefault(at_s // PERIOD_S * PERIOD_S, {})
    period[cause] = period.get(cause, 0.0) + misses
