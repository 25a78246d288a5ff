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
    """One service now, as one gateway sees it. `gateways` >= 1 share the service's slots and its queue evenly."""

    now_s: float
    queued: int
    variants: tuple[VariantState, ...]
    gateways: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Start the request on `app` now."""

    app: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Wait for a slot until `until_s`. `cold` when no replica at all is counted on."""

    until_s: float
    cold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """Turn the request away; the caller may come back after `retry_after_s` seconds."""

    retry_after_s: float
    why: str


Verdict = Admit | Queue | Shed

# What `verdict` says; its numbers, because the simulated world compiles it and `load`.
ADMIT, QUEUE, TIMED_OUT, QUEUE_FULL, NO_SLOT = range(5)
_WHY: dict[int, str] = {TIMED_OUT: "queue_timeout", QUEUE_FULL: "queue_full", NO_SLOT: "no_free_slot"}


def verdict(free: bool, cold: bool, overdue: bool, full: bool, may_queue: bool) -> int:
    """The rule of `admit`, as one of the numbers above.

    `free`: nobody waits and some variant has a free slot; `cold`: no replica is counted on; `overdue`: the request's
    time is up; `full`: the queue has no place; `may_queue`: the service's requests may wait for a busy replica.
    """
    if free:
        return ADMIT
    if overdue:
        return TIMED_OUT
    if full:
        return QUEUE_FULL
    return QUEUE if cold or may_queue else NO_SLOT


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


def share(total: int, gateways: int) -> int:
    """One gateway's part of `total` slots or places; a lone slot is everyone's, never no one's."""
    return max(1, total // gateways) if total > 0 else 0


def states(route: ServiceRoute, running: Mapping[str, int], *, gateways: int, fresh: bool) -> tuple[VariantState, ...]:
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
                slots=share(replicas * variant.max_concurrency_per_replica, gateways),
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

    It starts only when nobody waits, waits while the queue has room and its time is not up, and is shed otherwise. A
    service that does not list ``queue`` among its sacrifices never waits for a busy replica, only for the first one.
    """
    app = route(state.variants) if not state.queued else None
    until_s = request.arrived_at_s + policy.queue_timeout_s
    cold = not any(v.replicas > 0 for v in state.variants)
    what = verdict(
        free=app is not None,
        cold=cold,
        overdue=state.now_s >= until_s,
        full=state.queued >= share(policy.max_queued, state.gateways),
        may_queue="queue" in policy.sacrifice,
    )
    if what == ADMIT and app is not None:
        return Admit(app=app)
    if what == QUEUE:
        return Queue(until_s=until_s, cold=cold)
    return Shed(retry_after_s=policy.retry_after_s, why=_WHY[what])


def _load(variant: VariantState) -> tuple[float, str]:
    return load(variant.running, variant.replicas, variant.capacity_rps_per_replica), variant.app
