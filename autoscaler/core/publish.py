"""A plan as the cluster sees it: targets for Serve, admission figures for the gateways, the rule for when we are gone.

Pure; may not do I/O or read a clock.
"""

from __future__ import annotations

from math import inf, isfinite

from policies.model import PolicySet, Service, Slo, Unit
from serve_apps.timing import Timing, decode_step_s, prefill_s
from serve_apps.wire import KeyRoute, LocalRule, OverflowRoute, PlanMessage, ServiceRoute, VariantRoute, app_name

from .beliefs import Beliefs, ServiceBelief
from .calibrate import timing_for
from .capacity import Mix, mix_or_prior
from .demand import lead_s
from .lifecycle import InstanceState
from .model import Plan, Route
from .spend import pace_usd_per_h

LOCAL_RULE_LOAD = 0.7  # requests in flight per replica that Serve aims at on its own, of the batch that meets the SLO
LOCAL_RULE_HOLD_S = 60.0
QUEUE_SLOTS = 8  # requests waiting per slot before new ones are turned away
QUEUE_MIN = 32
QUEUE_PATIENT = 100_000  # of a service that is never turned away
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
            _route(key, unit, entry, routes.get(key, []), targets, room, plan, beliefs, now_s)
            for key, unit, entry in policy.services()
        ),
        keys=keys(policy),
    )


def keys(policy: PolicySet) -> tuple[KeyRoute, ...]:
    """The API keys of all units, by hash."""
    return tuple(
        KeyRoute(
            unit=unit.unit,
            tenant=key.tenant,
            sha256=key.sha256,
            service=None if key.service is None else f"{unit.unit}/{key.service}",
        )
        for unit in policy.units
        for key in unit.api_keys
    )


def overflow(entry: Service, unit: Unit, beliefs: Beliefs, now_s: float) -> OverflowRoute | None:
    """The endpoint that may take what own capacity cannot: if the policy wants it, and the month's budget lasts."""
    given = entry.overflow
    if given is None or ("overflow" not in entry.sacrifice and "overflow" not in entry.markets):
        return None
    if given.usd_per_1m_tokens > 0.0 and pace_usd_per_h(unit, beliefs, now_s) == 0.0:
        return None
    return OverflowRoute(
        url=given.url,
        model=given.model or entry.model,
        rpm=given.rpm,
        usd_per_1m_tokens=given.usd_per_1m_tokens,
        key_env=given.key_env,
        key_file=given.key_file,
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
    unit: Unit,
    entry: Service,
    routes: list[Route],
    targets: dict[str, int],
    room: dict[str, int],
    plan: Plan,
    beliefs: Beliefs,
    now_s: float,
) -> ServiceRoute:
    lead = lead_s(beliefs, key)
    apps = {route.variant: app_name(key, route.variant) for route in routes}
    next_s = _next_capacity_s(key, plan, lead, now_s)
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
        max_queued=max(QUEUE_MIN, QUEUE_SLOTS * slots) if "shed" in entry.sacrifice else QUEUE_PATIENT,
        queue_timeout_s=queue_timeout_s(entry, lead),
        retry_after_s=min(max(next_s, RETRY_MIN_S), RETRY_MAX_S),
        next_capacity_s=next_s,
        overflow=overflow(entry, unit, beliefs, now_s),
        slack_s=_slack_s(key, entry, routes, beliefs),
        sacrifice=entry.sacrifice,
        ttft_s=entry.slo.ttft_s,
        tpot_s=entry.slo.tpot_s,
        e2e_s=min((s for s in (entry.slo.e2e_s, entry.slo.deadline_s) if s is not None), default=None),
    )


def queue_timeout_s(entry: Service, lead: float) -> float:
    """A service that may be shed waits as long as help takes twice over; one that may not waits."""
    limit = entry.slo.deadline_s or entry.slo.e2e_s or 0.0
    if "shed" not in entry.sacrifice:
        return max(UNBOUNDED_WAIT_S, limit)
    return max(limit, 2.0 * lead, RETRY_MIN_S)


def slack_s(slo: Slo, timing: Timing, mix: Mix, batch: int) -> float:
    """How long a request may wait and then still meet every limit in a batch of that size; inf without such limits."""
    prefill, step = prefill_s(timing, mix.input_tokens), decode_step_s(timing, batch, batch * mix.input_tokens)
    first, whole = prefill + step, prefill + mix.output_tokens * step
    rows = ((slo.ttft_s, first), (slo.e2e_s, whole), (slo.deadline_s, whole))
    return max(0.0, min((limit - needed for limit, needed in rows if limit is not None), default=inf))


def _slack_s(key: str, entry: Service, routes: list[Route], beliefs: Beliefs) -> float | None:
    """That of the slowest variant in use, or of all where none is ready; None when nobody is ever late."""
    known = beliefs.services.get(key, ServiceBelief())
    shapes = {shape.variant: shape for shape in beliefs.shapes if shape.service == key}
    used = [route for route in routes if route.ready] or routes
    slacks = []
    for route in used:
        timing = timing_for(beliefs, shapes[route.variant])
        mix = mix_or_prior(known.input_tokens, known.output_tokens, timing)
        slacks.append(slack_s(entry.slo, timing, mix, route.max_concurrency_per_replica))
    slack = min(slacks, default=inf)
    return slack if isfinite(slack) else None


def _next_capacity_s(key: str, plan: Plan, lead: float, now_s: float) -> float:
    """When more capacity is expected by the plan, else one lead from now."""
    short = next((row for row in plan.shortfalls if row.service == key), None)
    expected = short.expected_at_s - now_s if short is not None and short.expected_at_s is not None else lead
    return max(0.0, expected)
