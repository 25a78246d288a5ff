"""A plan as the cluster sees it: targets for Serve, admission figures for the gateways, the rule for when we are gone.

Pure; may not do I/O or read a clock.
"""

from __future__ import annotations

from policies.model import PolicySet, Service
from serve_apps.wire import LocalRule, PlanMessage, ServiceRoute, VariantRoute, app_name

from .beliefs import Beliefs
from .demand import lead_s
from .lifecycle import InstanceState
from .model import Plan, Route

LOCAL_RULE_LOAD = 0.7  # requests in flight per replica that Serve aims at on its own, of the batch that meets the SLO
LOCAL_RULE_HOLD_S = 60.0
QUEUE_SLOTS = 8  # requests waiting per slot before new ones are turned away
QUEUE_MIN = 32
UNBOUNDED_WAIT_S = 900.0
RETRY_MIN_S, RETRY_MAX_S = 2.0, 120.0


def to_message(
    plan: Plan, policy: PolicySet, beliefs: Beliefs, run_id: str, seq: int, now_s: float, stale_after_s: float
) -> PlanMessage:
    """The message for the board. Every application of ours has a target; one the plan does not name gets 0."""
    targets = {app_name(s.service, s.variant): 0 for s in beliefs.shapes}
    targets |= {app_name(t.service, t.variant): t.replicas for t in plan.targets}
    routes: dict[str, list[Route]] = {}
    for route in plan.routes:
        routes.setdefault(route.service, []).append(route)
    room = _room(beliefs)
    return PlanMessage(
        run_id=run_id,
        seq=seq,
        published_at_s=now_s,
        stale_after_s=stale_after_s,
        targets=targets,
        local_rules=local_rules(policy, plan.routes),
        services=tuple(
            _route(key, entry, routes.get(key, []), targets, room, plan, lead_s(beliefs, key), now_s)
            for key, _, entry in policy.services()
        ),
    )


def _room(beliefs: Beliefs) -> dict[str, int]:
    """How many replicas of each application the instances in the cluster can hold, were they alone on them.

    Empty while nothing is known of any cloud: a config that is rendered for Serve alone.
    """
    if not beliefs.offers:
        return {}
    joined = (i.offering for i in beliefs.instances.values() if i.state is InstanceState.JOINED and not i.reclaim_at_s)
    gpus = [(offer.instance_type, offer.gpus) for name in joined if (offer := beliefs.offers.get(name))]
    return {
        app_name(s.service, s.variant): sum(n // s.gpus for kind, n in gpus if kind == s.instance_type) // s.nodes
        for s in beliefs.shapes
    }


def local_rules(policy: PolicySet, routes: tuple[Route, ...]) -> dict[str, LocalRule]:
    """What Serve does alone: enough replicas for the requests in flight; the first variant keeps the service's
    floor.
    """
    entries = {key: entry for key, _, entry in policy.services()}
    rules = {}
    seen: set[str] = set()
    for route in routes:
        entry = entries[route.service]
        first = route.service not in seen
        seen.add(route.service)
        rules[app_name(route.service, route.variant)] = LocalRule(
            target_ongoing_per_replica=max(1.0, LOCAL_RULE_LOAD * route.max_concurrency_per_replica),
            min_replicas=0 if entry.scale_to_zero or not first else entry.min_replicas,
            max_replicas=entry.max_replicas,
            downscale_hold_s=LOCAL_RULE_HOLD_S,
        )
    return rules


def _route(
    key: str,
    entry: Service,
    routes: list[Route],
    targets: dict[str, int],
    room: dict[str, int],
    plan: Plan,
    lead: float,
    now_s: float,
) -> ServiceRoute:
    apps = {route.variant: app_name(key, route.variant) for route in routes}
    slots = sum(max(route.ready, targets[apps[route.variant]]) * route.max_concurrency_per_replica for route in routes)
    return ServiceRoute(
        service=key,
        priority=entry.priority,
        variants=tuple(
            VariantRoute(
                app=apps[route.variant],
                target_replicas=targets[apps[route.variant]],
                max_replicas=min(entry.max_replicas, room.get(apps[route.variant], entry.max_replicas)),
                ready_replicas=route.ready,
                max_concurrency_per_replica=route.max_concurrency_per_replica,
                capacity_rps_per_replica=route.capacity_rps_per_replica,
            )
            for route in routes
        ),
        max_queued=max(QUEUE_MIN, QUEUE_SLOTS * slots),
        queue_timeout_s=queue_timeout_s(entry, lead),
        retry_after_s=_retry_after_s(key, plan, lead, now_s),
        sacrifice=entry.sacrifice,
    )


def queue_timeout_s(entry: Service, lead: float) -> float:
    """A service that may be shed waits as long as help takes twice over; one that may not waits."""
    if "shed" not in entry.sacrifice:
        return UNBOUNDED_WAIT_S
    limit = entry.slo.deadline_s or entry.slo.e2e_s or 0.0
    return max(limit, 2.0 * lead, RETRY_MIN_S)


def _retry_after_s(key: str, plan: Plan, lead: float, now_s: float) -> float:
    """When capacity is expected by the plan, else one lead from now; between 2 s and 2 min."""
    short = next((row for row in plan.shortfalls if row.service == key), None)
    wait = short.expected_at_s - now_s if short is not None and short.expected_at_s is not None else lead
    return min(max(wait, RETRY_MIN_S), RETRY_MAX_S)
