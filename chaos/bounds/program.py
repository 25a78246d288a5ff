"""Prices for the bound LB1, from a linear program over periods. Heuristic: `lower` proves whatever prices come out.

May not read a clock, do I/O or draw a random number. Requests of one service, period and size are taken together at
their mean work; `lower` then weighs every request by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .problem import Load, Problem
from .work import Floats, Ints

SIZES = (0.0, 0.5, 0.8, 0.95, 0.99, 1.0)  # quantiles of work that part a service's requests into sizes
LOST = 20.0  # a request that cannot be met costs as much as so many of the dearest instances through a period


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Prices:
    """Multipliers, all >= 0, by period (last axis).

    `gpu_s`: USD per GPU second at each place. `start`: USD per start there. `quota`: USD per GPU of each account.
    `overflow`: USD per request beyond the endpoint's own price, by service.
    """

    gpu_s: Floats
    start: Floats
    quota: dict[str, Floats]
    overflow: dict[str, Floats]


class _Columns:
    """A linear program in the making: columns with costs and upper bounds, rows ``sum <= limit``."""

    def __init__(self) -> None:
        self.costs: list[Floats] = []
        self.upper: list[Floats] = []
        self.entries: list[tuple[Ints, Ints, Floats]] = []
        self.limits: list[Floats] = []
        self.width = self.height = 0

    def columns(self, count: int, cost: Floats | float = 0.0, upper: Floats | float = np.inf) -> Ints:
        """New variables >= 0; their numbers."""
        self.costs.append(np.broadcast_to(np.asarray(cost, np.float64), count))
        self.upper.append(np.broadcast_to(np.asarray(upper, np.float64), count))
        self.width += count
        return np.arange(self.width - count, self.width)

    def rows(self, limits: Floats) -> Ints:
        """New rows; their numbers."""
        self.limits.append(limits)
        self.height += len(limits)
        return np.arange(self.height - len(limits), self.height)

    def put(self, rows: Ints, columns: Ints, values: Floats | float) -> None:
        """Coefficients, one each."""
        self.entries.append((rows, columns, np.broadcast_to(np.asarray(values, np.float64), len(rows))))

    def solve(self) -> Floats:
        """Multipliers of the rows, >= 0. Raises RuntimeError when HiGHS finds none."""
        from scipy.optimize import linprog
        from scipy.sparse import coo_array

        rows, columns, values = (np.concatenate([entry[part] for entry in self.entries]) for part in range(3))
        matrix = coo_array((values, (rows, columns)), shape=(self.height, self.width)).tocsr()
        upper = np.concatenate(self.upper)
        found = linprog(
            np.concatenate(self.costs),
            A_ub=matrix,
            b_ub=np.concatenate(self.limits),
            bounds=np.stack([np.zeros_like(upper), upper], axis=1),
            method="highs",
        )
        if found.status != 0:
            raise RuntimeError(f"HiGHS: {found.message}")
        return np.maximum(-np.asarray(found.ineqlin.marginals, np.float64), 0.0)


def prices(problem: Problem, met: Mapping[str, float]) -> Prices:
    """Good multipliers for meeting at least `met` requests of each service."""
    lp, periods, count = _Columns(), problem.periods, len(problem.places)
    lengths_s = np.diff(problem.edges_s)
    gpu_rows = np.array([lp.rows(np.zeros(periods)) for _ in problem.places]).reshape(count, periods)
    start_rows = np.array([lp.rows(np.zeros(periods)) for _ in problem.places]).reshape(count, periods)
    quota_rows = {account: lp.rows(np.full(periods, limit)) for account, limit in problem.quotas.items()}
    for index, place in enumerate(problem.places):
        used = lp.columns(periods, place.usd, place.most)
        started = lp.columns(periods, place.start_usd)
        lp.put(gpu_rows[index], used, -place.gpus * lengths_s)
        lp.put(start_rows[index], used, 1.0)
        lp.put(start_rows[index][1:], used[:-1], -1.0)
        lp.put(start_rows[index], started, -1.0)
        if place.quota:
            lp.put(quota_rows[place.quota], used, float(place.gpus))
    dearest = max((float(place.usd.max()) for place in problem.places), default=1.0) or 1.0
    ends = [_service(lp, load, met[load.service], gpu_rows, lengths_s, dearest) for load in problem.loads]
    found = lp.solve()
    return Prices(
        gpu_s=found[gpu_rows],
        start=found[start_rows],
        quota={account: found[rows] for account, rows in quota_rows.items()},
        overflow={load.service: found[rows] for load, rows in zip(problem.loads, ends, strict=True)},
    )


def _service(lp: _Columns, load: Load, met: float, gpu_rows: Ints, lengths_s: Floats, dearest: float) -> Ints:
    """One service's columns and rows; those that bound its overflow."""
    periods = len(lengths_s)
    keys = (_sizes(load) * periods + load.last) * periods + load.first
    groups, where = np.unique(keys, return_inverse=True)
    counts = np.bincount(where, minlength=len(groups)).astype(np.float64)
    first, last = groups % periods, groups // periods % periods
    wanted = lp.rows(np.array([-met]))
    group_rows = lp.rows(counts)
    overflow_rows = lp.rows(load.overflow_rpm * (lengths_s / 60.0 + 1.0))
    lost = lp.columns(1, dearest * LOST)
    lp.put(wanted, lost, -1.0)
    for way in load.ways:
        able = np.isfinite(way.work_s)
        fit = np.bincount(where, weights=able, minlength=len(groups)) > counts / 2
        chosen = np.flatnonzero(fit)
        if not len(chosen) or not way.places:
            continue
        total_s = np.bincount(where, weights=np.where(able, way.work_s, 0.0), minlength=len(groups))
        mean_s = total_s / np.maximum(np.bincount(where, weights=able, minlength=len(groups)), 1.0)
        taken = lp.columns(len(chosen))
        lp.put(np.broadcast_to(wanted, len(chosen)), taken, -1.0)
        lp.put(group_rows[chosen], taken, 1.0)
        work_rows = lp.rows(np.zeros(periods))
        lp.put(work_rows[first[chosen]], taken, np.maximum(mean_s[chosen], 0.0))
        for index in way.places:
            running = lp.columns(periods)  # replica seconds
            lp.put(work_rows, running, -1.0)
            lp.put(gpu_rows[index], running, float(way.gpus))
        _carry(lp, work_rows, taken, (first[chosen], last[chosen]), mean_s[chosen])
    if load.overflow_rpm:
        usd = np.bincount(where, weights=load.overflow_usd, minlength=len(groups)) / counts
        sent = lp.columns(len(groups), usd)
        lp.put(np.broadcast_to(wanted, len(groups)), sent, -1.0)
        lp.put(group_rows, sent, 1.0)
        lp.put(overflow_rows[first], sent, 1.0)
    return overflow_rows


