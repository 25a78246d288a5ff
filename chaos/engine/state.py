"""The engine's memory: records for requests, replicas, variants and services, the heaps, and how they grow.

May not simulate. A request lives in a slot of a pool and its slot is used again when it has ended, so memory follows
the requests in flight, never the requests simulated. Lists are chains of slots through `next` and `prev`; NONE ends
them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serve_apps.timing import Timing

NONE = -1
ABSENT, READY, DRAINING = 0, 1, 2  # replica.state
# replica.kind, what its next event is: none; it may start; it ends a step with prefill; it ends decode-only steps
IDLE, START, MIXED, STRETCH = 0, 1, 2, 3

_TIMING = [(field.name, "i8" if "int" in str(field.type) else "f8") for field in fields(Timing)]

REQUEST = np.dtype(
    [
        ("arrived_s", "f8"),  # at the gateway
        ("admitted_s", "f8"),  # into the engine's batch, first time; negative before
        ("first_s", "f8"),  # first token; negative before
        ("finish_v", "i8"),  # while decoding: the replica's step count when the last token is there
        ("input", "i4"),
        ("output", "i4"),  # wanted
        ("target", "i4"),  # what the replica's context leaves of it
        ("done", "i4"),  # output tokens; while decoding as of the last prefill's end
        ("to_prefill", "i4"),
        ("prefix", "i4"),
        ("task", "i4"),
        ("calls_left", "i4"),
        ("replica", "i4"),
        ("next", "i4"),
        ("prev", "i4"),
        ("cold", "i4"),  # waited in the gateway while replicas were on their way
    ],
    align=True,
)

REPLICA = np.dtype(
    [
        *_TIMING,
        ("slowdown", "f8"),
        ("begin_s", "f8"),  # of the step or stretch under way
        ("step_s", "f8"),  # its first step
        ("slope_s", "f8"),  # and how much longer each further one is
        ("steps", "i8"),  # steps until the next event
        ("v", "i8"),  # steps made so far
        ("kv", "i8"),  # tokens held by all running
        ("kv_decoding", "i8"),  # and by those decoding
        ("tokens", "i8"),  # decoded so far
        ("token_s", "f8"),  # Σ step duration × sequences decoding in it
        ("seq_s", "f8"),  # ∫ sequences running
        ("kv_s", "f8"),  # ∫ KV tokens
        ("prefill_s", "f8"),  # Σ over prefills that ended
        ("prefill_tokens", "i8"),
        ("prefills", "i8"),
        ("service", "i4"),
        ("variant", "i4"),
        ("state", "i4"),
        ("kind", "i4"),
        ("slots", "i4"),
        ("in_flight", "i4"),
        ("running", "i4"),
        ("decoding", "i4"),
        ("waiting", "i4"),
        ("run_head", "i4"),  # running, first in rank first; those still in prefill are its tail, from `prefilling` on
        ("run_tail", "i4"),
        ("prefilling", "i4"),
        ("wait_head", "i4"),
        ("wait_tail", "i4"),
    ],
    align=True,
)

VARIANT = np.dtype(
    [("rps", "f8"), ("replicas", "i4"), ("slots", "i4"), ("running", "i4")],  # of ready replicas
    align=True,
)

SERVICE = np.dtype(
    [
        ("ttft_s", "f8"),
        ("tpot_s", "f8"),
        ("e2e_s", "f8"),
        ("timeout_s", "f8"),
        ("overflow_rpm", "f8"),
        ("overflow_usd_per_token", "f8"),
        ("overflow_usd", "f8"),
        ("max_queued", "i8"),
        ("can_queue", "i8"),
        ("minute", "i8"),  # of the overflow quota
        ("minute_used", "i8"),
        ("coming", "i8"),
        ("task_base", "i8"),
        ("variants", "i4"),
        ("replicas", "i4"),  # in the event heap
        ("thinking", "i4"),  # calls to come, in the heap of their times
        ("queue_head", "i4"),
        ("queue_tail", "i4"),
        ("queued", "i4"),
        ("running", "i8"),
        ("arrived", "i8"),
        ("requests", "i8"),
        ("finished", "i8"),
        ("met", "i8"),
        ("shed", "i8"),
        ("overflowed", "i8"),
        ("failed", "i8"),
        ("cold_misses", "i8"),
        ("preemptions", "i8"),
        ("missed_ttft", "i8"),
        ("missed_tpot", "i8"),
        ("missed_e2e", "i8"),
        ("input_tokens", "i8"),
        ("output_tokens", "i8"),
    ],
    align=True,
)


class State(NamedTuple):
    """All arrays. S services, V variants a service, R replicas, B sequences a replica, P requests in flight."""

    requests: NDArray[Any]  # [P] REQUEST
    free: NDArray[Any]  # [P] unused slots, a stack
    free_count: NDArray[Any]  # [1]
    replicas: NDArray[Any]  # [R] REPLICA
    variants: NDArray[Any]  # [S, V] VARIANT
    services: NDArray[Any]  # [S] SERVICE
    finishes: NDArray[Any]  # [R, B] packed heaps of finish_v and slot
    event_s: NDArray[Any]  # [R] a replica's next event
    event_items: NDArray[Any]  # [S, R] indexed heaps of replicas by it
    event_place: NDArray[Any]  # [R]
    load: NDArray[Any]  # [R] requests in flight per slot
    load_items: NDArray[Any]  # [S, V, R] indexed heaps of ready replicas by it
    load_place: NDArray[Any]  # [R]
    call_s: NDArray[Any]  # [P] when a call that is to come arrives
    call_items: NDArray[Any]  # [S, P] indexed heaps of requests by it
    call_place: NDArray[Any]  # [P]
    task_calls: NDArray[Any]
    task_think_s: NDArray[Any]
    task_grow: NDArray[Any]
    ttft_bins: NDArray[Any]  # [S, bins]
    tpot_bins: NDArray[Any]  # [S, bins]


SLOT_BITS = 24  # of a packed finish: at most 2**24 requests in flight
_REQUEST_AXES = {"requests": 0, "free": 0, "call_s": 0, "call_items": 1, "call_place": 0}
_REPLICA_AXES = {
    "replicas": 0, "finishes": 0, "event_s": 0, "event_items": 1, "event_place": 0, "load": 0, "load_items": 2,
    "load_place": 0,
}  # fmt: skip
_VARIANT_AXES = {"variants": 1, "load_items": 1}
_BATCH_AXES = {"finishes": 1}


def empty(services: int, bins: int) -> State:
    """A state without replicas, requests and tasks."""
    f8, i4, i8 = np.float64, np.int32, np.int64
    return State(
        requests=np.zeros(0, REQUEST), free=np.zeros(0, i4), free_count=np.zeros(1, i8),
        replicas=np.zeros(0, REPLICA), variants=np.zeros((services, 1), VARIANT), services=np.zeros(services, SERVICE),
        finishes=np.zeros((0, 1), i8),
        event_s=np.zeros(0, f8), event_items=np.zeros((services, 0), i4), event_place=np.zeros(0, i4),
        load=np.zeros(0, f8), load_items=np.zeros((services, 1, 0), i4), load_place=np.zeros(0, i4),
        call_s=np.zeros(0, f8), call_items=np.zeros((services, 0), i4), call_place=np.zeros(0, i4),
        task_calls=np.zeros(0, i4), task_think_s=np.zeros(0, f8), task_grow=np.zeros(0, i4),
        ttft_bins=np.zeros((services, bins), i8), tpot_bins=np.zeros((services, bins), i8),
    )  # fmt: skip


def with_requests(state: State, more: int) -> State:
    """`state` with at least `more` free slots in the pool."""
    have, free = len(state.requests), int(state.free_count[0])
    if free >= more:
        return state
    size = max(2 * have, have + more - free, 1024)
    if size >= 1 << SLOT_BITS:
        raise MemoryError(f"more than {1 << SLOT_BITS:,} requests in flight: bound the queues of the services")
    grown = _grown(state, _REQUEST_AXES, size)
    grown.free[free : free + size - have] = np.arange(size - 1, have - 1, -1, dtype=np.int32)
    grown.free_count[0] += size - have
    return grown


def with_replicas(state: State, count: int) -> State:
    """`state` with room for at least `count` replicas."""
    have = len(state.replicas)
    return state if have >= count else _grown(state, _REPLICA_AXES, max(2 * have, count, 16))


def with_variants(state: State, count: int) -> State:
    """`state` with room for at least `count` variants a service."""
    return state if state.variants.shape[1] >= count else _grown(state, _VARIANT_AXES, count)


def with_batch(state: State, sequences: int) -> State:
    """`state` with room for at least `sequences` sequences on a replica."""
    return state if state.finishes.shape[1] >= sequences else _grown(state, _BATCH_AXES, sequences)


def _grown(state: State, axes: dict[str, int], size: int) -> State:
    return state._replace(**{name: _longer(getattr(state, name), axis, size) for name, axis in axes.items()})


def _longer(array: NDArray[Any], axis: int, size: int) -> NDArray[Any]:
    shape = list(array.shape)
    shape[axis] = size
    longer = np.zeros(shape, array.dtype)
    longer[tuple(slice(0, length) for length in array.shape)] = array
    return longer
