"""What is wrong with a service at one observation: one cause, and what speaks for it.

Pure; may not read files or a clock, or decide anything. Where too little capacity is ready, the reasons that the plans
gave say why: metrics that were missing, a limit of the policy, launches that were refused, starts that take longer than
was to be expected, requests that grew; otherwise more is asked than was foreseen. Where enough is ready, it is what the
engines show: a replica slower than its like, full caches, longer requests, requests that go to few of the replicas;
otherwise requests meet in the queue or in a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp

from autoscaler.core.beliefs import Beliefs, ServiceBelief
from autoscaler.core.demand import lead_s
from autoscaler.core.lifecycle import STARTING
from autoscaler.core.model import (
    EngineLoad,
    Measured,
    Missing,
    Observation,
    Plan,
    Replica,
    ServiceLoad,
    Shortfall,
    Signal,
    Target,
)
from autoscaler.core.reasons import Reason, ReasonCode
from serve_apps.wire import app_name

REFUSED_S = 120.0  # and the lead: so long a refusal is why something is missing
CLOGGED_S = 1.0  # a queue of so many seconds of arrivals is one
KV_FULL = 0.97  # of an engine's cache: it evicts, or lets nobody in
LONGER = 1.25  # times the mean of the hour before
MUCH_LONGER = 2.0
LESS = 0.7  # of what a replica carried in the hour before
SLOWER = 1.2  # times the median of its like, over a few observations
UNEVEN = 2.0  # times the mean of requests in flight, and UNEVEN_LEAST more
UNEVEN_LEAST = 4.0
LATE = 1.25  # times what the catalogue lets expect of a start
HOUR_S = 3600.0
LIMITS = frozenset(
    {
        ReasonCode.MAX_REPLICAS,
        ReasonCode.QUOTA_GPUS,
        ReasonCode.BUDGET,
        ReasonCode.BUDGET_MONTH,
        ReasonCode.UNREACHABLE_SLO,
    }
)


class Cause(StrEnum):
    """Values are words of the console and of JSON: add, never rename."""

    BLIND = "blind"
    POLICY_LIMIT = "policy_limit"
    CLOUD_REFUSAL = "cloud_refusal"
    COLD_START = "cold_start"
    CAPACITY_SHORT = "capacity_short"
    LONGER_INPUTS = "longer_inputs"  # prompts, or answers
    SLOW_REPLICA = "slow_replica"
    KV_PREEMPTION = "kv_preemption"
    ROUTING = "routing"
    QUEUEING = "queueing"


@dataclass(slots=True)
class Memory:
    """What is remembered of one service from one observation to the next."""

    clogged_by: tuple[Cause, str] | None = None
    refused_at_s: float = -HOUR_S
    refused: str = ""
    blind_at_s: float = -HOUR_S
    inputs: float = 0.0  # means of an hour: tokens a request, requests/s, and those that a ready replica carries
    outputs: float = 0.0
    rps: float = 0.0
    carried: float = 0.0
    remembered_at_s: float | None = None
    asleep: bool = True  # since nothing was to be ready, nothing has been
    ready: dict[str, str] = field(default_factory=dict)  # replica → its instance, at the last observation
    crashed_at_s: float = -HOUR_S
    crashed: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """One observation with what was believed and planned, and the pace of replicas beside their like."""

    seen: Observation
    beliefs: Beliefs
    plan: Plan | None
    pace: Mapping[str, float]

    def replicas(self, service: str) -> list[Replica]:
        view = self.seen.serving
        return [] if isinstance(view, Missing) else [row for row in view.replicas if row.service == service]

    def engines(self, service: str) -> list[EngineLoad]:
        """Those of the service's ready replicas."""
        ready = {row.replica_id for row in self.replicas(service) if row.state == "ready"}
        rows = self.seen.engines
        return [] if isinstance(rows, Missing) else [row for row in rows if row.replica_id in ready]

    def reasons(self, service: str) -> Iterator[Reason]:
        """Why the plan is not larger."""
        if self.plan is not None:
            rows: tuple[Shortfall | Target, ...] = (*self.plan.shortfalls, *self.plan.targets)
            for row in rows:
                if row.service == service:
                    yield from row.reasons

    def wanted(self, service: str) -> int:
        """Replicas with a place, or an instance coming, by the last plan."""
        return sum(row.wanted for row in self.plan.targets if row.service == service) if self.plan is not None else 0

    def carried_rps(self, service: str) -> float:
        """What one of the ready replicas is planned to carry; 0 without any."""
        ready = sum(row.state == "ready" for row in self.replicas(service))
        return self.ready_rps(service) / ready if ready else 0.0

    def ready_rps(self, service: str) -> float:
        """What the ready replicas are planned to carry."""
        ready = Counter(row.variant for row in self.replicas(service) if row.state == "ready")
        routes = () if self.plan is None else self.plan.routes
        return sum(ready[row.variant] * row.capacity_rps_per_replica for row in routes if row.service == service)


