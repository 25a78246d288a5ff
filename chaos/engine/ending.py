"""How a request ends, compiled: it is counted once, its slot on the replica is given back, its next call is planned.

May not choose who is served. A call that is lost takes the calls that would have followed it with it: they count as
offered and lost the same way, so that what was offered does not depend on who was served.
"""

from __future__ import annotations

from typing import Any

from . import heaps, histogram
from .jit import jit
from .state import READY, State


@jit
def give_back(state: State, replica: int) -> None:
    """One request fewer on `replica`."""
    here = state.replicas[replica]
    here.in_flight -= 1
    state.services[here.service].running -= 1
    if here.state == READY:
        variant = state.variants[here.service, here.variant]
        variant.running -= 1
        items = state.load_items[here.service, here.variant]
        value = here.in_flight / here.slots
        heaps.rekey(items, state.load, state.load_place, variant.replicas, replica, value)


@jit
def release(state: State, slot: int) -> None:
    """Return `slot` to the pool."""
    state.free[state.free_count[0]] = slot
    state.free_count[0] += 1


@jit
def finish(state: State, service: int, slot: int, now_s: float) -> None:
    """The request has its last token."""
    request = state.requests[slot]
    entry = state.services[service]
    give_back(state, request.replica)
    ttft_s, e2e_s = request.first_s - request.arrived_s, now_s - request.arrived_s
    met = True
    histogram.count(state.ttft_bins[service], ttft_s)
    if ttft_s > entry.ttft_s:
        entry.missed_ttft += 1
        met = False
    if request.target >= 2:
        tpot_s = (now_s - request.first_s) / (request.target - 1)
        histogram.count(state.tpot_bins[service], tpot_s)
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
def next_call(state: State, service: int, slot: int, now_s: float) -> None:
    """Plan the task's next call in the same slot, or free the slot."""
    request = state.requests[slot]
    if request.calls_left == 0:
        release(state, slot)
        return
    entry = state.services[service]
    request.calls_left -= 1
    request.input += request.done + state.task_grow[request.task]
    at_s = now_s + state.task_think_s[request.task]
    heaps.insert(state.call_items[service], state.call_s, state.call_place, entry.thinking, slot, at_s)
    entry.thinking += 1


@jit
def lose(state: State, service: int, slot: int, failed: bool) -> None:
    """The request was shed, or failed; so do the calls that would have followed it."""
    request = state.requests[slot]
    entry = state.services[service]
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
def turn_away(state: State, service: int, slot: int, now_s: float) -> None:
    """No place for the request: to the overflow endpoint while its quota of this minute lasts, else shed."""
    entry = state.services[service]
    minute = int(now_s // 60.0)
    if minute != entry.minute:
        entry.minute = minute
        entry.minute_used = 0
    if entry.minute_used + 1 > entry.overflow_rpm:
        lose(state, service, slot, False)
        return
    request = state.requests[slot]
    entry.minute_used += 1
    entry.overflowed += 1
    entry.output_tokens += request.output
    entry.overflow_usd += (request.input + request.output) * entry.overflow_usd_per_token
    waited_s = now_s - request.arrived_s
    _score(entry, request, waited_s <= entry.ttft_s and waited_s <= entry.e2e_s)
    request.done = request.output
    next_call(state, service, slot, now_s)
