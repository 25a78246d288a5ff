"""Small worlds in which everything can be tried: requests on the reference engine, instances from a few pools."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from chaos.bounds.problem import Load, Problem, Way
from chaos.bounds.supply import AFTER_S, Place
from chaos.bounds.work import Limits, Requests, least_work, requests_of
from serve_apps.batching import Batch, Sequence
from serve_apps.timing import Timing


@dataclass(frozen=True)
class Served:
    """A replica's run: when each request got its first and its last token, and its steps as (start, end)."""

    first_s: dict[int, float]
    last_s: dict[int, float]
    steps: list[tuple[float, float]]

    @property
    def busy_s(self) -> float:
        """Seconds in which the replica did something."""
        return sum(end - start for start, end in self.steps)


def requests_at(rows: list[tuple[float, int, int]], limits: Limits) -> Requests:
    """Requests of (arrival, input, output)."""
    at_s, inputs, outputs = (np.array(each, float) for each in zip(*rows, strict=True))
    return requests_of(at_s, inputs, outputs, 0 * inputs, np.zeros(len(rows), bool), limits)


def serve(timing: Timing, rows: list[tuple[float, int, int]], sent_s: list[float], order: list[int]) -> Served:
    """Requests `order` of `rows` on one replica, each handed to the engine at its `sent_s`."""
    batch, now_s = Batch(timing), 0.0
    waiting = sorted(order, key=lambda index: (sent_s[index], index))
    made: dict[int, Sequence] = {}
    steps: list[tuple[float, float]] = []
    while waiting or batch.running or batch.waiting:
        while waiting and sent_s[waiting[0]] <= now_s:
            index = waiting.pop(0)
            made[index] = Sequence(
                request_id=str(index), input_tokens=rows[index][1], max_tokens=rows[index][2], arrived_at_s=now_s
            )
            batch.add(made[index])
        length_s = batch.start_step(now_s)
        if length_s is None:
            now_s = sent_s[waiting[0]]
            continue
        steps.append((now_s, now_s + length_s))
        now_s += length_s
        batch.end_step(now_s)
    first = {index: one.first_token_at_s for index, one in made.items() if one.first_token_at_s is not None}
    last = {index: one.finished_at_s for index, one in made.items() if one.finished_at_s is not None}
    return Served(first, last, steps)


def met(rows: list[tuple[float, int, int]], served: Served, limits: Limits) -> list[int]:
    """Which requests kept their limits."""
    kept = []
    for index, last_s in served.last_s.items():
        at_s, _, outputs = rows[index]
        first_s = served.first_s[index]
        tpot_s = (last_s - first_s) / (outputs - 1) if outputs > 1 else 0.0
        if first_s - at_s <= limits.ttft_s and tpot_s <= limits.tpot_s and last_s - at_s <= limits.whole_s:
            kept.append(index)
    return kept


@dataclass(frozen=True)
class Pool:
    """`count` instances at a price, each serving `lead_s` after its launch."""

    count: int
    usd_per_s: float
    lead_s: float


@dataclass(frozen=True)
class Small:
    """One service, one shape, a few requests and pools over `duration_s`; instances start at multiples of `grid_s`."""

    timing: Timing
    limits: Limits
    rows: list[tuple[float, int, int]]
    pools: list[Pool]
    duration_s: float
    grid_s: float

    def problem(self, periods: int) -> Problem:
        """As the bound sees it."""
        edges_s = np.append(np.linspace(0.0, self.duration_s, periods + 1), self.duration_s + AFTER_S)
        requests = requests_at(self.rows, self.limits)
        period = [np.searchsorted(edges_s, at, side="right") - 1 for at in (requests.at_s, requests.latest_s)]
        first, last = (np.clip(each, 0, periods) for each in period)
        way = Way(
            variant="v",
            gpus=1,
            places=tuple(range(len(self.pools))),
            work_s=least_work(self.timing, self.limits, requests, first == last),
        )
        load = Load(
            service="u/s",
            first=first,
            last=last,
            ways=(way,),
            overflow_usd=np.full(len(requests), np.inf),
            overflow_rpm=0.0,
        )
        places = tuple(_place(index, pool, edges_s) for index, pool in enumerate(self.pools))
        return Problem(edges_s=edges_s, loads=(load,), places=places, quotas={}, sunk_usd=0.0)

    def cheapest(self) -> dict[int, float]:
        """By number of requests met: the least cost of all ways to launch, end, and hand out requests on the grid."""
        count = len(self.rows)
        options: dict[int, list[dict[int, float]]] = {}
        for index, pool in enumerate(self.pools):
            options[index] = [self._one(pool)] * pool.count
        best = {0: 0.0}
        for instance in (each for group in options.values() for each in group):
            combined = dict(best)
            for (mask, usd), (more, extra) in product(best.items(), instance.items()):
                if mask & more == 0 and usd + extra < combined.get(mask | more, np.inf):
                    combined[mask | more] = usd + extra
            best = combined
        return {
            wanted: min((usd for mask, usd in best.items() if mask.bit_count() >= wanted), default=np.inf)
            for wanted in range(1, count + 1)
        }

    def _one(self, pool: Pool) -> dict[int, float]:
        """What one instance can meet (a set of requests as bits), and at what cost."""
        found: dict[int, float] = {}
        every = range(len(self.rows))
        subsets = [list(some) for size in range(1, len(self.rows) + 1) for some in combinations(every, size)]
        ends = int(self.duration_s / self.grid_s)
        for begin, order in product(range(ends), subsets):
            ready_s = begin * self.grid_s + pool.lead_s
            sent_s = [max(at_s, ready_s) for at_s, _, _ in self.rows]
            served = serve(self.timing, self.rows, sent_s, order)
            kept = met(self.rows, served, self.limits)
            if not kept or ready_s > self.duration_s:
                continue
            end_s = min(self.duration_s, max(served.last_s.values()))
            mask, usd = sum(1 << index for index in kept), (end_s - begin * self.grid_s) * pool.usd_per_s
            found[mask] = min(usd, found.get(mask, np.inf))
        return found


def _place(index: int, pool: Pool, edges_s: np.ndarray) -> Place:
    usd = pool.usd_per_s * np.diff(edges_s)
    usd[-1] = 0.0
    usable_s = np.clip(edges_s[1:] - np.maximum(edges_s[:-1], pool.lead_s), 0.0, None)
    return Place(
        offering=f"o{index}",
        instance_type="t",
        market="on_demand",
        gpus=1,
        quota="",
        most=pool.count * usable_s / np.diff(edges_s),
        usd=usd,
        start_usd=np.full(len(usd), pool.usd_per_s * pool.lead_s),
    )
