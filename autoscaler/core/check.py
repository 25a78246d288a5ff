"""`check(plan, observation, policy, beliefs)`: what must hold of every plan, always on.

Pure; may not do I/O or read a clock. It re-derives each limit from the policy and the beliefs, and shares no code with
the modules that made the plan, so that a fault there does not hide here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from policies.model import PolicySet

from .beliefs import Beliefs, OfferingBelief, ServiceBelief
from .lifecycle import InstanceState
from .model import Launch, Missing, Observation, Plan
from .reasons import Reason, ReasonCode


def check(plan: Plan, observation: Observation, policy: PolicySet, *, beliefs: Beliefs) -> tuple[str, ...]:
    """Every invariant the plan breaks, in words; empty when it may be acted on."""
    if isinstance(observation.serving, Missing) or isinstance(observation.cloud, Missing):
        return (*_idle(plan), *_reasons(plan))  # the last targets, repeated: they were checked when they were made
    return (
        *_bounds(plan, policy),
        *_quotas(plan, policy, beliefs),
        *_launches(plan, beliefs),
        *_releases(plan, observation, beliefs),
        *_blindness(plan, observation, policy, beliefs),
        *_reasons(plan),
    )


def _bounds(plan: Plan, policy: PolicySet) -> Iterator[str]:
    entries = {key: entry for key, _, entry in policy.services()}
    totals: Counter[str] = Counter()
    for target in plan.targets:
        if target.service not in entries:
            yield f"target for {target.service}, which no policy names"
        elif target.replicas < 0 or target.wanted < 0:
            yield f"{target.service}/{target.variant}: negative target"
        totals[target.service] += target.wanted
    for key, total in totals.items():
        if key in entries and total > entries[key].max_replicas:
            yield f"{key}: {total} replicas wanted, max_replicas is {entries[key].max_replicas}"


def _quotas(plan: Plan, policy: PolicySet, beliefs: Beliefs) -> Iterator[str]:
    """No unit beyond its share and what it may borrow; and nobody borrows what no other unit lends."""
    gpus = {(s.service, s.variant): s.gpus * s.nodes for s in beliefs.shapes}
    used: Counter[str] = Counter()
    for target in plan.targets:
        used[target.service.split("/")[0]] += target.wanted * gpus.get((target.service, target.variant), 0)
    over = {unit.unit: used[unit.unit] - unit.quota_gpus for unit in policy.units if unit.quota_gpus is not None}
    lent = borrowed = 0
    for unit in policy.units:
        beyond = over.get(unit.unit, 0)
        lent += max(0, min(-beyond, _most(unit.lends, -beyond)))
        borrowed += max(0, beyond)
    for unit in policy.units:
        beyond = over.get(unit.unit, 0)
        if beyond > min(_most(unit.borrows, beyond), beyond if borrowed <= lent else 0):
            limits = f"quota_gpus is {unit.quota_gpus}, all units borrow {borrowed} and lend {lent}"
            yield f"unit {unit.unit}: {used[unit.unit]} GPUs wanted, {limits}"


def _most(allowed: bool | int, all_of_it: int) -> int:
    return (all_of_it if allowed else 0) if isinstance(allowed, bool) else allowed


def _launches(plan: Plan, beliefs: Beliefs) -> Iterator[str]:
    ids = [*(r.id for r in plan.launches), *(r.id for r in plan.drains), *(r.id for r in plan.terminates)]
    if len(set(ids)) != len(ids):
        yield "two actions share an id"
    for launch in plan.launches:
        if launch.count < 1 or not launch.alternates:
            yield f"{launch.id}: launches nothing"
        if len(set(launch.alternates)) != len(launch.alternates):
            yield f"{launch.id}: an offering is named twice"
        for offering in launch.alternates:
            if offering not in beliefs.offers or offering in beliefs.unlisted:
                yield f"{launch.id}: unknown offering {offering}"
            elif beliefs.offerings.get(offering, COLD).cool_until_s > plan.at_s and not _probe(launch):
                yield f"{launch.id}: {offering} is cooling down"
            elif _breaker_open(beliefs, offering, plan.at_s):
                yield f"{launch.id}: instances of the type of {offering} do not join, its breaker is open"


COLD = OfferingBelief()


def _probe(launch: Launch) -> bool:
    """One instance of one offering, asked whether it has opened."""
    return launch.count == 1 == len(launch.alternates) and launch.reasons[0].code is ReasonCode.PROBE


def _breaker_open(beliefs: Beliefs, offering: str, at_s: float) -> bool:
    breaker = beliefs.breakers.get(beliefs.offers[offering].instance_type)
    return breaker is not None and breaker.open_until_s > at_s


def _releases(plan: Plan, observation: Observation, beliefs: Beliefs) -> Iterator[str]:
    if isinstance(observation.serving, Missing):
        return
    busy = {replica.instance_id for replica in observation.serving.replicas if replica.instance_id}
    for terminate in plan.terminates:
        instance = beliefs.instances.get(terminate.instance_id)
        if instance is None:
            yield f"{terminate.id}: terminates {terminate.instance_id}, which is not ours"
        elif instance.state is InstanceState.JOINED and instance.missing_since_s is None:
            yield f"{terminate.id}: terminates {terminate.instance_id} before it was drained"
        elif instance.state is InstanceState.DRAINING and terminate.instance_id in busy:
            deadline = instance.drain_deadline_at_s
            if deadline is None or plan.at_s <= deadline:
                yield f"{terminate.id}: terminates {terminate.instance_id} with replicas before its deadline"
    for drain in plan.drains:
        known = beliefs.instances.get(drain.instance_id)
        if known is None or known.state is not InstanceState.JOINED:
            yield f"{drain.id}: drains {drain.instance_id}, which is not in the cluster"


def _idle(plan: Plan) -> Iterator[str]:
    if plan.launches or plan.drains or plan.terminates:
        yield "acts without a view of the cluster and the cloud"


def _blindness(plan: Plan, observation: Observation, policy: PolicySet, beliefs: Beliefs) -> Iterator[str]:
    if isinstance(observation.serving, Missing):
        return
    joined = (i for i in beliefs.instances.values() if i.state is InstanceState.JOINED)
    staying = {i.instance_id for i in joined if not i.reclaim_at_s}
    now: Counter[str] = Counter()
    for replica in observation.serving.replicas:
        if replica.state in ("ready", "loading") and replica.instance_id in staying:
            now[replica.service] += 1
    wanted: Counter[str] = Counter()
    for target in plan.targets:
        wanted[target.service] += target.wanted
    preempted = {t.service for t in plan.targets if any(r.code in _LIMITS for r in t.reasons)}
    for key, _, entry in policy.services():
        blind = beliefs.services.get(key, ServiceBelief()).blind_why
        if blind and key not in preempted and wanted[key] < min(now[key], entry.max_replicas):
            yield f"{key}: reduced from {now[key]} to {wanted[key]} while blind ({blind})"


_LIMITS = frozenset({"preempted", "quota_gpus", "budget", "budget_month"})


def _reasons(plan: Plan) -> Iterator[str]:
    named: list[tuple[str, tuple[Reason, ...]]] = [
        *((f"demand of {row.service}", row.reasons) for row in plan.demands),
        *((f"target of {row.service}/{row.variant}", row.reasons) for row in plan.targets),
        *((row.id, row.reasons) for row in plan.launches),
        *((row.id, row.reasons) for row in plan.drains),
        *((row.id, row.reasons) for row in plan.terminates),
        *((f"shortfall of {row.service}", row.reasons) for row in plan.shortfalls),
    ]
    for name, reasons in named:
        if not reasons:
            yield f"{name} has no reason"
