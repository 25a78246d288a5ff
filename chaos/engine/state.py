"""The engine's memory: records for requests, replicas, variants and services, the heaps, and how they grow.

May not simulate. A request lives in a slot of a pool and its slot is used again when it has ended, so memory follows
the requests in flight, never the requests simulated. Lists are chains of slots through `next` and `prev`; NONE ends
them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_apps.timing import Timing

from .pointers import record_at, vector_at

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
        ("busy_s", "f8"),  # with a step under way
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
        ("slack_s", "f8"),
        ("next_at_s", "f8"),  # when the plan expects more capacity; nan = it does not say
        ("overflow_rpm", "f8"),
        ("overflow_usd_per_token", "f8"),
        ("overflow_usd", "f8"),
        ("max_queued", "i8"),
        ("can_queue", "i8"),
        ("can_shed", "i8"),
        ("overflow_first", "i8"),
        ("minute", "i8"),  # of the overflow quota
        ("minute_used", "i8"),
        ("coming", "i8"),
        ("task_base", "i8"),
        ("variants", "i4"),
        ("replicas", "i4"),  # in the event heap
        ("thinking", "i4"),  # calls to come, in the heap of their times
        ("queue_head", "i4"),
        ("queue_tail", "i4"),
        ("late_tail", "i4"),  # the last of those known to be late, who are the front of the queue
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


# Every array, by name: its element and its axes. s services, v variants a service, r replicas, b sequences a replica,
# p requests in flight, t tasks, h bins of a histogram.
_F8, _I4, _I8 = np.dtype("f8"), np.dtype("i4"), np.dtype("i8")
ARRAYS: dict[str, tuple[np.dtype[Any], str]] = {
    "requests": (REQUEST, "p"),
    "free": (_I4, "p"),  # unused slots, a stack
    "replicas": (REPLICA, "r"),
    "variants": (VARIANT, "sv"),
    "services": (SERVICE, "s"),
    "finishes": (_I8, "rb"),  # packed heaps of finish_v and slot
    "event_s": (_F8, "r"),  # a replica's next event
    "event_items": (_I4, "sr"),  # indexed heaps of replicas by it
    "event_place": (_I4, "r"),
    "load": (_F8, "r"),  # requests in flight per slot
    "load_items": (_I4, "svr"),  # indexed heaps of ready replicas by it
    "load_place": (_I4, "r"),
    "call_s": (_F8, "p"),  # when a call that is to come arrives
    "call_items": (_I4, "sp"),  # indexed heaps of requests by it
    "call_place": (_I4, "p"),
    "task_calls": (_I4, "t"),
    "task_think_s": (_F8, "t"),
    "task_grow": (_I4, "t"),
    "ttft_bins": (_I8, "sh"),
    "tpot_bins": (_I8, "sh"),
}
# What compiled functions are given, named `state`: the arrays' addresses, the lengths of axes, and a stack's height.
ROOT = np.dtype([*((name, "i8") for name in ARRAYS), ("s", "i8"), ("v", "i8"), ("r", "i8"), ("b", "i8"), ("p", "i8"),
                 ("t", "i8"), ("h", "i8"), ("free_count", "i8")])  # fmt: skip

request_at = record_at(ROOT, "requests", REQUEST)
replica_at = record_at(ROOT, "replicas", REPLICA)
service_at = record_at(ROOT, "services", SERVICE)
variant_at = record_at(ROOT, "variants", VARIANT)
finishes_at = vector_at(ROOT, "finishes", _I8)
ttft_bins_at, tpot_bins_at = vector_at(ROOT, "ttft_bins", _I8), vector_at(ROOT, "tpot_bins", _I8)
free_at = vector_at(ROOT, "free", _I4)
event_items_at, load_items_at = vector_at(ROOT, "event_items", _I4), vector_at(ROOT, "load_items", _I4)
call_items_at = vector_at(ROOT, "call_items", _I4)
event_s_at, load_at, call_s_at = (vector_at(ROOT, name, _F8) for name in ("event_s", "load", "call_s"))
event_place_at, load_place_at, call_place_at = (
    vector_at(ROOT, name, _I4) for name in ("event_place", "load_place", "call_place")
)
task_calls_at, task_grow_at = vector_at(ROOT, "task_calls", _I4), vector_at(ROOT, "task_grow", _I4)
task_think_s_at = vector_at(ROOT, "task_think_s", _F8)
SLOT_BITS = 24  # of a packed finish: at most 2**24 requests in flight


class Memory:
    """The arrays by name, and the root record that points at them. Arrays only ever grow."""

    def __init__(self, services: int, bins: int) -> None:
        self.root = np.zeros(1, ROOT)
        self._lengths = dict.fromkeys("svrbpth", 0) | {"s": services, "h": bins}
        self.arrays = {name: np.zeros(self._shape(axes), dtype) for name, (dtype, axes) in ARRAYS.items()}
        self._bind()

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    def need(self, **lengths: int) -> None:
        """Make room for at least so many variants (`v`), replicas (`r`), sequences (`b`) or tasks (`t`)."""
        longer = {axis: length for axis, length in lengths.items() if length > self._lengths[axis]}
        if longer:
            self._grow({axis: max(length, self._lengths[axis] * 2) for axis, length in longer.items()})

    def need_free(self, count: int) -> None:
        """Make room for at least `count` more requests. Raises MemoryError beyond 2**24 in flight."""
        have, free = self._lengths["p"], int(self.root["free_count"][0])
        if free >= count:
            return
        size = max(2 * have, have + count - free, 1024)
        if size >= 1 << SLOT_BITS:
            raise MemoryError(f"more than {1 << SLOT_BITS:,} requests in flight: bound the queues of the services")
        self._grow({"p": size})
        self["free"][free : free + size - have] = np.arange(size - 1, have - 1, -1, dtype=np.int32)
        self.root["free_count"] += size - have

    def _grow(self, lengths: dict[str, int]) -> None:
        self._lengths |= lengths
        for name, (dtype, axes) in ARRAYS.items():
            if set(axes) & set(lengths):
                old, new = self.arrays[name], np.zeros(self._shape(axes), dtype)
                new[tuple(slice(0, length) for length in old.shape)] = old
                self.arrays[name] = new
        self._bind()

    def _shape(self, axes: str) -> tuple[int, ...]:
        return tuple(self._lengths[axis] for axis in axes)

    def _bind(self) -> None:
        for name, array in self.arrays.items():
            self.root[name] = array.ctypes.data
        for axis, length in self._lengths.items():
            self.root[axis] = length
