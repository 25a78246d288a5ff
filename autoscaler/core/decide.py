"""`decide(observation, policy, beliefs, now_s) -> Plan`: composes demand, capacity, placement and restraint.

Pure and deterministic: no I/O, no clock, no randomness, no time limit. What is not seen is not changed: without a view
of the cluster or of the cloud the last targets are repeated and nothing is launched, drained or terminated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil

from policies.model import PolicySet, Service
from serve_apps.wire import app_name

from .beliefs import Beliefs, InstanceBelief, ServiceBelief
from .berths import Berth, Need, Option
from .calibrate import reasons_for, slow_instances, timing_for
from .capacity import Capacity, capacity_at, mix_or_prior
from .coldstart import boot_s, load_s, protected, start_limit_s, stuck, waited_s
from .demand import demands, mix
from .lifecycle import INTENT_TIMEOUT_S, STARTING, InstanceState
from .model import Demand, Launch, Missing, Observation, Offering, Plan, Route, ServingView, Shape, Shortfall, Target
from .orders import drain_of, told
from .place import Order, place
from .publish import queue_timeout_s
from .publish import to_message as to_message
from .rank import open_for_work
from .reasons import ReasonCode, why
from .release import Presence, drains, terminates
from .shares import Purse, Tree
from .spend import pace_usd_per_h


def decide(observation: Observation, policy: PolicySet, beliefs: Beliefs, now_s: float, plan_id: str) -> Plan:
    """The plan of one tick. `beliefs` have learnt `observation`; the same arguments give the same plan, byte for
    byte.
    """
    serving, cloud = observation.serving, observation.cloud
    if isinstance(serving, Missing):
        return _repeat(policy, beliefs, serving.why, now_s, plan_id)
    if isinstance(cloud, Missing):
        return _repeat(policy, beliefs, cloud.why, now_s, plan_id)
    presence = Presence.of(serving)
    asked = demands(policy, beliefs, presence.by_service(), now_s)
    asked = tuple(told(protected(demand, serving, beliefs, now_s), beliefs, now_s) for demand in asked)
    needs = _needs(asked, policy, beliefs, presence, now_s)
    usable = _berths(beliefs, presence, needs, now_s)
    placed = place(needs, usable, beliefs, now_s)
    return Plan(
        id=plan_id,
        at_s=now_s,
        demands=asked,
        targets=_targets(needs, usable, presence),
        launches=_launches(placed.orders, plan_id),
        drains=drains(beliefs, usable, presence, _settled(needs), plan_id, now_s),
        terminates=terminates(beliefs, usable, presence, plan_id, now_s),
        routes=_routes(needs, serving),
        shortfalls=_shortfalls(needs, beliefs, now_s),
        holds=placed.holds,
    )


def _repeat(policy: PolicySet, beliefs: Beliefs, blind_why: str, now_s: float, plan_id: str) -> Plan:
    """The last plan's targets and routes, and no act."""
    last = beliefs.last_plan or Plan(
        id="", at_s=now_s, demands=(), targets=(), launches=(), drains=(), terminates=(), routes=(), shortfalls=()
    )
    last = still_named(last, policy)
    reason = why(ReasonCode.BLIND, blind_why, repeated_targets=len(last.targets))
    targets = tuple(replace(target, reasons=(reason,)) for target in last.targets)
    return replace(last, id=plan_id, at_s=now_s, targets=targets, launches=(), drains=(), terminates=())


def still_named(plan: Plan, policy: PolicySet) -> Plan:
    """The plan without the services that a policy newer than it no longer names."""
    named = {key for key, _, _ in policy.services()}
    return replace(
        plan,
        demands=tuple(row for row in plan.demands if row.service in named),
        targets=tuple(row for row in plan.targets if row.service in named),
        routes=tuple(row for row in plan.routes if row.service in named),
        shortfalls=tuple(row for row in plan.shortfalls if row.service in named),
    )


def _needs(
    asked: tuple[Demand, ...], policy: PolicySet, beliefs: Beliefs, presence: Presence, now_s: float
) -> tuple[Need, ...]:
    shapes: dict[str, list[Shape]] = {}
    for shape in beliefs.shapes:
        shapes.setdefault(shape.service, []).append(shape)
    tree = Tree()
    purses = {
        unit.unit: Purse(unit=unit, tree=tree, pace_usd_per_h=pace_usd_per_h(unit, beliefs, now_s))
        for unit in policy.units
    }
    served = {replica.service for replica in presence.replicas if replica.ready}
    needs = []
    for demand, (key, unit, entry) in zip(asked, policy.services(), strict=True):
        tiers = _tiers(entry)
        options = tuple(
            Option(
                shape=s,
                capacity=_capacity(s, entry, beliefs, demand.arrival_rps),
                lead_s=boot_s(beliefs, s) + load_s(beliefs, s),
                tier=tiers.get(s.variant, 0),
            )
            for s in shapes.get(key, ())
        )
        waits = key not in served or beliefs.services.get(key, ServiceBelief()).queued > 0.0
        needs.append(
            Need(
                demand=demand,
                entry=entry,
                purse=purses[unit.unit],
                options=options,
                queue_s=_queue_s(entry, demand.lead_s),
                pressing=1.0 if waits else 1.0 - demand.quantile,  # only what is beyond the quantile is missed
            )
        )
    return tuple(needs)


