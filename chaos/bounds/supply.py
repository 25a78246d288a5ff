"""What capacity there is and what it costs at the least, period by period: the supply side of the bound LB1.

Knows the whole scenario, faults included; may not do I/O beyond its supply traces, read a clock or draw a number of its
own. Every figure errs to the cheap side: a pool holds what it held at most during its notice time, prices are the least
of the span in which they may be paid, a start takes the least that its distributions declare, times a fault that
shortens it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chaos.faults import KINDS
from chaos.pools import available
from chaos.scenario import Scenario, Supply

Floats = npt.NDArray[np.float64]

AFTER_S = 900.0  # what is in flight at the end may end in this time, and costs nothing
SUNK = frozenset({"odcr", "block"})  # paid for whether used or not
BLOCK_ENDS_EARLY_S = 1800.0
HOUR_S = 3600.0


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Place:
    """One offering over the periods; arrays of shape (periods,), the last period being AFTER_S after the end.

    `most`: instances that can be in use on average. `usd`: one instance through the whole period. `start_usd`: what one
    costs at least from its launch to its first use, if that is in this period. `quota` names its account, if any.
    """

    offering: str
    instance_type: str
    market: str
    gpus: int
    quota: str
    most: Floats
    usd: Floats
    start_usd: Floats


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """A function of time, ``value[i]`` from ``at_s[i]`` on; `at_s` rises from 0."""

    at_s: Floats
    value: Floats

    def __call__(self, at_s: Floats) -> Floats:
        """Values at some instants."""
        values: Floats = self.value[np.maximum(np.searchsorted(self.at_s, at_s, side="right") - 1, 0)]
        return values

    def times(self, other: Step) -> Step:
        """The product."""
        at_s = np.union1d(self.at_s, other.at_s)
        return Step(at_s, self(at_s) * other(at_s))

    def held(self, notice_s: float) -> Step:
        """The largest value of the last `notice_s` seconds."""
        if notice_s <= 0.0:
            return self
        at_s = np.union1d(self.at_s, self.at_s + notice_s)
        return Step(at_s, self._extreme(at_s - notice_s, at_s, np.max))

    def least(self, first_s: Floats, last_s: Floats) -> Floats:
        """The least value in each span."""
        return self._extreme(first_s, last_s, np.min)

    def integral(self, edges_s: Floats) -> Floats:
        """Over each of the periods between `edges_s`, in units of value × second."""
        knots = np.append(self.at_s, max(float(edges_s[-1]), float(self.at_s[-1])) + 1.0)
        sums = np.concatenate([[0.0], np.cumsum(np.diff(knots) * self.value)])
        return np.diff(np.interp(edges_s, knots, sums))

    def _extreme(self, first_s: Floats, last_s: Floats, which: Callable[[Floats], float]) -> Floats:
        low = np.maximum(np.searchsorted(self.at_s, first_s, side="right") - 1, 0)
        high = np.maximum(np.searchsorted(self.at_s, last_s, side="right"), low + 1)
        return np.array([which(self.value[a:b]) for a, b in zip(low, high, strict=True)], np.float64)


def places(scenario: Scenario, seed: int, edges_s: Floats) -> tuple[Place, ...]:
    """Every offering that a replica may run on. `edges_s`: shape (periods + 1,), the last period is AFTER_S long."""
    rows = [row for row in scenario.supply if row.market != "overflow"]
    return tuple(_place(scenario, seed, row, edges_s) for row in rows)


def sunk_usd(scenario: Scenario, seed: int) -> float:
    """What reservations and Capacity Blocks cost over the scenario, used or not."""
    total = 0.0
    span_s = np.array([0.0, scenario.duration_s])
    for row in scenario.supply:
        if row.market in SUNK:
            declared = _pool(scenario, seed, row).times(_price(scenario, row))
            total += float(declared.integral(span_s)[0]) / HOUR_S
    return total


def quotas(scenario: Scenario) -> dict[str, float]:
    """GPUs by account (`Place.quota`), at their widest."""
    widest = _widest(scenario, "quota")
    return {f"{quota.family}/{quota.market}": quota.gpus * widest for quota in scenario.quotas}


def _place(scenario: Scenario, seed: int, row: Supply, edges_s: Floats) -> Place:
    kind = scenario.catalogue_set.instance_types[row.instance_type]
    start_s = _start_s(scenario, row)
    factor = _factor(scenario, "capacity", _names(row))
    held = _pool(scenario, seed, row).times(factor)
    count = Step(held.at_s, np.floor(held.value + 1e-9)).held(row.notice_s)
    gone_s = math.inf if row.market != "block" or row.end_s is None else row.end_s - BLOCK_ENDS_EARLY_S
    usable = count.times(_window(row.start_s + start_s, gone_s))
    lengths_s = np.diff(edges_s)
    price = _price(scenario, row)
    usd = price.least(edges_s[:-1], edges_s[1:]) * lengths_s / HOUR_S
    usd[-1] = 0.0
    first_use_usd = price.least(edges_s[:-1] - start_s, edges_s[1:]) * start_s / HOUR_S
    free = row.market in SUNK
    account = f"{kind.family}/{row.market}"
    return Place(
        offering=row.id,
        instance_type=row.instance_type,
        market=row.market,
        gpus=kind.gpus,
        quota=account if account in quotas(scenario) else "",
        most=usable.integral(edges_s) / lengths_s,
        usd=np.zeros_like(usd) if free else usd,
        start_usd=np.zeros_like(usd) if free else first_use_usd,
    )


def _start_s(scenario: Scenario, row: Supply) -> float:
    """The least time from a launch to a ready replica of any service there."""
    boot_s = scenario.boot_s(row.id).min_s * min(1.0, _narrowest(scenario, "boot_slow"))
    loads_s = [
        scenario.load_s(row.id, shape.service, shape.variant).min_s
        for shape in scenario.shapes
        if shape.instance_type == row.instance_type
    ]
    return boot_s + min(loads_s, default=0.0) * min(1.0, _narrowest(scenario, "load_slow"))


def _pool(scenario: Scenario, seed: int, row: Supply) -> Step:
    size = available(scenario, row.id, seed)
    return Step(np.asarray(size.at_s, np.float64), np.asarray(size.count, np.float64))


def _price(scenario: Scenario, row: Supply) -> Step:
    base = _factor(scenario, "price", _names(row))
    return Step(base.at_s, base.value * scenario.price(row.id))


def _window(from_s: float, until_s: float) -> Step:
    at_s, value = [0.0], [1.0 if from_s <= 0.0 else 0.0]
    if from_s > 0.0:
        at_s, value = [0.0, from_s], [0.0, 1.0]
    if until_s <= at_s[-1]:
        return Step(np.zeros(1), np.zeros(1))
    if math.isfinite(until_s):
        at_s, value = [*at_s, until_s], [*value, 0.0]
    return Step(np.array(at_s), np.array(value))


def _factor(scenario: Scenario, kind: str, names: Collection[str]) -> Step:
    """The product of a kind's faults over time, as `chaos.world` applies it."""
    found = [
        (fault.at_s, fault.at_s + fault.for_s, KINDS[kind].default if fault.value is None else fault.value)
        for fault in scenario.faults
        if fault.kind == kind and (fault.target == "*" or fault.target in names)
    ]
    at_s = np.unique(np.array([0.0, *(edge for first, last, _ in found for edge in (first, last))]))
    value = np.ones_like(at_s)
    for first, last, factor in found:
        value[(at_s >= first) & (at_s < last)] *= factor
    return Step(at_s, value)


def _names(row: Supply) -> frozenset[str]:
    words = (row.id, row.zone, row.region, row.instance_type, row.market, row.pool, row.reservation)
    return frozenset(word for word in words if word)


def _values(scenario: Scenario, kind: str) -> list[float]:
    return [
        KINDS[kind].default if fault.value is None else fault.value for fault in scenario.faults if fault.kind == kind
    ]


def _narrowest(scenario: Scenario, kind: str) -> float:
    """The product of all of a kind's factors below 1: they may overlap."""
    return math.prod([min(1.0, value) for value in _values(scenario, kind)])


def _widest(scenario: Scenario, kind: str) -> float:
    return math.prod([max(1.0, value) for value in _values(scenario, kind)])