def crashes(known: Memory, service: str, scene: Scene) -> None:
    """Replicas that served, and are gone while their instance stays and nobody was told to drain."""
    view = scene.seen.serving
    if isinstance(view, Missing):
        return
    now = {row.replica_id: row for row in scene.replicas(service)}
    stays = {node.instance_id for node in view.nodes if node.alive and not node.draining}
    kept = {key for key, row in now.items() if row.state in ("ready", "draining")}
    gone = [key for key, place in known.ready.items() if place in stays and key not in kept]
    left = sum(row.state in ("ready", "loading") for row in now.values())
    if gone and scene.wanted(service) >= len(known.ready):
        known.crashed_at_s, known.crashed = scene.seen.at_s, f"{gone[0]} was gone, {left} left"
    known.ready = {key: row.instance_id for key, row in now.items() if row.state == "ready"}
    known.asleep = not known.ready and (known.asleep or not scene.wanted(service))


def remember(known: Memory, load: ServiceLoad, scene: Scene) -> None:
    at_s = scene.seen.at_s
    keep = exp(-(at_s - known.remembered_at_s) / HOUR_S) if known.remembered_at_s is not None else 0.0
    known.remembered_at_s = at_s
    inputs, outputs = _tokens(load)
    known.inputs, known.outputs = _mean(known.inputs, inputs, keep), _mean(known.outputs, outputs, keep)
    known.rps = _mean(known.rps, measured(load.arrival_rps), keep)
    known.carried = _mean(known.carried, scene.carried_rps(load.service), keep)


def _mean(before: float, now: float | None, keep: float) -> float:
    """A fading mean, 0 before anything was seen; nothing is learnt of what is not there."""
    if not now:
        return before
    return keep * before + (1.0 - keep) * now if before else now


def cause_of(known: Memory, load: ServiceLoad, scene: Scene) -> tuple[Cause, str] | None:
    """What is wrong now, and what speaks for it; None while nothing is."""
    rps, queued = measured(load.arrival_rps) or 0.0, measured(load.queued) or 0.0
    ready_rps = scene.ready_rps(load.service)
    waiting = sum(measured(row.waiting) or 0.0 for row in scene.engines(load.service))
    clogged = queued + waiting > max(1.0, CLOGGED_S * rps)
    if rps > ready_rps or clogged:
        if rps <= ready_rps and known.clogged_by is not None:
            return known.clogged_by
        why = _too_little(known, load, scene, rps, ready_rps)
        if why[0] is Cause.QUEUEING and known.clogged_by is not None:
            return known.clogged_by
        known.clogged_by = why
        return why
    known.clogged_by = None
    return _engines_say(known, load, scene)


def _too_little(known: Memory, load: ServiceLoad, scene: Scene, rps: float, ready_rps: float) -> tuple[Cause, str]:
    """Why the ready replicas do not carry what arrives."""
    at_s, service = scene.seen.at_s, load.service
    replicas = Counter(row.state for row in scene.replicas(service))
    coming = replicas["loading"] + replicas["pending"]
    lead = lead_s(scene.beliefs, service)
    short = f"{rps:.3g} requests/s, {ready_rps:.3g} carried by {replicas['ready']} ready replicas, {coming} loading"
    if at_s - known.blind_at_s <= lead:
        return Cause.BLIND, f"metrics were missing {at_s - known.blind_at_s:.0f} s before; {short}"
    less = _less_each(known, load, scene, rps, ready_rps, replicas["ready"])
    if less is not None:
        return less[0], f"{less[1]}; {short}"
    limit = next((reason for reason in scene.reasons(service) if reason.code in LIMITS), None)
    if limit is not None:
        return Cause.POLICY_LIMIT, f"{limit.code} {limit.subject}".strip() + f"; {short}"
    if at_s - known.refused_at_s <= lead + REFUSED_S:
        return Cause.CLOUD_REFUSAL, f"{known.refused}; {short}"
    if at_s - known.crashed_at_s <= lead:
        return Cause.SLOW_REPLICA, f"{known.crashed}; {short}"
    if known.asleep:
        return Cause.COLD_START, f"nothing was ready; {short}"
    late = _late(scene, service)
    if late:
        return Cause.COLD_START, f"{late}; {short}"
    if rps <= ready_rps:
        return Cause.QUEUEING, short
    return Cause.CAPACITY_SHORT, short


