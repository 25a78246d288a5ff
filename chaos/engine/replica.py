"""One replica's continuous batching, compiled: `serve_apps.batching.Batch`, with decode-only steps in one jump.

May not know of the gateway. All requests of a service have one priority, so rank is order of arrival at the replica:
waiting requests stand behind all running ones, a preempted one goes to the front, those in prefill are the last of
the running.
"""

from __future__ import annotations

import math
from typing import Any

from serve_apps.batching import STEP_TOKENS

from . import heaps
from .ending import finish, give_back, lose
from .jit import jit
from .law import begin_stretch, decode_step_s, steps_until, stretch_s
from .state import (
    IDLE,
    MIXED,
    NONE,
    SLOT_BITS,
    START,
    STRETCH,
    event_items_at,
    event_place_at,
    event_s_at,
    finishes_at,
    replica_at,
    request_at,
    service_at,
)

SLOT_MASK = (1 << SLOT_BITS) - 1


@jit
def schedule(state: Any, replica: int, at_s: float) -> None:
    """The replica's next event is at `at_s` (inf: none)."""
    service = replica_at(state, replica).service
    count = service_at(state, service).replicas
    items = event_items_at(state, service * state.r)
    heaps.rekey(items, event_s_at(state, 0), event_place_at(state, 0), count, replica, at_s)


@jit
def accept(state: Any, replica: int, slot: int, now_s: float) -> None:
    """A request arrives at the replica; one that can never fit fails. It is considered when the next step begins."""
    here, request = replica_at(state, replica), request_at(state, slot)
    request.replica = replica
    longest = min(here.max_model_len, here.kv_capacity_tokens)
    if request.input + 1 > longest:
        give_back(state, replica)
        lose(state, here.service, slot, True)
        return
    request.target = max(1, min(request.output, longest - request.input))
    request.done = 0
    request.admitted_s = request.first_s = -1.0
    _wait_last(state, here, slot)
    if here.kind == IDLE:
        here.kind = START
        schedule(state, replica, now_s)
    elif here.kind == STRETCH and here.waiting == 1 and here.running < here.max_num_seqs:
        steps = steps_until(here, now_s - here.begin_s)
        if steps < here.steps:
            here.steps = steps
            schedule(state, replica, here.begin_s + stretch_s(here, steps))


@jit
def _wait_last(state: Any, here: Any, slot: int) -> None:
    request_at(state, slot).next = NONE
    if here.wait_tail == NONE:
        here.wait_head = slot
    else:
        request_at(state, here.wait_tail).next = slot
    here.wait_tail = slot
    here.waiting += 1


@jit
def start_step(state: Any, replica: int, now_s: float) -> None:
    """Decide who takes part from now on, and until when nothing changes."""
    here = replica_at(state, replica)
    preempted = _make_room(state, replica)
    if not preempted:
        _admit(state, here, now_s)
    if here.prefilling != NONE:
        here.kind = MIXED
        here.begin_s = now_s
        schedule(state, replica, now_s + _mixed_s(state, here))
    elif here.decoding > 0:
        here.kind = STRETCH
        begin_stretch(here, now_s)
        here.steps = 1 if preempted else _steps_alike(here, finishes_at(state, replica * state.b)[0])
        schedule(state, replica, now_s + stretch_s(here, here.steps))
    else:
        here.kind = IDLE
        schedule(state, replica, math.inf)


