"""Who is served, who waits and who is turned away. The simulated world decides it with the same code as the gateway.

Pure functions over small frozen states. May not read a clock, do I/O, import Ray or keep anything between calls:
instants (seconds of any one monotonic clock) are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .wire import ServiceRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A request as admission sees it. `priority`: larger = more important; `seq` is unique and grows with arrival."""

    priority: int
    arrived_at_s: float
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantState:
    """One application now: replicas counted on, requests/s and requests in flight they carry, and those in flight."""

    app: str
    replicas: int
    capacity_rps_per_replica: float
    slots: int
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """One service now, as one gateway sees it. `gateways` >= 1 share the service's slots and its queue evenly; `rank`
    says which of them this one is. `least` is the lowest priority that waits (None: nobody does), `ahead` how many of
    the `queued` would be served before the request (None: all), `plan_age_s` how old the plan's expectations are.
    """

    now_s: float
    queued: int
    variants: tuple[VariantState, ...]
    gateways: int = 1
    rank: int = 0
    least: int | None = None
    ahead: int | None = None
    plan_age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Start the request on `app` now."""

    app: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Wait for a slot until `until_s`. `cold` when no replica at all is counted on; `displaces` when the queue is full
    and its last, who is less important, has to go; `spills` when an overflow endpoint should take the request instead.
    """

    until_s: float
    cold: bool
    displaces: bool = False
    spills: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """Turn the request away; the caller may come back after `retry_after_s` seconds."""

    retry_after_s: float
    why: str


Verdict = Admit | Queue | Shed

# What `verdict` says; its numbers, because the simulated world compiles it and `load`.
ADMIT, QUEUE, TIMED_OUT, QUEUE_FULL, NO_SLOT, HOPELESS = range(6)
_WHY: dict[int, str] = {
    TIMED_OUT: "queue_timeout",
    QUEUE_FULL: "queue_full",
    NO_SLOT: "no_free_slot",
    HOPELESS: "wait_too_long",
}
RETRY_MIN_S, RETRY_MAX_S = 1.0, 120.0


def verdict(free: bool, cold: bool, overdue: bool, full: bool, may_queue: bool, hopeless: bool) -> int:
    """The rule of `admit`, as one of the numbers above.

    `free`: nobody waits and some variant has a free slot; `cold`: no replica is counted on; `overdue`: the request's
    time is up; `full`: the queue has no place; `may_queue`: the service's requests may wait for a busy replica;
    `hopeless`: by all that is known the request's time will be up before its turn comes.
    """
    if free:
        return ADMIT
    if overdue:
        return TIMED_OUT
    if full:
        return QUEUE_FULL
    if not cold and not may_queue:
        return NO_SLOT
    return HOPELESS if hopeless else QUEUE


def wait_s(ahead: int, rps: float, next_capacity_s: float) -> float:
    """How long a request with `ahead` before it waits at least: until ready replicas (requests/s in all) have taken
    those and itself, or until the next capacity comes, whichever is sooner.
    """
    return min((ahead + 1) / rps, next_capacity_s) if rps > 0 else next_capacity_s


def spills(first: bool, expected_wait_s: float, patience_s: float) -> bool:
    """Whether a request that cannot start now should go to the overflow endpoint rather than wait: because the policy
    puts that `first`, or because its turn is expected later than the `patience_s` that it has left.
    """
    return first or expected_wait_s > patience_s


def turn_s(last_turn_s: float, now_s: float, drained_in_s: float, rps: float) -> float:
    """When the next client turned away should come back, after one who was told `last_turn_s`: each when its own place
    will be free, so that they do not all return at once. Between RETRY_MIN_S and RETRY_MAX_S from now.
    """
    earliest = max(last_turn_s, now_s + drained_in_s)
    turn = earliest + (1.0 / rps if rps > 0 else 0.0)
    return min(max(turn, now_s + RETRY_MIN_S), now_s + RETRY_MAX_S)


def load(running: int, replicas: int, rps_per_replica: float) -> float:
    """How loaded a variant would be with one request more: requests in flight per request/s; inf without capacity."""
    capacity = replicas * rps_per_replica
    return (running + 1) / capacity if capacity > 0 else math.inf


def rank(ticket: Ticket) -> tuple[int, float, int]:
    """Sort key of the queue: most important first, then earliest, then lowest `seq`."""
    return (-ticket.priority, ticket.arrived_at_s, ticket.seq)


def late(waited_s: float, slack_s: float) -> bool:
    """Whether a request that has waited so long can no longer meet its service's limits."""
    return waited_s > slack_s


def order(queue: Iterable[Ticket], now_s: float = 0.0, slack_s: float | None = None) -> tuple[Ticket, ...]:
    """The queue in the order in which slots are given at `now_s`.

    Of one priority those that can still meet their limits go first: who is late already would only make the next one
    late too, and so a backlog that has formed once would make every request miss. With `slack_s` None nobody is late.
    """
    if slack_s is None:
        return tuple(sorted(queue, key=rank))
    return tuple(sorted(queue, key=lambda t: (-t.priority, late(now_s - t.arrived_at_s, slack_s), *rank(t)[1:])))


def first(queue: Sequence[Ticket], now_s: float, slack_s: float | None) -> int:
    """Index of the first of `order`, in a queue that is sorted by `rank` and not empty."""
    if slack_s is not None:
        for index, ticket in enumerate(queue):
            if ticket.priority != queue[0].priority:
                break
            if not late(now_s - ticket.arrived_at_s, slack_s):
                return index
    return 0


