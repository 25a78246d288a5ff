"""How a request ends, compiled: it is counted once, its slot on the replica is given back, its next call is planned.

May not choose who is served. A call that is lost takes the calls that would have followed it with it: they count as
offered and lost the same way, so that what was offered does not depend on who was served.
"""

from __future__ import annotations

from typing import Any

from . import heaps, histogram
from .jit import jit
from .state import (
    READY,
    call_items_at,
    call_place_at,
    call_s_at,
    free_at,
    load_at,
    load_items_at,
    load_place_at,
    replica_at,
    request_at,
    service_at,
    task_grow_at,
    task_think_s_at,
    tpot_bins_at,
    ttft_bins_at,
    variant_at,
)


@jit
def give_back(state: Any, replica: int) -> None:
    """One request fewer on `replica`."""
    here = replica_at(state, replica)
    here.in_flight -= 1
    service_at(state, here.service).running -= 1
    if here.state == READY:
        variant = variant_at(state, here.service * state.v + here.variant)
        variant.running -= 1
        items = load_items_at(state, (here.service * state.v + here.variant) * state.r)
        value = here.in_flight / here.slots
        heaps.rekey(items, load_at(state, 0), load_place_at(state, 0), variant.replicas, replica, value)


@jit
def release(state: Any, slot: int) -> None:
    """Return `slot` to the pool."""
    free_at(state, 0)[state.free_count] = slot
    state.free_count += 1


@jit
def finish(state: Any, service: int, slot: int, now_s: float) -> None:
    """The request has its last token."""
    request = request_at(state, slot)
    entry = service_at(state, service)
    give_back(state, request.replica)
    ttft_s, e2e_s = request.first_s - request.arrived_s, now_s - request.arrived_s
    met = True
    histogram.count(ttft_bins_at(state, service * state.h), ttft_s)
    if ttft_s > entry.ttft_s:
        entry.missed_ttft += 1
        met = False
    if request.target >= 2:
        tpot_s = (now_s - request.first_s) / (request.target - 1)
        histogram.count(tpot_bins_at(state, service * state.h), tpot_s)
        if tpot_s > entry.tpot_s:
            entry.missed_tpot += 1
            met = False
    if e2e_s > entry.e2e_s:
        entry.missed_e2e += 1
        met = False
    entry.finished += 1
    _score(entry, request, met)
    request.done = request.target
    next_call(state, service, slot, now_s)


@jit
def _score(entry: Any, request: Any, met: bool) -> None:
    if met:
        entry.met += 1
    elif request.cold:
        entry.cold_misses += 1


@jit
def next_call(state: Any, service: int, slot: int, now_s: float) -> None:
    """Plan the task's next call in the same slot, or free the slot."""
    request = request_at(state, slot)
    if request.calls_left == 0:
        release(state, slot)
        return
    entry = service_at(state, service)
    request.calls_left -= 1
    request.input += request.done + task_grow_at(state, 0)[request.task]
    at_s = now_s + task_think_s_at(state, 0)[request.task]
    items = call_items_at(state, service * state.p)
    heaps.insert(items, call_s_at(state, 0), call_place_at(state, 0), entry.thinking, slot, at_s)
    entry.thinking += 1


@jit
def lose(state: Any, service: int, slot: int, failed: bool) -> None:
    """The request was shed, or failed; so do the calls that would have followed it."""
    request = request_at(state, slot)
    entry = service_at(state, service)
    calls = 1 + request.calls_left
    entry.requests += request.calls_left
    if failed:
        entry.failed += calls
    else:
        entry.shed += calls
    if request.cold:
        entry.cold_misses += 1
    release(state, slot)


@jit
def overflow(state: Any, service: int, slot: int, now_s: float) -> bool:
    """Send the request to the overflow endpoint, if its quota of this minute lasts; whether it did."""
    entry = service_at(state, service)
    minute = int(now_s // 60.0)
    if minute != entry.minute:
        entry.minute = minute
        entry.minute_used = 0
    if entry.minute_used + 1 > entry.overflow_rpm:
        return False
    request = request_at(state, slot)
    entry.minute_used += 1
    entry.overflowed += 1
    entry.output_tokens += request.output
    entry.overflow_usd += (request.input + request.output) * entry.overflow_usd_per_token
    waited_s = now_s - request.arrived_s
    _score(entry, request, waited_s <= entry.ttft_s and waited_s <= entry.e2e_s)
    request.done = request.output
    next_call(state, service, slot, now_s)
    return True


@jit
def turn_away(state: Any, service: int, slot: int, now_s: float) -> None:
    """No place for the request: to the overflow endpoint, else shed."""
    if not overflow(state, service, slot, now_s):
        lose(state, service, slot, False)