@jit
def _steps_alike(here: Any, first_finish: int) -> int:
    """Steps until the first request ends or the KV cache cannot take another step's tokens."""
    steps = (first_finish >> SLOT_BITS) - here.v
    if here.running > 1:
        room = here.kv_capacity_tokens - here.running - here.kv
        steps = min(steps, room // here.decoding + 1)
    return steps


@jit
def _make_room(state: Any, replica: int) -> bool:
    """Preempt the last in rank until all who run can grow by a token; whether any was."""
    here = replica_at(state, replica)
    preempted = False
    while here.kv + here.running > here.kv_capacity_tokens and here.running > 1:
        slot = here.run_tail
        request = request_at(state, slot)
        if here.prefilling == NONE:
            heaps.erase(finishes_at(state, replica * state.b), here.decoding, (request.finish_v << SLOT_BITS) | slot)
            request.done = request.target - (request.finish_v - here.v)
            here.decoding -= 1
            here.kv_decoding -= request.input + request.done
        elif here.prefilling == slot:
            here.prefilling = NONE
        here.kv -= request.input + request.done
        here.running -= 1
        unlink(state, here, slot)
        _wait_first(state, here, slot)
        service_at(state, here.service).preemptions += 1
        preempted = True
    return preempted


@jit
def _wait_first(state: Any, here: Any, slot: int) -> None:
    request_at(state, slot).next = here.wait_head
    here.wait_head = slot
    if here.wait_tail == NONE:
        here.wait_tail = slot
    here.waiting += 1


@jit
def unlink(state: Any, here: Any, slot: int) -> None:
    """Take `slot` out of the chain of running requests."""
    request = request_at(state, slot)
    if request.prev == NONE:
        here.run_head = request.next
    else:
        request_at(state, request.prev).next = request.next
    if request.next == NONE:
        here.run_tail = request.prev
    else:
        request_at(state, request.next).prev = request.prev


@jit
def _admit(state: Any, here: Any, now_s: float) -> None:
    held = here.kv + here.running
    while here.waiting > 0 and here.running < here.max_num_seqs:
        slot = here.wait_head
        request = request_at(state, slot)
        kv = request.input + request.done
        if held + kv + 1 > here.kv_capacity_tokens:
            return
        held += kv + 1
        here.wait_head = request.next
        if request.next == NONE:
            here.wait_tail = NONE
        here.waiting -= 1
        request.to_prefill = unfilled(request)
        if request.admitted_s < 0.0:
            request.admitted_s = now_s
        _run_last(state, here, slot)
        here.kv += kv


@jit
def _run_last(state: Any, here: Any, slot: int) -> None:
    request = request_at(state, slot)
    request.prev = here.run_tail
    request.next = NONE
    if here.run_tail == NONE:
        here.run_head = slot
    else:
        request_at(state, here.run_tail).next = slot
    here.run_tail = slot
    here.running += 1
    if here.prefilling == NONE:
        here.prefilling = slot


@jit
def unfilled(request: Any) -> int:
    """Tokens to prefill when the request enters the batch: all but the cached prefix, at least one."""
    return max(1, request.input + request.done - request.prefix)


@jit
def _mixed_s(state: Any, here: Any) -> float:
    """Seconds of a step with prefill: each prompt in rank gets what is left of the budget."""
    budget = STEP_TOKENS - here.decoding
    tokens = begun = 0
    slot = here.prefilling
    while slot != NONE and budget > 0:
        request = request_at(state, slot)
        chunk = min(request.to_prefill, budget)
        begun += request.to_prefill == unfilled(request)
        tokens += chunk
        budget -= chunk
        slot = request.next
    seconds = begun * here.prefill_fixed_s + tokens / here.prefill_tps
    if here.decoding > 0:
        seconds += decode_step_s(here, here.decoding, here.kv_decoding)
    return here.slowdown * seconds


@jit
def end_step(state: Any, replica: int, now_s: float) -> None:
    """The steps under way are done: tokens are given, requests that have all of theirs end."""
    here = replica_at(state, replica)
    if here.kind == START:
        return
    mixed = here.kind == MIXED
    steps = 1 if mixed else here.steps
    decoding = here.decoding
    account(here, steps, now_s - here.begin_s)
    here.v += steps
    here.kv += decoding * steps
    here.kv_decoding += decoding * steps
    here.tokens += decoding * steps
    service_at(state, here.service).output_tokens += decoding * steps
    heap = finishes_at(state, replica * state.b)
    while here.decoding > 0 and heap[0] >> SLOT_BITS <= here.v:
        slot = heap[0] & SLOT_MASK
        heaps.pop(heap, here.decoding)
        here.decoding -= 1
        request = request_at(state, slot)
        here.kv_decoding -= request.input + request.target
        _leave(state, here, slot, now_s)
    if mixed:
        _end_chunks(state, replica, STEP_TOKENS - decoding, now_s)
    here.kind = START  # what the gateway sends in this instant takes part in the next step


@jit
def account(here: Any, steps: int, span_s: float) -> None:
    """Add `steps` steps that took `span_s` to the replica's integrals."""
    here.token_s += here.decoding * span_s
    here.busy_s += span_s
    here.kv_s += (here.kv + 0.5 * here.decoding * steps) * span_s


@jit
def _leave(state: Any, here: Any, slot: int, now_s: float) -> None:
    request = request_at(state, slot)
    here.kv -= request.input + request.target
    here.running -= 1
    unlink(state, here, slot)
    finish(state, here.service, slot, now_s)


@jit
def _end_chunks(state: Any, replica: int, budget: int, now_s: float) -> None:
    """The prompts' chunks are done; a prompt that is complete gives the request a token and lets it decode."""
    here = replica_at(state, replica)
    while here.prefilling != NONE and budget > 0:
        slot = here.prefilling
        request = request_at(state, slot)
        chunk = min(request.to_prefill, budget)
        budget -= chunk
        request.to_prefill -= chunk
        if request.to_prefill > 0:
            return
        here.prefilling = request.next
        _first_token(state, replica, slot, now_s)


@jit
def _first_token(state: Any, replica: int, slot: int, now_s: float) -> None:
    here, request = replica_at(state, replica), request_at(state, slot)
    request.done += 1
    here.kv += 1
    service_at(state, here.service).output_tokens += 1
    if request.first_s < 0.0:
        request.first_s = now_s
        here.prefill_s += now_s - request.admitted_s
        here.prefill_tokens += max(1, request.input - request.prefix)
        here.prefills += 1
    if request.done >= request.target:
        _leave(state, here, slot, now_s)
        return
    request.finish_v = here.v + request.target - request.done
    heaps.push(finishes_at(state, replica * state.b), here.decoding, (request.finish_v << SLOT_BITS) | slot)
    here.decoding += 1
    here.kv_decoding += request.input + request.done
