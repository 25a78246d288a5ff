"""What goes into the engine and what comes out: requests, services, windows, totals.

Data only; may not import Numba. Instants and durations are seconds of scenario time (float64), tokens are counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

F8 = NDArray[np.float64]
I4 = NDArray[np.int32]
I8 = NDArray[np.int64]

SINGLE = -1  # RequestBatch.task of a request that is no part of a task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """Kinds of agent tasks, one row each, all arrays of shape (m,).

    A task is `calls` >= 1 dependent calls: each starts `think_s` after the one before has ended, with its input, its
    output and `grow_tokens` as input, and with the output and prefix tokens of the first call.
    """

    calls: I4
    think_s: F8
    grow_tokens: I4

    @classmethod
    def none(cls) -> TaskTable:
        """No tasks: every request stands alone."""
        return cls(calls=np.empty(0, np.int32), think_s=np.empty(0), grow_tokens=np.empty(0, np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatch:
    """Requests in order of arrival, all arrays of shape (n,).

    `prefix_tokens` of the input are in the prefix cache of every replica, so that they hold KV but need no prefill.
    `task` is a row of the stream's TaskTable, or SINGLE.
    """

    at_s: F8
    input_tokens: I4
    output_tokens: I4
    prefix_tokens: I4
    task: I4

    def part(self, low: int, high: int) -> RequestBatch:
        """Rows `low` (included) to `high` (excluded), without a copy."""
        rows = slice(low, high)
        return RequestBatch(
            at_s=self.at_s[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            prefix_tokens=self.prefix_tokens[rows],
            task=self.task[rows],
        )


class Arrivals(Protocol):
    """A stream of requests. `tasks` stays the same for the whole run."""

    @property
    def tasks(self) -> TaskTable:
        """The tasks that the stream's requests refer to."""
        ...

    def take(self, until_s: float) -> RequestBatch:
        """The requests from the last `until_s` (included) to this one (excluded), in order of time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One service. Limits are inf where there is none; `max_queued` and `queue_timeout_s` bound the gateway's queue.

    `can_queue` False: a request never waits for a busy replica, only for the first one; `can_shed` False: it waits
    whatever is expected. `overflow_rpm` requests in each minute that would be shed or too late (`overflow_first`: that
    would have to wait) go to an endpoint that answers at once, at `overflow_usd_per_1m_tokens`; 0 = none.
    All requests of a service have its `priority`.
    """

    service: str
    priority: int
    arrivals: Arrivals
    ttft_s: float
    tpot_s: float
    e2e_s: float
    deadline_s: float
    queue_timeout_s: float
    max_queued: int
    can_queue: bool = True
    can_shed: bool = True
    overflow_rpm: float = 0.0
    overflow_first: bool = False
    overflow_usd_per_1m_tokens: float = 0.0


class Window(NamedTuple):
    """One service since the last window. `queued` and `running` are now, in the gateway's queue and on replicas.

    `input_tokens` are those of the requests that arrived, `output_tokens` those that were generated, and `finished`
    the requests that were answered, by an overflow endpoint as well. `tasks` of those that arrived began a task; the
    others are its later calls. `met` were answered within every limit, `failed` lost with their replica.
    """

    arrived: int
    input_tokens: int
    output_tokens: int
    queued: int
    running: int
    finished: int
    shed: int
    tasks: int
    met: int
    failed: int


class ReplicaWindow(NamedTuple):
    """One replica since its last window.

    Now: `running` and `waiting` sequences and `kv_fraction` of the KV cache. Means over the window, nan where nothing
    happened: `tpot_s` per token of decoding sequences, `prefill_s` from the engine's admission to the first token and
    `input_tokens` that no prefix cache held over the `samples` requests whose prefill ended; `mean_batch` sequences
    decoding over the `steps` the engine made, `mean_kv_tokens` over the time at work (idle time dilutes neither).
    """

    running: int
    waiting: int
    kv_fraction: float
    tpot_s: float
    prefill_s: float
    input_tokens: float
    mean_batch: float
    mean_kv_tokens: float
    samples: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """One service since the start. requests = finished + shed + failed + overflowed + in_flight.

    `met`: within every limit, overflowed ones included (they are taken to answer at once, so what counts is how long
    they had waited). `cold_start_misses`: misses whose request waited or was turned away while replicas were on their
    way. `missed_*`: finished requests beyond that limit (a request may miss several). Quantiles are of finished
    requests, within 1 %, nan without any; keys "p50", "p95", "p99".
    """

    requests: int
    finished: int
    met: int
    shed: int
    overflowed: int
    failed: int
    in_flight: int
    cold_start_misses: int
    preemptions: int
    missed_ttft: int
    missed_tpot: int
    missed_e2e: int
    input_tokens: int
    output_tokens: int
    overflow_usd: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
