"""A rule in the manner of SageServe: an hourly integer program over an ARIMA forecast, behind a reactive gate.

Written from the paper's description (docs/peers.md). May not do I/O or read a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from .arima import fitted, forecast
from .facts import EPSILON, Facts, Seen, Service, Shape
from .packing import Fleet, Want, usd_per_h
from .windows import Every, Window

BIN_S = 300.0
FIRST, LAST = 4, 12  # bins ahead: the next 20 to 60 minutes
FIT_BINS = 72  # six hours seen
PROGRAM_S = 3600.0
OUT_AT, IN_AT, MORE_AT = 0.7, 0.3, 1.0  # of the rate that ready replicas carry
MORE_EVERY_S = 60.0
DIFFERS = 0.1
TIE_USD, LACK_USD = 1e-4, 1e5


class Way(NamedTuple):
    """A column of the program: replicas of `shape` at `place`, whose instances cost `usd_per_h` a replica."""

    service: Service
    shape: Shape
    place: str
    usd_per_h: float


class _Load:
    """One service's rates in bins of five minutes, and the coefficients fitted once to the first six hours."""

    def __init__(self) -> None:
        self._bin = Every(BIN_S)
        self._samples: list[float] = []
        self.recent = Window(60.0)
        self.bins: list[float] = []

    def note(self, now_s: float, rate: float | None) -> None:
        """One tick's rate; a bin closes on its end."""
        if self._bin.due(now_s) and self._samples:
            self.bins.append(sum(self._samples) / len(self._samples))
            self._samples = []
        if rate is not None:
            self._samples.append(rate)
            self.recent.add(now_s, rate)

    def peak_rps(self) -> float:
        """The most to expect in the next 20 to 60 minutes. Before the fit: the most of the last five bins."""
        if len(self.bins) < FIT_BINS:
            return max([*self.bins[-5:], self.recent.mean])
        coefficients = fitted(tuple(self.bins[:FIT_BINS]))
        return max(0.0, *forecast(coefficients, self.bins, LAST)[FIRST - 1 :])


class SageServe:
    """Replicas by variant, planned hourly; in the first hour, which has no history, whenever a peak moved by a tenth.

    The knob multiplies the rate that the program lets a replica carry.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._program, self._more = Every(PROGRAM_S), Every(MORE_EVERY_S)
        self._loads = {service.key: _Load() for service in facts.services}
        keys = [(service, shape) for service in facts.services for shape in service.shapes]
        self._current = {
            (shape.service, shape.variant): service.floor * (shape is service.unit) for service, shape in keys
        }
        self._aim = dict(self._current)
        self._peaks = dict.fromkeys(self._loads, 0.0)

    def wants(self, now_s: float, seen: Mapping[str, Seen], fleet: Fleet) -> list[Want]:
        """One want for every variant."""
        for key, load in self._loads.items():
            load.note(now_s, seen[key].arrival_rps)
        hour, more = self._program.due(now_s), self._more.due(now_s)
        if hour or (more and now_s < PROGRAM_S):
            peaks = {key: load.peak_rps() for key, load in self._loads.items()}
            if hour or self._differ(peaks):
                self._solve(peaks, fleet)
        for service in self._facts.services:
            self._gate(service, seen[service.key], more)
        return [
            Want(service, (shape,), self._current[shape.service, shape.variant] * shape.units)
            for service in self._facts.services
            for shape in service.shapes
        ]

    def _gate(self, service: Service, seen: Seen, more: bool) -> None:
        """Out to the aim above 70 % of what is ready, in to it below 30 %, and beyond it one a minute above 100 %."""
        if seen.arrival_rps is None:
            return
        rate = self._loads[service.key].recent.mean
        carried_rps = seen.ready * service.unit.capacity_rps
        used = rate / carried_rps if carried_rps > EPSILON else inf if rate > 0 else 0.0
        now = {(shape.service, shape.variant): self._current[shape.service, shape.variant] for shape in service.shapes}
        aim = {key: self._aim[key] for key in now}
        if used > OUT_AT:
            now = {key: max(now[key], aim[key]) for key in now}
        elif used < IN_AT and _units(service, aim) < _units(service, now):
            now = aim
        if (
            more
            and used > MORE_AT
            and seen.ready >= _units(service, now) - EPSILON
            and sum(now.values()) < service.most
        ):
            now[service.key, service.unit.variant] += 1
        self._current.update(now)

    def _differ(self, peaks: Mapping[str, float]) -> bool:
        """Whether a peak is a tenth away from what the program last planned for."""
        return any(abs(peak - self._peaks[key]) > DIFFERS * self._peaks[key] for key, peak in peaks.items())

    def _solve(self, peaks: dict[str, float], fleet: Fleet) -> None:
        """The cheapest whole replicas that carry every service's peak, within reservations and the policy's bounds."""
        ways = [
            Way(service, shape, place, usd_per_h(fleet, shape, place))
            for service in self._facts.services
            for shape in service.shapes
            for place in shape.places
        ]
        self._peaks = peaks
        found = solve(ways, peaks, fleet, self._facts.knob)
        self._aim = dict.fromkeys(self._aim, 0)
        for way, count in zip(ways, found, strict=True):
            self._aim[way.shape.service, way.shape.variant] += count


def _units(service: Service, replicas: Mapping[tuple[str, str], int]) -> float:
    return sum(replicas[shape.service, shape.variant] * shape.units for shape in service.shapes)


def solve(ways: Sequence[Way], peak_rps: Mapping[str, float], fleet: Fleet, knob: float) -> list[int]:
    """Replicas of each way: least $/h with Σ capacity ≥ peak, floor ≤ Σ replicas ≤ most, reservations not exceeded.

    What cannot be carried costs more than anything else; of equal costs the fewest replicas, then the first ways.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # a third of a second to import

    services = list({way.service.key: way.service for way in ways}.values())
    count, rows, low, high = len(ways), [], [], []
    for index, service in enumerate(services):
        own = np.array([way.service.key == service.key for way in ways], float)
        carried = own * [way.shape.capacity_rps * knob for way in ways]
        lacking = np.eye(2 * len(services))[2 * index : 2 * index + 2]  # requests per second, and replicas to the floor
        rows += [np.append(carried, lacking[0]), np.append(own, lacking[1]), np.append(own, 0 * lacking[0])]
        low += [peak_rps[service.key], service.floor, 0.0]
        high += [np.inf, np.inf, service.most]
    for place in {way.place: None for way in ways}:
        size = fleet.offerings[place].size
        if size < np.inf:
            parts = [way.shape.gpus * way.shape.nodes * float(way.place == place) for way in ways]
            rows.append(np.append(parts, np.zeros(2 * len(services))))
            low.append(0.0)
            high.append(size * fleet.offerings[place].gpus)
    if not rows:
        return []
    usd = [way.usd_per_h + TIE_USD * (1 + index / count) for index, way in enumerate(ways)]
    found = milp(
        np.append(usd, np.full(2 * len(services), LACK_USD)),
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.append(np.ones(count), np.zeros(2 * len(services))),
        bounds=Bounds(0, np.inf),
        options={"mip_rel_gap": 0.01, "node_limit": 2000},  # never a time limit: the same answer on every machine
    )
    return [0] * count if found.x is None else [round(value) for value in found.x[:count]]