def _less_each(
    known: Memory, load: ServiceLoad, scene: Scene, rps: float, ready_rps: float, ready: int
) -> tuple[Cause, str] | None:
    """What makes each replica carry less than in the hour before, where that explains the lack: all of them would have
    been enough then, or what each carries fell by more than what is asked grew. Prompts that grew by more than that
    explain it before the plan reckons with them.
    """
    if not ready_rps < rps:
        return None
    fell = ready * known.carried / ready_rps if ready_rps else 0.0
    asked = rps / known.rps if known.rps else 1.0
    prompts, answers = _growth(known, load, scene)
    if prompts > max(LONGER, asked):
        return Cause.LONGER_INPUTS, _longer(known, prompts)
    if rps > fell * ready_rps and fell < max(1.0 / LESS, asked):
        return None
    full = _fullest(scene, load.service)
    if prompts > LONGER:
        return Cause.LONGER_INPUTS, _longer(known, prompts)
    if full >= KV_FULL:
        return Cause.KV_PREEMPTION, f"a cache is {full:.0%} full"
    if answers > MUCH_LONGER:
        return Cause.LONGER_INPUTS, f"answers {answers:.1f} times as long as in the hour before"
    if fell > 1.0 / LESS:
        text = f"a replica carries {ready_rps / ready:.3g} requests/s, {known.carried:.3g} in the hour before"
        return Cause.SLOW_REPLICA, text
    return None


def _late(scene: Scene, service: str) -> str:
    """A replica that loads, or an instance that boots, for longer than was to be expected of it."""
    now_s, beliefs = scene.seen.at_s, scene.beliefs
    mine = [shape for shape in beliefs.shapes if shape.service == service]
    loads_s = {app_name(shape.service, shape.variant): shape.load_prior_s for shape in mine}
    for row in beliefs.loading.values():
        if row.app in loads_s and now_s - row.since_s > LATE * loads_s[row.app]:
            return f"a replica loads for {now_s - row.since_s:.0f} s, {loads_s[row.app]:.0f} s were to be expected"
    boots_s = {shape.instance_type: shape.boot_prior_s for shape in mine}
    for key, instance in sorted(beliefs.instances.items()):
        offer, age_s = beliefs.offers.get(instance.offering), now_s - instance.launched_at_s
        limit_s = boots_s.get(offer.instance_type) if offer is not None else None
        if instance.state in STARTING and limit_s is not None and age_s > LATE * limit_s:
            return f"{key} boots for {age_s:.0f} s, {limit_s:.0f} s were to be expected"
    return ""


def _engines_say(known: Memory, load: ServiceLoad, scene: Scene) -> tuple[Cause, str] | None:
    """What is wrong although enough is ready."""
    engines = scene.engines(load.service)
    full = _fullest(scene, load.service)
    if full >= KV_FULL:
        return Cause.KV_PREEMPTION, f"a cache is {full:.0%} full"
    prompts, _ = _growth(known, load, scene)
    if prompts > LONGER:
        return Cause.LONGER_INPUTS, _longer(known, prompts)
    slow = max(((scene.pace.get(row.replica_id, 1.0), row.replica_id) for row in engines), default=(1.0, ""))
    if slow[0] >= SLOWER:
        return Cause.SLOW_REPLICA, f"{slow[1]} takes {slow[0]:.2f} times as long for a token as its like"
    flights = [(measured(row.running) or 0.0) + (measured(row.waiting) or 0.0) for row in engines]
    mean = sum(flights) / len(flights) if flights else 0.0
    if flights and max(flights) > UNEVEN * mean + UNEVEN_LEAST:
        return Cause.ROUTING, f"{max(flights):.0f} requests on one replica, {mean:.1f} on the mean of {len(flights)}"
    waiting = sum(measured(row.waiting) or 0.0 for row in engines)
    if waiting or (measured(load.queued) or 0.0) > 0.0:
        return Cause.QUEUEING, f"{waiting:.0f} requests wait in engines"
    return None


def _fullest(scene: Scene, service: str) -> float:
    return max((measured(row.kv_fraction) or 0.0 for row in scene.engines(service)), default=0.0)


def _growth(known: Memory, load: ServiceLoad, scene: Scene) -> tuple[float, float]:
    """Prompts and answers, now or as the plan reckons with them, in those of the hour before; 1 where nothing is known.

    How long answers are is known late, and of few of them badly.
    """
    mine = scene.beliefs.services.get(load.service, ServiceBelief())
    inputs, outputs = _tokens(load)
    prompts = max(inputs or 0.0, mine.input_tokens) / known.inputs if known.inputs else 1.0
    answers = max(outputs or 0.0, mine.output_tokens) / known.outputs if known.outputs else 1.0
    return prompts, answers


def _longer(known: Memory, growth: float) -> str:
    return f"prompts of {growth * known.inputs:.0f} tokens, {known.inputs:.0f} in the hour before"


def _tokens(load: ServiceLoad) -> tuple[float | None, float | None]:
    """Of a request, in and out."""
    rps, prefill_tps, decode_tps = measured(load.arrival_rps), measured(load.prefill_tps), measured(load.decode_tps)
    if not rps or prefill_tps is None or decode_tps is None:
        return None, None
    return prefill_tps / rps, decode_tps / rps


def measured(signal: Signal) -> float | None:
    return signal.value if isinstance(signal, Measured) else None
