"""SageMaker: target tracking on concurrent requests, and up to five instance types by priority as pools of capacity.

Written from the published behaviour (docs/peers.md). May not do I/O or read a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from .facts import EPSILON, Facts, Seen, Service, Shape, clip
from .packing import Answer, Fleet, Want, refused_at_s
from .replicas import per_unit
from .windows import Every


class TargetTracking:
    """One datum a minute: three above the target scale out in proportion, fifteen below 90 % of it scale in."""

    PERIOD_S, OUT_DATA, IN_DATA, IN_BELOW, COOLDOWN_S = 60.0, 3, 15, 0.9, 300.0

    def __init__(self, service: Service, knob: float) -> None:
        self._service = service
        self._target = per_unit(service, knob)
        self._every = Every(self.PERIOD_S)
        self._minute: list[float] = []
        self._above = self._below = 0
        self._current = max(1, service.floor)
        self._changed_at_s = -inf

    def want(self, now_s: float, seen: Seen) -> int:
        """Units wanted. Without data no alarm changes its state; an endpoint keeps at least one instance."""
        if seen.ongoing is not None and seen.ready > 0:
            self._minute.append(seen.ongoing / seen.ready)
        if self._every.due(now_s) and self._minute:
            datum = sum(self._minute) / len(self._minute)
            self._minute = []
            self._above = self._above + 1 if datum > self._target * (1 + EPSILON) else 0
            self._below = self._below + 1 if datum < self.IN_BELOW * self._target else 0
            self._act(now_s, datum)
        return self._current

    def _act(self, now_s: float, datum: float) -> None:
        alarm = self._above >= self.OUT_DATA or self._below >= self.IN_DATA
        if alarm and now_s - self._changed_at_s >= self.COOLDOWN_S:
            wanted = max(1, clip(ceil(self._current * datum / self._target - EPSILON), self._service))
            if wanted != self._current:
                self._current, self._changed_at_s = wanted, now_s


@dataclass(slots=True)
class _Turn:
    """Which pool of a service is asked, and since when something has been missing."""

    pool: int = 0
    short_at_s: float = inf


class SageMakerPools:
    """The first five variants in the policy's order, on reservations and on demand: one pool each, no spot.

    What a pool has not provided within 300 s is asked of the next one, after the last of the first again; within a
    pool the zone that refused longest ago comes first. Capacity of the lowest priority is given up first.
    """

    TIMEOUT_S, MOST_POOLS = 300.0, 5

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._turns = {service.key: _Turn() for service in facts.services}
        self._pools = {
            service.key: tuple(self._narrowed(shape) for shape in service.shapes[: self.MOST_POOLS])
            for service in facts.services
        }

    def place(self, now_s: float, fleet: Fleet, wants: list[Want]) -> Answer:
        """One pass over `wants`, in their order."""
        for want in wants:
            pools = self._pools[want.service.key]
            turn = self._turns[want.service.key]
            own = Want(want.service, pools, want.units)
            self._time(now_s, turn, own.units - fleet.units(own), len(pools))
            missing = fleet.settle(own, [(pool, place) for pool in pools for place in pool.places])
            pool = pools[turn.pool]
            for place in sorted(
                pool.places, key=lambda place: (fleet.offerings[place].rank, refused_at_s(fleet, place))
            ):
                if missing > EPSILON and fleet.sells(place, now_s):
                    missing = fleet.ask(pool, place, fleet.offerings[place].size, missing)
            fleet.pend(want.service.key, missing)
        return fleet.answer()

    def _narrowed(self, shape: Shape) -> Shape:
        """`shape` without its spot places, reservations first."""
        offerings = self._facts.offerings
        places = [place for place in shape.places if offerings[place].rank != 1]
        return replace(shape, places=tuple(sorted(places, key=lambda place: (offerings[place].rank, place))))

    def _time(self, now_s: float, turn: _Turn, missing: float, pools: int) -> None:
        """Turn to the next pool when something has been missing for the time-out; back to the first when nothing is."""
        if missing <= EPSILON:
            turn.pool, turn.short_at_s = 0, inf
        elif turn.short_at_s == inf:
            turn.short_at_s = now_s
        elif now_s - turn.short_at_s >= self.TIMEOUT_S:
            turn.pool, turn.short_at_s = (turn.pool + 1) % pools, now_s
