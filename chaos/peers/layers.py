"""Capacity layers of replica-only peers: Karpenter's order with its short memory, and Ray's autoscaler v2.

A layer turns wanted replicas into instances of offerings and a place for every replica. May not do I/O or read a clock.
Sources of the rules: docs/peers.md.
"""

from __future__ import annotations

from math import ceil, inf

from .facts import EPSILON, Facts, Offering, Shape
from .packing import Answer, ByPrice, Fleet, Want, price, refused_at_s
from .windows import Window

KARPENTER_MEMORY_S = 180.0
RAY_RECOVERY_S = 600.0
RAY_SAFETY_FLOOR_S = 10.0
RAY_IDLE_S = 300.0

Pending = tuple[int, Shape]  # index of the want, and a variant of it


class Karpenter:
    """Reserved, spot, on-demand, each by price; an offering that refused is left out for three minutes.

    The memory is keyed by capacity type, instance type and zone. What is empty is ended at once.
    """

    def __init__(self, facts: Facts) -> None:
        self._cells = {place: _cell(offering) for place, offering in facts.offerings.items()}
        self._order = ByPrice()

    def place(self, now_s: float, fleet: Fleet, wants: list[Want]) -> Answer:
        """One pass over `wants`, in their order."""
        closed = {
            cell for place, cell in self._cells.items() if now_s - refused_at_s(fleet, place) < KARPENTER_MEMORY_S
        }
        for want in wants:
            ways = self._order.ways(fleet, want)
            missing = fleet.settle(want, ways)
            for shape, place in ways:
                offering = fleet.offerings[place]
                if missing > EPSILON and fleet.sells(place, now_s) and self._cells[place] not in closed:
                    missing = fleet.ask(shape, place, offering.size, missing)
            fleet.pend(want.service.key, missing)
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
        self._order = ByPrice()

    def place(self, now_s: float, fleet: Fleet, wants: list[Want]) -> Answer:
        """Existing nodes first, then new ones, whichever type scores best."""
        self._note_joined(now_s, fleet)
        missing = [fleet.settle(want, self._order.ways(fleet, want)) for want in wants]
        while pending := self._pending(now_s, fleet, wants, missing):
            place = max(pending, key=lambda place: self._rating(now_s, fleet, place, pending[place], missing))
            limit = self._limit(fleet, place, pending[place], missing)
            for index, shape in pending[place]:
                missing[index] = fleet.ask(shape, place, limit, missing[index])
        for want, units in zip(wants, missing, strict=True):
            fleet.pend(want.service.key, units)
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

    def _pending(self, now_s: float, fleet: Fleet, wants: list[Want], missing: list[float]) -> dict[str, list[Pending]]:
        """By node type, in order of id: the missing replicas that one more node of it could take, heaviest first."""
        found: dict[str, list[Pending]] = {}
        for index, want in enumerate(wants):
            if missing[index] > EPSILON:
                for shape in want.shapes:
                    for place in shape.places:
                        offering = fleet.offerings[place]
                        fits = fleet.allows(shape) and fleet.needed_with(shape, place) <= offering.size
                        if fits and fleet.sells(place, now_s):
                            found.setdefault(place, []).append((index, shape))
        return {place: sorted(found[place], key=lambda row: -row[1].gpus) for place in sorted(found)}

    def _rating(
        self, now_s: float, fleet: Fleet, place: str, pending: list[Pending], missing: list[float]
    ) -> tuple[float, float, int, float]:
        """GPUs × (share of them used)³ of one new node, then availability, then priority."""
        offering = fleet.offerings[place]
        free = offering.gpus
        for index, shape in pending:
            parts = 1 if shape.nodes > 1 else ceil(missing[index] / shape.units - EPSILON)
            free -= shape.gpus * min(parts, free // shape.gpus)
        used = (offering.gpus - free) / offering.gpus
        usd_per_gpu_h = price(fleet, place) / offering.gpus
        return offering.gpus * used**3, self.availability(now_s, fleet, place), -offering.rank, -usd_per_gpu_h

    @staticmethod
    def _limit(fleet: Fleet, place: str, pending: list[Pending], missing: list[float]) -> float:
        """Instances to fill: one more node, or all those that one service fills whole (the choice would not change)."""
        index, shape = pending[0]
        offering = fleet.offerings[place]
        least = fleet.needed_with(shape, place)
        if len(pending) > 1 or shape.nodes > 1:
            return least
        whole = int((missing[index] / shape.units + EPSILON) // (offering.gpus // shape.gpus))
        return min(offering.size, max(least, fleet.needed(place) + whole))
