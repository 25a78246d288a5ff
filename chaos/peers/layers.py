"""Capacity layers of replica-only peers: Karpenter's order with its short memory, and Ray's autoscaler v2.

A layer turns wanted replicas into instances of offerings and a place for every replica. May not do I/O or read a clock.
Sources of the rules: docs/peers.md.
"""

from __future__ import annotations

from math import inf

from .facts import EPSILON, Facts, Offering, Shape
from .packing import Answer, Fleet, Want, price, refused_at_s
from .windows import Window

KARPENTER_MEMORY_S = 180.0
RAY_RECOVERY_S = 600.0
RAY_SAFETY_FLOOR_S = 10.0
RAY_IDLE_S = 300.0

Way = tuple[Shape, str]


def by_price(fleet: Fleet, want: Want) -> list[Way]:
    """Every way to serve `want`: reserved before spot before on-demand, then by price per unit, then by id."""

    def key(way: Way) -> tuple[int, float, str]:
        shape, place = way
        offering = fleet.offerings[place]
        usd_per_unit_h = price(fleet, offering) * shape.gpus * shape.nodes / offering.gpus / shape.units
        return offering.rank, usd_per_unit_h, place

    return sorted(((shape, place) for shape in want.shapes for place in shape.places), key=key)


class Karpenter:
    """Reserved, spot, on-demand, each by price; an offering that refused is left out for three minutes.

    The memory is keyed by capacity type, instance type and zone. What is empty is ended at once.
    """

    def __init__(self, facts: Facts) -> None:
        self._cells = {place: _cell(offering) for place, offering in facts.offerings.items()}

    def place(self, now_s: float, fleet: Fleet, wants: list[Want]) -> Answer:
        """One pass over `wants`, in their order."""
        closed = {
            cell for place, cell in self._cells.items() if now_s - refused_at_s(fleet, place) < KARPENTER_MEMORY_S
        }
        for want in wants:
            ways = by_price(fleet, want)
            fleet.settle(want, ways)
            for shape, place in ways:
                offering = fleet.offerings[place]
                if offering.sells(now_s) and self._cells[place] not in closed:
                    fleet.fill(want, shape, place, offering.size)
        return fleet.answer()


def _cell(offering: Offering) -> tuple[int, str, str]:
    return offering.rank, offering.instance_type, offering.zone


class RayV2:
    """Ray's autoscaler v2: the node type that pending replicas use best; how lately it failed only breaks ties.

    A node type is one offering. Its priority, which an operator would set, is Karpenter's order. Nodes that were idle
    for five minutes are ended.
    """

    def __init__(self, facts: Facts) -> None:
        self._ready = dict.fromkeys(facts.offerings, 0)
        self._joined_at_s = dict.fromkeys(facts.offerings, -inf)
        self._used = {place: Window(RAY_IDLE_S) for place in facts.offerings}

    def place(self, now_s: float, fleet: Fleet, wants: list[Want]) -> Answer:
        """Existing nodes first, then new ones, one at a time, whichever scores best."""
        self._note_joined(now_s, fleet)
        ways = [by_price(fleet, want) for want in wants]
        for want, order in zip(wants, ways, strict=True):
            fleet.settle(want, order)
        while pending := self._pending(now_s, fleet, wants, ways):
            place = max(pending, key=lambda place: self._rating(now_s, fleet, place, pending[place]))
            limit = fleet.needed_with(pending[place][0][1], place)
            for want, shape in pending[place]:
                fleet.fill(want, shape, place, limit)
        for place, used in self._used.items():
            used.add(now_s, fleet.needed(place))
        return fleet.answer({place: int(used.most) for place, used in self._used.items()})

    def availability(self, now_s: float, fleet: Fleet, place: str) -> float:
        """1 where nothing failed since a node last joined, else from 0 to 1 over ten minutes after it."""
        at_s = refused_at_s(fleet, place)
        if at_s <= self._joined_at_s[place]:
            return 1.0
        age_s = now_s - at_s
        return 0.0 if age_s < RAY_SAFETY_FLOOR_S else min(1.0, age_s / RAY_RECOVERY_S)

    def _note_joined(self, now_s: float, fleet: Fleet) -> None:
        for place, before in self._ready.items():
            ready = fleet.rows[place]["ready"]
            if ready > before:
                self._joined_at_s[place] = now_s
            self._ready[place] = ready

    def _pending(
        self, now_s: float, fleet: Fleet, wants: list[Want], ways: list[list[Way]]
    ) -> dict[str, list[tuple[Want, Shape]]]:
        """By node type, in order of id: the missing replicas that one more node of it could take, heaviest first."""
        found: dict[str, list[tuple[Want, Shape]]] = {}
        for want, order in zip(wants, ways, strict=True):
            if want.units - fleet.units(want) > EPSILON:
                for shape, place in order:
                    offering = fleet.offerings[place]
                    if offering.sells(now_s) and fleet.needed_with(shape, place) <= offering.size:
                        found.setdefault(place, []).append((want, shape))
        return {place: sorted(found[place], key=lambda row: -row[1].gpus) for place in sorted(found)}

    def _rating(
        self, now_s: float, fleet: Fleet, place: str, pending: list[tuple[Want, Shape]]
    ) -> tuple[float, float, int, float]:
        """GPUs × (share of them used)³ of one new node, then availability, then priority."""
        offering = fleet.offerings[place]
        free = offering.gpus
        for want, shape in pending:
            missing = (want.units - fleet.units(want)) / shape.units
            fits = 1 if shape.nodes > 1 else int(-(-(missing - EPSILON) // 1))
            free -= shape.gpus * min(fits, free // shape.gpus)
        used = (offering.gpus - free) / offering.gpus
        usd_per_gpu_h = price(fleet, offering) / offering.gpus
        return offering.gpus * used**3, self.availability(now_s, fleet, place), -offering.rank, -usd_per_gpu_h
