"""Replicas onto instances: who is where, what still fits, how many instances that takes. May not do I/O.

Shared by the capacity layers, which differ in which offering they turn to. TP never spans instances; a replica of
several nodes is placed whole or not at all. Nothing is remembered here: every tick starts from the view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from .facts import EPSILON, PAID, Facts, Key, Seen, Service, Shape

View = Mapping[str, Any]
Answer = dict[str, dict[Any, int]]
Way = tuple[Shape, str]  # a variant and an offering of its instance type


@dataclass(frozen=True, slots=True)
class Want:
    """What a rule asks for: so many units of a service, made of any of `shapes`."""

    service: Service
    shapes: tuple[Shape, ...]
    units: float


def instances_needed(sizes: Mapping[int, int], gpus: int) -> int:
    """Instances of `gpus` GPUs that hold ``{GPUs: how many}`` parts, largest first, each where it fits tightest."""
    free: dict[int, int] = {}  # free GPUs -> instances
    for size in sorted(sizes, reverse=True):
        left = sizes[size]
        for room in sorted(room for room in free if room >= size):
            take = min(left, free[room] * (room // size))
            _fill(free, room, size, take)
            left -= take
        fresh = -(-left // (gpus // size)) if left > 0 else 0
        free[gpus] = free.get(gpus, 0) + fresh
        _fill(free, gpus, size, left)
    return sum(free.values())


def _fill(free: dict[int, int], room: int, size: int, parts: int) -> None:
    """Put `parts` of `size` into instances with `room` free GPUs, filling one after the other."""
    full, rest = divmod(parts, room // size)
    for count, used in ((full, room // size * size), (min(rest, 1), rest * size)):
        free[room] -= count
        free[room - used] = free.get(room - used, 0) + count


class Registration:
    """Instances that start but never join: a place where none joined, came or went for 15 minutes gives them up.

    Karpenter ends a node that has not registered by then; what still starts is asked for anew.
    """

    TIMEOUT_S = 900.0

    def __init__(self) -> None:
        self._since_s: dict[str, tuple[float, int, int]] = {}

    def stuck(self, now_s: float, view: View) -> frozenset[str]:
        """Places whose starting instances are given up now."""
        found = set()
        for place, row in view["offerings"].items():
            since_s, *before = self._since_s.get(place, (now_s, -1, -1))
            now = [row["ready"], row["starting"]]
            if now != before or not row["starting"]:
                since_s = now_s
            elif now_s - since_s >= self.TIMEOUT_S:
                found.add(place)
            self._since_s[place] = (since_s, row["ready"], row["starting"])
        return frozenset(found)


class Fleet:
    """Replicas by (service, variant, offering) as they are, then as they should be; `instances` is what runs now.

    Nothing is asked of `stuck` places, and what starts there does not count.
    """

    def __init__(self, facts: Facts, view: View, stuck: frozenset[str] = frozenset()) -> None:
        self.offerings = facts.offerings
        self.rows: Mapping[str, Mapping[str, Any]] = view["offerings"]
        self.stuck = stuck
        self.instances = {place: self._running(place) for place in facts.offerings}
        self.replicas: dict[Key, int] = {}
        self.ready: dict[Key, int] = {}
        self._quota_gpus = facts.quota_gpus
        self._gpus: dict[str, int] = dict.fromkeys(facts.quota_gpus, 0)  # by unit, bound and asked for
        self._asked: dict[Key, int] = {}
        self._home: dict[str, Way] = {}
        self._pending: dict[Way, float] = {}  # units
        self._sizes: dict[str, dict[int, int]] = {place: {} for place in facts.offerings}
        self._gang = dict.fromkeys(facts.offerings, 1)
        self._needed = dict.fromkeys(facts.offerings, 0)
        self._shapes = {(shape.service, shape.variant): shape for service in facts.services for shape in service.shapes}
        for key, ready, count in _living(view):
            shape = self._shapes.get(key[:2])
            if shape is not None and key[2] in facts.offerings:
                self.ready[key] = ready
                self.put(shape, key[2], count)
                self._unbind(shape, key, count - ready)

    def _running(self, place: str) -> int:
        row = self.rows[place]
        return int(row["ready"] + (0 if place in self.stuck else row["starting"]))

    def sells(self, place: str, now_s: float) -> bool:
        """Whether instances of `place` may be asked for now."""
        return place not in self.stuck and self.offerings[place].sells(now_s)

    def _unbind(self, shape: Shape, key: Key, starting: int) -> None:
        """Replicas that wait for instances which were never launched are nowhere, and may be asked for elsewhere."""
        while starting > 0 and self.needed(key[2]) > self.instances[key[2]]:
            self.put(shape, key[2], -1)
            starting -= 1

    def put(self, shape: Shape, place: str, count: int = 1) -> None:
        """`count` more (or fewer) replicas of `shape` at `place`."""
        key = (shape.service, shape.variant, place)
        self.replicas[key] = self.replicas.get(key, 0) + count
        sizes = self._sizes[place]
        sizes[shape.gpus] = sizes.get(shape.gpus, 0) + count * shape.nodes
        self._gpus[_unit(shape)] += count * shape.gpus * shape.nodes
        self._gang[place] = max(self._gang[place], shape.nodes)
        self._needed[place] = -1

    def needed(self, place: str) -> int:
        """Instances of `place` that the replicas there take."""
        if self._needed[place] < 0:
            parts = instances_needed(self._sizes[place], self.offerings[place].gpus)
            self._needed[place] = max(parts, self._gang[place]) if parts else 0
        return self._needed[place]

    def needed_with(self, shape: Shape, place: str, count: int = 1) -> int:
        """Instances of `place` with `count` more replicas of `shape`."""
        sizes = dict(self._sizes[place])
        sizes[shape.gpus] = sizes.get(shape.gpus, 0) + count * shape.nodes
        return max(shape.nodes, instances_needed(sizes, self.offerings[place].gpus))

    def units(self, want: Want) -> float:
        """What the replicas of the wanted shapes amount to, in units, wherever they are."""
        return sum(
            shape.units * self.replicas.get((shape.service, shape.variant, place), 0)
            for shape in want.shapes
            for place in shape.places
        )

    def allows(self, shape: Shape) -> bool:
        """Whether the unit's quota has room for one more replica."""
        unit = _unit(shape)
        return self._gpus[unit] + shape.gpus * shape.nodes <= self._quota_gpus[unit]

    def fill(self, shape: Shape, place: str, most: float, missing: float) -> float:
        """Add replicas of `shape` at `place` while units are missing, the quota allows, and `most` instances hold them.

        Returns the units that are still missing.
        """
        while missing > EPSILON and self.allows(shape) and self.needed_with(shape, place) <= most:
            self.put(shape, place)
            missing -= shape.units
        return missing

    def ask(self, shape: Shape, place: str, most: float, missing: float) -> float:
        """As `fill`, on instances that are yet to be launched: until they are, the replicas count as pending."""
        left = self.fill(shape, place, most, missing)
        key = (shape.service, shape.variant, place)
        self._asked[key] = self._asked.get(key, 0) + round((missing - left) / shape.units)
        self.pend(shape.service, missing - left)
        return left

    def pend(self, service: str, units: float) -> None:
        """Units without an instance stay wanted, at the first way of the service's last want, as pods stay pending."""
        if units > EPSILON and service in self._home:
            home = self._home[service]
            self._pending[home] = self._pending.get(home, 0.0) + units

    def settle(self, want: Want, ways: Sequence[Way]) -> float:
        """Dismiss what is not wanted, starting first, from the last of `ways` on; then use the free room that runs.

        Returns the units that are still missing.
        """
        missing = want.units - self.units(want)
        if ways:
            self._home[want.service.key] = ways[0]
        if missing < -EPSILON:
            for starting in (True, False):
                for shape, place in reversed(ways):
                    missing += self._dismiss(shape, place, -missing, starting)
        for shape, place in ways:
            if missing <= EPSILON:
                break
            missing = self.fill(shape, place, self.instances[place], missing)
        return missing

    def _dismiss(self, shape: Shape, place: str, spare: float, starting: bool) -> float:
        key = (shape.service, shape.variant, place)
        count = self.replicas.get(key, 0)
        kept = min(count, self.ready.get(key, 0)) if starting else 0
        go = max(0, min(int((spare + EPSILON) / shape.units), count - kept))
        if go:
            self.put(shape, place, -go)
        return go * shape.units

    def answer(self, keep: Mapping[str, int] | None = None) -> Answer:
        """Instances that hold the replicas (at least `keep` of those that run), and the replicas themselves."""
        held = keep or {}
        instances = {
            place: max(self.needed(place), min(held.get(place, 0), running))
            for place, running in self.instances.items()
        }
        for key, count in self._asked.items():
            self.put(self._shapes[key[:2]], key[2], -count)
        for (shape, place), units in self._pending.items():
            wanted = ceil(units / shape.units - EPSILON)
            room = self._quota_gpus[_unit(shape)] - self._gpus[_unit(shape)]
            self.put(shape, place, int(min(wanted, room // (shape.gpus * shape.nodes))))
        return {
            "instances": {place: count for place, count in instances.items() if count},
            "replicas": {key: count for key, count in self.replicas.items() if count},
        }


def _unit(shape: Shape) -> str:
    return shape.service.split("/")[0]


def _living(view: View) -> list[tuple[Key, int, int]]:
    """``(key, ready, ready + starting)`` of every group of replicas that is not on its way out."""
    found: dict[Key, list[int]] = {}
    for row in view["replicas"]:
        state = row["state"]
        if state != "draining":
            group = found.setdefault((row["service"], row["variant"], row["offering"]), [0, 0])
            group[0] += state == "ready"
            group[1] += 1
    return [(key, ready, count) for key, (ready, count) in sorted(found.items())]


def observe(facts: Facts, view: View, fleet: Fleet) -> dict[str, Seen]:
    """Every service's load and units, in the order of `facts.services`."""
    found: dict[str, Seen] = {}
    for service in facts.services:
        row = view["services"][service.key]
        seen = Seen(row["arrival_rps"], row["prefill_tps"], row["decode_tps"], row["queued"], row["running"])
        for shape in service.shapes:
            for place in shape.places:
                key = (shape.service, shape.variant, place)
                ready = min(fleet.ready.get(key, 0), fleet.replicas.get(key, 0))
                seen.ready += ready * shape.units
                seen.starting += (fleet.replicas.get(key, 0) - ready) * shape.units
        found[service.key] = seen
    return found


def price(fleet: Fleet, place: str) -> float:
    """What another instance costs, $/h: nothing where it is paid for anyway."""
    return 0.0 if fleet.offerings[place].market in PAID else float(fleet.rows[place]["price_usd_per_h"])


def usd_per_h(fleet: Fleet, shape: Shape, place: str) -> float:
    """What another replica costs, $/h: its share of its instances."""
    return price(fleet, place) * shape.gpus * shape.nodes / fleet.offerings[place].gpus


def refused_at_s(fleet: Fleet, place: str) -> float:
    """When the offering last refused, minus infinity if never."""
    refusal = fleet.rows[place]["last_refusal"]
    return float("-inf") if refusal is None else float(refusal["at_s"])


class ByPrice:
    """Every way to serve a want: reserved before spot before on-demand, then by price per unit, then by id.

    Remembered while no price changes.
    """

    def __init__(self) -> None:
        self._prices: dict[str, float] = {}
        self._ways: dict[tuple[Shape, ...], list[Way]] = {}

    def ways(self, fleet: Fleet, want: Want) -> list[Way]:
        """The ways of `want`, best first."""
        prices = {place: price(fleet, place) for place in fleet.offerings}
        if prices != self._prices:
            self._prices, self._ways = prices, {}
        if want.shapes not in self._ways:
            ways = [(shape, place) for shape in want.shapes for place in shape.places]
            self._ways[want.shapes] = sorted(ways, key=lambda way: _rank(fleet, *way))
        return self._ways[want.shapes]


def _rank(fleet: Fleet, shape: Shape, place: str) -> tuple[int, float, str]:
    return fleet.offerings[place].rank, usd_per_h(fleet, shape, place) / shape.units, place
