"""The gateway before the replicas, compiled: the arithmetic of `serve_apps.admission` on the engine's own arrays.

May not decide anything that `serve_apps.admission` decides. The queue is a chain in order of arrival at the gateway;
all its requests have one priority and one time limit, so the first to start is also the first whose time is up.
"""

from __future__ import annotations

import math

from serve_apps import admission

from . import heaps
from .ending import turn_away
from .jit import jit
from .replica import accept
from .state import NONE, State

_verdict = jit(admission.verdict)
_load = jit(admission.load)


@jit
def choose(state: State, service: int) -> int:
    """The variant for the next request, as `admission.route` has it; NONE when no slot is free."""
    best, least = NONE, math.inf
    for index in range(state.services[service].variants):
        variant = state.variants[service, index]
        if variant.running < variant.slots:
            load = _load(variant.running, variant.replicas, variant.rps)
            if best == NONE or load < least:
                best, least = index, load
    return best


@jit
def dispatch(state: State, service: int, index: int, slot: int, now_s: float) -> None:
    """Start the request on the least loaded replica of variant `index`, which has a free slot; ties by number."""
    variant = state.variants[service, index]
    items = state.load_items[service, index]
    replica = items[0]
    here = state.replicas[replica]
    here.in_flight += 1
    variant.running += 1
    state.services[service].running += 1
    state.load[replica] = here.in_flight / here.slots
    heaps.down(items, state.load, state.load_place, variant.replicas, 0)
    accept(state, replica, slot, now_s)


@jit
def arrive(state: State, service: int, slot: int, now_s: float) -> None:
    """A request or call arrives at the gateway: it starts, waits or is turned away."""
    entry, request = state.services[service], state.requests[slot]
    entry.arrived += 1
    entry.requests += 1
    entry.input_tokens += request.input
    request.arrived_s = now_s
    request.cold = 0
    index = choose(state, service) if entry.queued == 0 else NONE
    what = _verdict(
        index != NONE,
        not _any_replica(state, service),
        now_s >= now_s + entry.timeout_s,
        entry.queued >= entry.max_queued,
        entry.can_queue != 0,
    )
    if what == admission.ADMIT:
        dispatch(state, service, index, slot, now_s)
    elif what == admission.QUEUE:
        enqueue(state, service, slot)
    else:
        turn_away(state, service, slot, now_s)


@jit
def _any_replica(state: State, service: int) -> bool:
    for index in range(state.services[service].variants):
        if state.variants[service, index].replicas > 0:
            return True
    return False


@jit
def enqueue(state: State, service: int, slot: int) -> None:
    """Put the request into the queue: behind all who arrived at the gateway no later."""
    entry, request = state.services[service], state.requests[slot]
    if entry.coming > 0:
        request.cold = 1
    before, after = entry.queue_tail, NONE
    if before != NONE and state.requests[before].arrived_s > request.arrived_s:
        # Only what a removed replica gives back arrived earlier than others: its place is near the front.
        before, after = NONE, entry.queue_head
        while state.requests[after].arrived_s <= request.arrived_s:
            before, after = after, state.requests[after].next
    request.next = after
    if before == NONE:
        entry.queue_head = slot
    else:
        state.requests[before].next = slot
    if after == NONE:
        entry.queue_tail = slot
    entry.queued += 1


@jit
def _dequeue(state: State, service: int) -> int:
    entry = state.services[service]
    slot = entry.queue_head
    entry.queue_head = state.requests[slot].next
    if entry.queue_head == NONE:
        entry.queue_tail = NONE
    entry.queued -= 1
    return slot


@jit
def pump(state: State, service: int, now_s: float) -> None:
    """Hand free slots to those who wait, in order."""
    entry = state.services[service]
    while entry.queued > 0:
        index = choose(state, service)
        if index == NONE:
            return
        dispatch(state, service, index, _dequeue(state, service), now_s)


@jit
def expiry_s(state: State, service: int) -> float:
    """When the time of the first in the queue is up; inf with an empty queue."""
    entry = state.services[service]
    if entry.queued == 0:
        return math.inf
    return state.requests[entry.queue_head].arrived_s + entry.timeout_s


@jit
def expire(state: State, service: int, now_s: float) -> None:
    """Turn away all in the queue whose time is up."""
    while expiry_s(state, service) <= now_s:
        turn_away(state, service, _dequeue(state, service), now_s)