def _tiers(entry: Service) -> dict[str, int]:
    """Variants are listed best first; those after the first are a sacrifice where the policy names them as one."""
    return {v.id: n for n, v in enumerate(entry.variants)} if "smaller_variant" in entry.sacrifice else {}


def _queue_s(entry: Service, lead_s: float) -> float:
    """How long requests wait before a smaller variant is used: as the gateway lets them, if they are to wait first."""
    words = entry.sacrifice
    first = "queue" in words and "smaller_variant" in words and words.index("queue") < words.index("smaller_variant")
    return queue_timeout_s(entry, lead_s) if first else 0.0


def _capacity(shape: Shape, entry: Service, beliefs: Beliefs, rps: float) -> Capacity:
    """Planned at a pessimistic quantile of the learnt times; but doubt alone makes no limit unreachable."""
    inputs, outputs = mix(beliefs, shape.service)
    known = beliefs.services.get(shape.service, ServiceBelief())
    for timing in (timing_for(beliefs, shape), timing_for(beliefs, shape, z=0.0)):
        request = mix_or_prior(inputs, outputs, timing)
        request = replace(request, arrival_cv=known.bursts.arrival_cv, prefix_share=known.prompts.prefix_share)
        found = capacity_at(timing, request, entry.slo, entry.goal, rps)
        if all(reason.code is not ReasonCode.UNREACHABLE_SLO for reason in found.reasons):
            break
    return replace(found, reasons=(*found.reasons, *reasons_for(beliefs, shape)))


def _berths(beliefs: Beliefs, presence: Presence, needs: tuple[Need, ...], now_s: float) -> list[Berth]:
    """Instances that may be given work: in the cluster and staying, or starting and not past their deadline.

    One whose offering ends within the lead of a successor gets no more: the successor is ordered now, and what runs
    there stays in the targets until it is ready.
    """
    leads: dict[str, float] = {}
    for option in (option for need in needs for option in need.options):
        kind = option.shape.instance_type
        leads[kind] = max(option.lead_s, leads.get(kind, 0.0))
    slow, late = slow_instances(beliefs), stuck(beliefs, now_s)
    berths = []
    for key in sorted(beliefs.instances):
        instance = beliefs.instances[key]
        offering = beliefs.offers.get(instance.offering)
        lead = leads.get(offering.instance_type, 0.0) if offering is not None else 0.0
        if offering is not None and key not in late and _usable(instance, offering, lead, beliefs, now_s):
            berths.append(
                Berth(
                    instance_id=key,
                    offering=offering,
                    joined=instance.state is InstanceState.JOINED,
                    launched_at_s=instance.launched_at_s,
                    present=presence.led.get(key, {}),
                    ready=presence.ready.get(key, {}),
                    pace=slow.get(key, 1.0),
                )
            )
    for token, intent in sorted(beliefs.intents.items()):  # calls without an answer yet: they may be coming
        offering = beliefs.offers.get(intent.offering)
        if offering is not None and now_s - intent.tried_at_s <= INTENT_TIMEOUT_S:
            berths += [
                Berth(
                    instance_id=f"{token}+{n}",
                    offering=offering,
                    joined=False,
                    launched_at_s=intent.tried_at_s,
                    present={},
                )
                for n in range(intent.count)
            ]
    return berths


def _usable(instance: InstanceBelief, offering: Offering, lead_s: float, beliefs: Beliefs, now_s: float) -> bool:
    if instance.reclaim_at_s is not None or instance.missing_since_s is not None:
        return False
    if drain_of(beliefs, instance.instance_id, now_s) is not None:
        return False
    if not open_for_work(offering, lead_s, now_s):
        return False
    if instance.state is InstanceState.JOINED:
        return True
    if instance.state not in STARTING:
        return False
    limit = start_limit_s(beliefs, instance)
    return waited_s(instance, instance.since_s, limit, now_s) <= limit