def _carry(lp: _Columns, work_rows: Ints, taken: Ints, span: tuple[Ints, Ints], mean_s: Floats) -> None:
    """Work may wait: what is left over of a period goes to the next, but no more than of requests that live in both."""
    first, last = span
    periods = len(work_rows)
    left = lp.columns(periods - 1)
    rows = lp.rows(np.zeros(periods - 1))
    lp.put(work_rows[:-1], left, -1.0)
    lp.put(work_rows[1:], left, 1.0)
    lp.put(rows, left, 1.0)
    lengths = last - first
    column = np.repeat(np.arange(len(first)), lengths)
    step = np.arange(len(column)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    lp.put(rows[first[column] + step], taken[column], -np.maximum(mean_s[column], 0.0))


def _sizes(load: Load) -> Ints:
    """The size of each request: which part of the service's requests it belongs to by its work."""
    works = [np.where(np.isfinite(way.work_s), way.work_s, np.nan) * way.gpus for way in load.ways]
    if not works or not len(load):
        return np.zeros(len(load), np.int64)
    least = np.fmin.reduce(works)
    known = least[np.isfinite(least)]
    inner: Sequence[float] = np.quantile(known, SIZES[1:-1]) if len(known) else ()
    found: Ints = np.searchsorted(np.asarray(inner, np.float64), np.nan_to_num(least, nan=np.inf)).astype(np.int64)
    return found
