"""The events of one service in order of time, and what is done to its replicas between them, compiled.

May not touch another service: services share no replica, so each is simulated on its own. At one instant arrivals come
first, then calls of tasks, then the replicas' events, then those whose time in the queue is up.
"""

from __future__ import annotations

import math
from typing import Any

from . import heaps
from .ending import lose
from .gateway import arrive, enqueue, expire, expiry_s, pump
from .jit import jit
from .law import steps_until, stretch_s
from .replica import end_step, start_step
from .spec import F8, I4
from .state import (
    ABSENT,
    DRAINING,
    IDLE,
    NONE,
    READY,
    STRETCH,
    call_items_at,
    call_place_at,
    call_s_at,
    event_items_at,
    event_place_at,
    event_s_at,
    free_at,
    load_at,
    load_items_at,
    load_place_at,
    replica_at,
    request_at,
    service_at,
    task_calls_at,
    variant_at,
)


@jit
def advance(
    root: Any, service: int, until_s: float, at_s: F8, inputs: I4, outputs: I4, prefixes: I4, tasks: I4
) -> None:
    """Run all events of `service` up to `until_s`, with these arrivals. The pool has a free slot for each of them."""
    state = root[0]
    entry = service_at(state, service)
    events, calls = event_items_at(state, service * state.r), call_items_at(state, service * state.p)
    count, coming = 0, at_s.size
    while True:
        arrival_s = at_s[count] if count < coming else math.inf
        call_s = call_s_at(state, 0)[calls[0]] if entry.thinking > 0 else math.inf
        event_s = event_s_at(state, 0)[events[0]] if entry.replicas > 0 else math.inf
        over_s = expiry_s(state, service)
        if arrival_s <= call_s and arrival_s <= event_s and arrival_s <= over_s:
            if arrival_s > until_s:
                return
            slot = _new(state, service, inputs[count], outputs[count], prefixes[count], tasks[count])
            count += 1
            arrive(state, service, slot, arrival_s)
        elif call_s <= event_s and call_s <= over_s:
            if call_s > until_s:
                return
            slot = calls[0]
            heaps.discard(calls, call_s_at(state, 0), call_place_at(state, 0), entry.thinking, slot)
            entry.thinking -= 1
            arrive(state, service, slot, call_s)
        elif event_s <= over_s:
            if event_s > until_s:
                return
            replica = events[0]
            end_step(state, replica, event_s)
            pump(state, service, event_s)
            start_step(state, replica, event_s)
        else:
            if over_s > until_s:
                return
            expire(state, service, over_s)


@jit
def _new(state: Any, service: int, tokens: int, output: int, prefix: int, task: int) -> int:
    state.free_count -= 1
    slot = free_at(state, 0)[state.free_count]
    request = request_at(state, slot)
    request.input = tokens
    request.output = output
    request.prefix = prefix
    if task < 0:
        request.task = NONE
        request.calls_left = 0
    else:
        request.task = task + service_at(state, service).task_base
        request.calls_left = task_calls_at(state, 0)[request.task] - 1
    return slot


@jit
def add(root: Any, replica: int, now_s: float) -> None:
    """Take a replica, whose record is filled in, into service."""
    state = root[0]
    here = replica_at(state, replica)
    entry, variant = service_at(state, here.service), variant_at(state, here.service * state.v + here.variant)
    here.state = READY
    here.kind = IDLE
    here.run_head = here.run_tail = here.prefilling = here.wait_head = here.wait_tail = NONE
    items = event_items_at(state, here.service * state.r)
    heaps.insert(items, event_s_at(state, 0), event_place_at(state, 0), entry.replicas, replica, math.inf)
    entry.replicas += 1
    items = load_items_at(state, (here.service * state.v + here.variant) * state.r)
    heaps.insert(items, load_at(state, 0), load_place_at(state, 0), variant.replicas, replica, 0.0)
    variant.replicas += 1
    variant.slots += here.slots
    pump(state, here.service, now_s)


@jit
def settle(root: Any, service: int, now_s: float) -> None:
    """After limits changed: start who may start, turn away whose time is up."""
    state = root[0]
    pump(state, service, now_s)
    expire(state, service, now_s)