def _targets(needs: tuple[Need, ...], berths: list[Berth], presence: Presence) -> tuple[Target, ...]:
    """What to publish: replicas placed in the cluster, and those on leaving nodes until a successor is ready."""
    seats = [seat for need in needs for seat in need.seats]
    wanted = Counter(seat.option.app for seat in seats)
    here = Counter(seat.option.app for seat in seats if seat.joined)
    staying = {berth.instance_id for berth in berths}
    leaving, ready = presence.outside(staying), presence.ready_inside(staying)
    rows = []
    for need in needs:
        handover = _handover(need, wanted, here, leaving, ready)
        _note_ceiling(need)
        for option in need.options:
            app = option.app
            placed = why(ReasonCode.PLACED, placed=here[app], wanted=wanted[app], leaving=handover[app])
            rows.append(
                Target(
                    service=need.demand.service,
                    variant=option.shape.variant,
                    wanted=wanted[app],
                    replicas=here[app] + handover[app],
                    reasons=(placed, *option.capacity.reasons, *need.reasons),
                )
            )
    return tuple(rows)


def _note_ceiling(need: Need) -> None:
    """Say where the policy's ceiling is what the demand meets."""
    carried = max((option.capacity.rps for option in need.options), default=0.0)
    lacking = ceil((need.demand.arrival_rps - need.rps) / carried - 1e-9) if carried else 0
    if lacking > 0 and need.replicas >= need.entry.max_replicas:
        need.note(why(ReasonCode.MAX_REPLICAS, ceiling=need.entry.max_replicas, wanted=need.replicas + lacking))


def _handover(
    need: Need, wanted: Counter[str], here: Counter[str], leaving: Counter[str], ready: Counter[str]
) -> Counter[str]:
    """Replicas on leaving nodes that must stay in the target because their successor, of any variant, is not ready.

    Serve itself keeps a replica on a draining node until a successor of the same application runs, so those are not
    counted twice.
    """
    apps = [option.app for option in need.options]
    served_by_serve = {app: min(leaving[app], max(0, here[app] - ready[app])) for app in apps}
    lacking = sum(wanted[app] - ready[app] - served_by_serve[app] for app in apps) + _unplaced(need)
    handover: Counter[str] = Counter()
    for app in apps:
        handover[app] = max(0, min(leaving[app] - served_by_serve[app], lacking))
        lacking -= handover[app]
    return handover


def _unplaced(need: Need) -> int:
    """Replicas that have no place anywhere, in the variant that carries most."""
    best = max(need.options, key=lambda option: option.capacity.rps, default=None)
    return need.missing(best) if best is not None else 0


def _settled(needs: tuple[Need, ...]) -> frozenset[str]:
    """Services whose every replica has a place in the cluster, and none is missing."""
    return frozenset(
        need.demand.service for need in needs if not _unplaced(need) and all(seat.joined for seat in need.seats)
    )


def _launches(orders: tuple[Order, ...], plan_id: str) -> tuple[Launch, ...]:
    return tuple(
        Launch(
            id=f"{plan_id}/{n}",
            service=order.service,
            variant=order.variant,
            count=order.count,
            alternates=order.alternates,
            reasons=order.reasons,
        )
        for n, order in enumerate(orders)
    )


def _routes(needs: tuple[Need, ...], serving: ServingView) -> tuple[Route, ...]:
    ready = Counter(app_name(r.service, r.variant) for r in serving.replicas if r.state == "ready")
    return tuple(
        Route(
            service=need.demand.service,
            variant=option.shape.variant,
            ready=ready[option.app],
            max_concurrency_per_replica=option.capacity.batch,
            capacity_rps_per_replica=option.capacity.rps,
        )
        for need in needs
        for option in need.options
    )


def _shortfalls(needs: tuple[Need, ...], beliefs: Beliefs, now_s: float) -> tuple[Shortfall, ...]:
    rows = []
    for need in needs:
        missing = _unplaced(need)
        if missing:
            rows.append(
                Shortfall(
                    service=need.demand.service,
                    replicas=missing,
                    expected_at_s=_expected_at_s(need, beliefs, now_s),
                    reasons=tuple(need.reasons),
                )
            )
    return tuple(rows)


def _expected_at_s(need: Need, beliefs: Beliefs, now_s: float) -> float | None:
    """When a cooling offering may be asked again, plus boot and load; None when nothing would help."""
    times = []
    for option in need.options:
        for name, belief in beliefs.offerings.items():
            offer = beliefs.offers.get(name)
            if offer is not None and offer.instance_type == option.shape.instance_type:
                lead_s = boot_s(beliefs, option.shape) + load_s(beliefs, option.shape)
                times.append(max(now_s, belief.cool_until_s) + lead_s)
    return min(times, default=None)
