"""Small worlds for the tests of the engine: arrivals from a list, services without limits, round figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from chaos.engine import SINGLE, Engine, RequestBatch, ServiceSpec, TaskTable
from serve_apps.timing import Timing

# A prompt of 1,000 tokens takes 1 s, a step 10 ms whatever the batch.
PLAIN = Timing(a_s=0.01, b_s_per_seq=0.0, c_s_per_ktoken=0.0, prefill_tps=1000.0, kv_capacity_tokens=50_000)


def rows(
    at_s: Sequence[float],
    inputs: Sequence[int],
    outputs: Sequence[int],
    prefix: int = 0,
    tasks: Sequence[int] | None = None,
) -> RequestBatch:
    """Requests, one a column entry; `tasks` None: none is part of one."""
    return RequestBatch(
        at_s=np.array(at_s, np.float64),
        input_tokens=np.array(inputs, np.int32),
        output_tokens=np.array(outputs, np.int32),
        prefix_tokens=np.full(len(at_s), prefix, np.int32),
        task=np.array([SINGLE] * len(at_s) if tasks is None else tasks, np.int32),
    )


def same(count: int, at_s: float = 0.0, inputs: int = 1000, outputs: int = 11) -> RequestBatch:
    """`count` equal requests at one instant."""
    return rows([at_s] * count, [inputs] * count, [outputs] * count)


class Listed:
    """Arrivals that are known in advance. Those at `until_s` itself are given too, which the engine allows."""

    def __init__(self, batch: RequestBatch, tasks: TaskTable | None = None) -> None:
        self.tasks = tasks or TaskTable.none()
        self._rows, self._given = batch, 0

    def take(self, until_s: float) -> RequestBatch:
        low, self._given = self._given, int(np.searchsorted(self._rows.at_s, until_s, side="right"))
        return self._rows.part(low, self._given)


def table(*tasks: tuple[int, float, int]) -> TaskTable:
    """Tasks as (calls, seconds of thought, tokens of growth)."""
    calls, think_s, grow = zip(*tasks, strict=True)
    return TaskTable(
        calls=np.array(calls, np.int32), think_s=np.array(think_s, np.float64), grow_tokens=np.array(grow, np.int32)
    )


def spec(batch: RequestBatch, tasks: TaskTable | None = None, **given: Any) -> ServiceSpec:
    """A service without limits and with a long queue, but for what is `given`."""
    free: dict[str, Any] = dict.fromkeys(("ttft_s", "tpot_s", "e2e_s", "deadline_s", "queue_timeout_s"), math.inf)
    free |= {"service": "unit/service", "priority": 5, "max_queued": 1000, "arrivals": Listed(batch, tasks)}
    return ServiceSpec(**(free | given))


def engine(batch: RequestBatch, tasks: TaskTable | None = None, **given: Any) -> Engine:
    """An engine with one such service and one variant that is counted on for 1 request/s a replica."""
    made = Engine([spec(batch, tasks, **given)])
    made.set_capacity_rps(0, 0, 1.0)
    return made
