"""SkyServe: a rate rule with delays, a spot placer, and on-demand replicas for whatever spot does not serve yet.

Written from the published behaviour (docs/peers.md). May not do I/O or read a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from .facts import EPSILON, Facts, Seen, Service, Shape, clip
from .packing import Answer, ByPrice, Fleet, Want, Way, refused_at_s
from .windows import Every, Window


class SkyServe:
    """ceil(QPS over 60 s ÷ target QPS); followed upwards after 15 turns of 20 s that say so, downwards after 60."""

    PERIOD_S, WINDOW_S, UP_TURNS, DOWN_TURNS = 20.0, 60.0, 15, 60

    def __init__(self, service: Service, knob: float) -> None:
        self._service = service
        self._target_qps = service.unit.capacity_rps * knob
        self._every, self._rates = Every(self.PERIOD_S), Window(self.WINDOW_S)
        self._current = service.floor
        self._up = self._down = 0

    def want(self, now_s: float, seen: Seen) -> int:
        """Units wanted; nothing is counted while the rate is unknown."""
        if seen.arrival_rps is None:
            return self._current
        self._rates.add(now_s, seen.arrival_rps)
        if self._every.due(now_s):
            wanted = clip(self._rates.mean / self._target_qps, self._service)
            self._up = self._up + 1 if wanted > self._current else 0
            self._down = self._down + 1 if wanted < self._current else 0
            bootstrap = self._current == 0 and wanted > 0
            if bootstrap or self._up >= self.UP_TURNS or self._down >= self.DOWN_TURNS:
                self._current, self._up, self._down = wanted, 0, 0
        return self._current


@dataclass(slots=True)
class Placer:
    """Where the next replica goes: of the places that were not preempted the least used, then the cheapest.

    A place that refuses or loses an instance counts as preempted; when fewer than two are left, all are forgiven.
    """

    preempted: set[str] = field(default_factory=set)

    def mark(self, place: str, places: list[str]) -> None:
        """`place` was preempted or refused."""
        self.preempted.add(place)
        if sum(other not in self.preempted for other in places) < 2:
            self.preempted.clear()

    def choose(self, ways: list[Way], used: dict[str, int]) -> Way:
        """The next of `ways` (cheapest first)."""
        active = [way for way in ways if way[1] not in self.preempted] or ways
        return min(active, key=lambda way: used.get(way[1], 0))


class SpotPlacement:
    """Reservations first, spot for the rest by the placer, on-demand for as many as are not ready yet."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._placers = {(service.key, rank): Placer() for service in facts.services for rank in (1, 2)}
        self._refused_at_s = dict.fromkeys(facts.offerings, -inf)
        self._held: dict[str, int] = {}
        self._order = ByPrice()
        self._split = {
            service.key: tuple(self._narrowed(service, ranks) for ranks in ({0, 1}, {1}, {2}))
            for service in facts.services
        }

    def place(self, now_s: float, fleet: Fleet, wants: list[Want]) -> Answer:
        """One pass over `wants`, in their order."""
        lost = self._failures(fleet)
        for want in wants:
            kept, spot, rest = self._split[want.service.key]
            steady = Want(want.service, kept, want.units)
            ways = self._order.ways(fleet, steady)
            missing = fleet.settle(steady, ways)
            for shape, place in ways:
                offering = fleet.offerings[place]
                if missing > EPSILON and offering.rank == 0 and fleet.sells(place, now_s):
                    missing = fleet.ask(shape, place, offering.size, missing)
            self._spread(now_s, fleet, Want(want.service, spot, missing), lost, 1)
            gap = Want(want.service, rest, max(0.0, want.units - self._ready(fleet, steady)))
            uncovered = fleet.settle(gap, self._order.ways(fleet, gap))
            self._spread(now_s, fleet, Want(want.service, rest, uncovered), lost, 2)
        answer = fleet.answer()
        self._held = {place: min(count, fleet.instances[place]) for place, count in answer["instances"].items()}
        return answer

    def _failures(self, fleet: Fleet) -> list[str]:
        """Offerings that refused, or that hold fewer instances than were left to them, since the last tick."""
        lost = []
        for place, before_s in self._refused_at_s.items():
            at_s = refused_at_s(fleet, place)
            if at_s > before_s or fleet.instances[place] < self._held.get(place, 0):
                lost.append(place)
            self._refused_at_s[place] = at_s
        return lost

    def _narrowed(self, service: Service, ranks: set[int]) -> tuple[Shape, ...]:
        """The service's variants, limited to offerings of these ranks."""

        def places(shape: Shape) -> tuple[str, ...]:
            return tuple(place for place in shape.places if self._facts.offerings[place].rank in ranks)

        return tuple(replace(shape, places=places(shape)) for shape in service.shapes)

    def _spread(self, now_s: float, fleet: Fleet, more: Want, lost: list[str], rank: int) -> None:
        """That many more units, each replica where the placer says."""
        placer = self._placers[more.service.key, rank]
        ways = [way for way in self._order.ways(fleet, more) if fleet.sells(way[1], now_s)]
        places = sorted({place for _, place in ways})
        for place in lost:
            if place in places:
                placer.mark(place, places)
        used = dict.fromkeys(places, 0)
        for shape, place in ways:
            used[place] += fleet.replicas.get((shape.service, shape.variant, place), 0)
        missing = more.units
        while ways and missing > EPSILON:
            shape, place = placer.choose(ways, used)
            if not fleet.allows(shape):
                break
            fleet.ask(shape, place, inf, min(missing, shape.units))
            used[place] += 1
            missing -= shape.units

    @staticmethod
    def _ready(fleet: Fleet, want: Want) -> float:
        keys = [(shape, (shape.service, shape.variant, place)) for shape in want.shapes for place in shape.places]
        return sum(shape.units * min(fleet.ready.get(key, 0), fleet.replicas.get(key, 0)) for shape, key in keys)
