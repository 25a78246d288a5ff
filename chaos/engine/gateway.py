"""The gateway before the replicas, compiled: the arithmetic of `serve_apps.admission` on the engine's own arrays.

May not decide anything that `serve_apps.admission` decides. The queue is a chain in order of arrival at the gateway;
all its requests have one priority and one time limit, so the head is the first whose time is up.
"""

from __future__ import annotations

import math
from typing import Any

from serve_apps import admission

from . import heaps
from .ending import overflow, turn_away
from .jit import jit
from .replica import accept
from .state import NONE, load_at, load_items_at, load_place_at, replica_at, request_at, service_at, variant_at

_verdict = jit(admission.verdict)
_load = jit(admission.load)
_late = jit(admission.late)
_wait_s = jit(admission.wait_s)
_spills = jit(admission.spills)


@jit
def choose(state: Any, service: int) -> int:
    """The variant for the next request, as `admission.route` has it; NONE when no slot is free."""
    best, least = NONE, math.inf
    for index in range(service_at(state, service).variants):
        variant = variant_at(state, service * state.v + index)
        if variant.running < variant.slots:
            load = _load(variant.running, variant.replicas, variant.rps)
            if best == NONE or load < least:
                best, least = index, load
    return best


@jit
def dispatch(state: Any, service: int, index: int, slot: int, now_s: float) -> None:
    """Start the request on the least loaded replica of variant `index`, which has a free slot; ties by number."""
    variant = variant_at(state, service * state.v + index)
    items = load_items_at(state, (service * state.v + index) * state.r)
    replica = items[0]
    here = replica_at(state, replica)
    here.in_flight += 1
    variant.running += 1
    service_at(state, service).running += 1
    load_at(state, 0)[replica] = here.in_flight / here.slots
    heaps.down(items, load_at(state, 0), load_place_at(state, 0), variant.replicas, 0)
    accept(state, replica, slot, now_s)


@jit
def arrive(state: Any, service: int, slot: int, now_s: float) -> None:
    """A request or call arrives at the gateway: it starts, waits or is turned away."""
    entry, request = service_at(state, service), request_at(state, slot)
    entry.arrived += 1
    entry.requests += 1
    entry.input_tokens += request.input
    request.arrived_s = now_s
    index = choose(state, service) if entry.queued == 0 else NONE
    rps = _ready_rps(state, service) if index == NONE else 0.0
    what = _verdict(
        index != NONE,
        index == NONE and not _any_replica(state, service),
        now_s >= now_s + entry.timeout_s,
        entry.queued >= entry.max_queued,
        entry.can_queue != 0,
        entry.can_shed != 0 and _expected_wait_s(entry, rps, now_s, 0.0) > entry.timeout_s,
    )
    request.cold = what != admission.ADMIT and entry.coming > 0
    if what == admission.ADMIT:
        dispatch(state, service, index, slot, now_s)
    elif what == admission.QUEUE:
        wait_s = _expected_wait_s(entry, rps, now_s, math.inf)
        over = _spills(entry.overflow_first != 0, wait_s, min(entry.slack_s, entry.timeout_s))
        if not (over and overflow(state, service, slot, now_s)):
            enqueue(state, service, slot)
    else:
        turn_away(state, service, slot, now_s)


@jit
def _ready_rps(state: Any, service: int) -> float:
    rps = 0.0
    for index in range(service_at(state, service).variants):
        variant = variant_at(state, service * state.v + index)
        rps += variant.replicas * variant.rps
    return rps


@jit
def _expected_wait_s(entry: Any, rps: float, now_s: float, unknown_s: float) -> float:
    """As `admission.expected_wait_s`, for the service's next request."""
    next_s = unknown_s if math.isnan(entry.next_at_s) else max(0.0, entry.next_at_s - now_s)
    return _wait_s(entry.queued, rps, next_s)


@jit
def _any_replica(state: Any, service: int) -> bool:
    for index in range(service_at(state, service).variants):
        if variant_at(state, service * state.v + index).replicas > 0:
            return True
    return False


@jit
def enqueue(state: Any, service: int, slot: int) -> None:
    """Put the request into the queue: behind all who arrived at the gateway no later."""
    entry, request = service_at(state, service), request_at(state, slot)
    if entry.coming > 0:
        request.cold = 1
    before, after = entry.queue_tail, NONE
    if before != NONE and request_at(state, before).arrived_s > request.arrived_s:
        # Only what a removed replica gives back arrived earlier than others: its place is near the front.
        before, after = NONE, entry.queue_head
        while request_at(state, after).arrived_s <= request.arrived_s:
            before, after = after, request_at(state, after).next
    request.next = after
    if before == NONE:
        entry.queue_head = slot
    else:
        request_at(state, before).next = slot
    if after == NONE:
        entry.queue_tail = slot
    entry.queued += 1


@jit
def _dequeue(state: Any, service: int, before: int) -> int:
    """Take the one behind `before` (NONE: the head) out of the queue, which is not empty."""
    entry = service_at(state, service)
    slot = entry.queue_head if before == NONE else request_at(state, before).next
    after = request_at(state, slot).next
    if before == NONE:
        entry.queue_head = after
    else:
        request_at(state, before).next = after
    if after == NONE:
        entry.queue_tail = before
    if entry.late_tail == slot:
        entry.late_tail = NONE  # only a head is taken from among the late: it was the only one
    entry.queued -= 1
    return slot


@jit
def _first(state: Any, service: int, now_s: float) -> int:
    """Take out of the queue whom `admission.first` names. The late are its front, up to `late_tail`."""
    entry = service_at(state, service)
    slot = entry.queue_head if entry.late_tail == NONE else request_at(state, entry.late_tail).next
    while slot != NONE and _late(now_s - request_at(state, slot).arrived_s, entry.slack_s):
        entry.late_tail = slot
        slot = request_at(state, slot).next
    return _dequeue(state, service, NONE if slot == NONE else entry.late_tail)


@jit
def pump(state: Any, service: int, now_s: float) -> None:
    """Hand free slots to those who wait, in order."""
    entry = service_at(state, service)
    while entry.queued > 0:
        index = choose(state, service)
        if index == NONE:
            return
        dispatch(state, service, index, _first(state, service, now_s), now_s)


@jit
def expiry_s(state: Any, service: int) -> float:
    """When the time of the first in the queue is up; inf with an empty queue."""
    entry = service_at(state, service)
    if entry.queued == 0:
        return math.inf
    return request_at(state, entry.queue_head).arrived_s + entry.timeout_s


@jit
def expire(state: Any, service: int, now_s: float) -> None:
    """Turn away all in the queue whose time is up."""
    while expiry_s(state, service) <= now_s:
        turn_away(state, service, _dequeue(state, service, NONE), now_s)