@jit
def drain(root: Any, replica: int) -> None:
    """Send the replica nothing more; no-op when it is draining."""
    state = root[0]
    here = replica_at(state, replica)
    if here.state != READY:
        return
    variant = variant_at(state, here.service * state.v + here.variant)
    items = load_items_at(state, (here.service * state.v + here.variant) * state.r)
    heaps.discard(items, load_at(state, 0), load_place_at(state, 0), variant.replicas, replica)
    variant.replicas -= 1
    variant.slots -= here.slots
    variant.running -= here.in_flight
    here.state = DRAINING


@jit
def remove(root: Any, replica: int, now_s: float) -> None:
    """Take the replica away: requests without a token wait at the gateway again, those with tokens fail."""
    state = root[0]
    drain(root, replica)
    here = replica_at(state, replica)
    service = here.service
    entry = service_at(state, service)
    items = event_items_at(state, service * state.r)
    heaps.discard(items, event_s_at(state, 0), event_place_at(state, 0), entry.replicas, replica)
    entry.replicas -= 1
    entry.running -= here.in_flight
    here.state = ABSENT
    for head in (here.run_head, here.wait_head):
        slot = head
        while slot != NONE:
            following = request_at(state, slot).next
            if request_at(state, slot).first_s < 0.0:
                enqueue(state, service, slot)
            else:
                lose(state, service, slot, True)
            slot = following
    settle(root, service, now_s)


@jit
def set_slots(root: Any, replica: int, slots: int) -> None:
    """Let the gateway send the replica `slots` requests at once."""
    state = root[0]
    here = replica_at(state, replica)
    before, here.slots = here.slots, slots
    if here.state == READY:
        index = here.service * state.v + here.variant
        variant = variant_at(state, index)
        variant.slots += slots - before
        items = load_items_at(state, index * state.r)
        heaps.rekey(
            items, load_at(state, 0), load_place_at(state, 0), variant.replicas, replica, here.in_flight / slots
        )


@jit
def mark_cold(root: Any, service: int, coming: int) -> None:
    """From now on `coming` replicas are on their way; who waits in the gateway now or later waits for them."""
    state = root[0]
    entry = service_at(state, service)
    if coming > 0 and entry.coming == 0:
        slot = entry.queue_head
        while entry.queued > 0 and slot != NONE:
            request_at(state, slot).cold = 1
            slot = request_at(state, slot).next
    entry.coming = coming


@jit
def _steps_done(here: Any, now_s: float) -> int:
    """Whole steps of the stretch under way that have ended by `now_s`."""
    span_s = now_s - here.begin_s
    if here.kind != STRETCH or span_s <= 0.0:
        return 0
    steps = steps_until(here, span_s)
    return steps - (stretch_s(here, steps) > span_s)


@jit
def observe(root: Any, now_s: float, rows: Any) -> None:
    """Write each replica's sums up to `now_s`, the steps under way included, to its row of `rows` [R, 11].

    Columns: sequences running, waiting, KV tokens (these three now); tokens decoded, Σ step duration × sequences
    decoding, seconds with a step under way, ∫ KV tokens; Σ prefill seconds, Σ their prompt tokens, prefills; steps.
    Changes nothing else.
    """
    state = root[0]
    for replica in range(len(rows)):
        here, row = replica_at(state, replica), rows[replica]
        if here.state == ABSENT:
            continue
        steps = _steps_done(here, now_s)
        kv = here.kv + here.decoding * steps
        span_s = now_s - here.begin_s if here.running > 0 else 0.0
        row[0], row[1], row[2] = here.running, here.waiting, kv
        row[3] = here.tokens + here.decoding * steps
        row[4] = here.token_s + (here.decoding * stretch_s(here, steps) if steps > 0 else 0.0)
        row[5] = here.busy_s + span_s
        row[6] = here.kv_s + 0.5 * (here.kv + kv) * span_s
        row[7], row[8], row[9] = here.prefill_s, here.prefill_tokens, here.prefills
        row[10] = here.v + steps


@jit
def unseen_tokens(root: Any, service: int, now_s: float) -> int:
    """Tokens that the replicas' stretches under way have given by `now_s` and that are not counted yet."""
    state = root[0]
    total = 0
    for index in range(service_at(state, service).replicas):
        here = replica_at(state, event_items_at(state, service * state.r)[index])
        total += here.decoding * _steps_done(here, now_s)
    return total