def share(total: int, gateways: int, rank: int = 0) -> int:
    """The part of `total` slots or places that the `rank`-th of all gateways has: together exactly `total`, but a lone
    slot is everyone's, never no one's.
    """
    return max(1, total // gateways + (rank < total % gateways)) if total > 0 else 0


def capacity_rps(variants: Iterable[VariantState], gateways: int = 1) -> float:
    """Requests/s that ready replicas carry for one of the gateways."""
    return sum(v.replicas * v.capacity_rps_per_replica for v in variants) / gateways


def states(
    route: ServiceRoute, running: Mapping[str, int], *, gateways: int, fresh: bool, rank: int = 0
) -> tuple[VariantState, ...]:
    """The variants of `route` with this gateway's share of their slots.

    With a fresh plan ready replicas are what counts. Without one nobody knows them, so each variant is given the slots
    of all replicas there is room for, and Serve's own queue holds the request until one is there: what waits, waits
    where Serve's local rule sees it and scales. Variants that the last plan left at zero are used only when all are,
    and those that no owned instance can hold only when there is no other.
    """
    chosen = route.variants
    if not fresh:
        used = tuple(v for v in chosen if v.target_replicas or v.ready_replicas)
        chosen = used or tuple(v for v in chosen if v.max_replicas) or chosen
    rows = []
    for variant in chosen:
        replicas = variant.ready_replicas if fresh else max(1, variant.target_replicas, variant.max_replicas)
        rows.append(
            VariantState(
                app=variant.app,
                replicas=replicas,
                capacity_rps_per_replica=variant.capacity_rps_per_replica,
                slots=share(replicas * variant.max_concurrency_per_replica, gateways, rank),
                running=running.get(variant.app, 0),
            )
        )
    return tuple(rows)


def route(variants: Iterable[VariantState], exclude: Collection[str] = ()) -> str | None:
    """The application for the next request: least loaded for its capacity, ties by name; None when no slot is free."""
    free = [v for v in variants if v.replicas > 0 and v.running < v.slots and v.app not in exclude]
    return min(free, key=_load).app if free else None


def admit(request: Ticket, state: ServiceState, policy: ServiceRoute) -> Verdict:
    """What to do with `request`, which stands outside the queue of `state`.

    It starts only when nobody waits, waits while the queue has room, or one less important in it, and its turn can
    come in time, and is shed otherwise. A service that does not list ``queue`` among its sacrifices never waits for a
    busy replica, only for the first one; one that does not list ``shed`` waits whatever is expected.
    """
    app = route(state.variants) if not state.queued else None
    until_s = request.arrived_at_s + policy.queue_timeout_s
    cold = not any(v.replicas > 0 for v in state.variants)
    full = state.queued >= share(policy.max_queued, state.gateways, state.rank)
    above = state.least is not None and request.priority > state.least
    left_s = until_s - state.now_s
    what = verdict(
        free=app is not None,
        cold=cold,
        overdue=left_s <= 0.0,
        full=full and not above,
        may_queue="queue" in policy.sacrifice,
        hopeless="shed" in policy.sacrifice and expected_wait_s(state, policy, 0.0) > left_s,
    )
    if what == ADMIT and app is not None:
        return Admit(app=app)
    if what == QUEUE:
        return Queue(until_s=until_s, cold=cold, displaces=full, spills=_spills(request, state, policy))
    return Shed(retry_after_s=retry_after_s(state, policy), why=_WHY[what])


def expected_wait_s(state: ServiceState, policy: ServiceRoute, unknown_s: float) -> float:
    """`wait_s` of a request outside the queue; `unknown_s` when the plan does not say when the next capacity comes."""
    next_s = unknown_s if policy.next_capacity_s is None else max(0.0, policy.next_capacity_s - state.plan_age_s)
    ahead = state.queued if state.ahead is None else state.ahead
    return wait_s(ahead, capacity_rps(state.variants, state.gateways), next_s)


def retry_after_s(state: ServiceState, policy: ServiceRoute) -> float:
    """Seconds until the queue has drained or the plan's next capacity is there."""
    rps = capacity_rps(state.variants, state.gateways)
    next_s = max(0.0, policy.retry_after_s - state.plan_age_s)
    return min(max(min(state.queued / rps, next_s) if rps > 0 else next_s, RETRY_MIN_S), RETRY_MAX_S)


def overflow_first(policy: ServiceRoute) -> bool:
    """Whether the policy sends to the overflow endpoint before anybody waits."""
    words = policy.sacrifice
    return "overflow" in words and ("queue" not in words or words.index("overflow") < words.index("queue"))


def _spills(request: Ticket, state: ServiceState, policy: ServiceRoute) -> bool:
    if policy.overflow is None:
        return False
    patience_s = policy.queue_timeout_s if policy.slack_s is None else min(policy.slack_s, policy.queue_timeout_s)
    waited_s = state.now_s - request.arrived_at_s
    return spills(overflow_first(policy), expected_wait_s(state, policy, math.inf), patience_s - waited_s)


def _load(variant: VariantState) -> tuple[float, str]:
    return load(variant.running, variant.replicas, variant.capacity_rps_per_replica), variant.app
