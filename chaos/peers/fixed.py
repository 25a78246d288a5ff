"""Controllers that never change their mind: the best static plan is found with them, and the world's speed measured.

May not do I/O or read a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from .facts import EPSILON, Facts, Seen, Service, facts_of
from .layers import Karpenter
from .packing import Answer, ByPrice, Fleet, Want
from .pairs import Peer


def units_of(service: Service, facts: Facts) -> int:
    """``scenario["peer"]["replicas"]``, one number or by service; without it max(1, floor) × knob, rounded."""
    stated = facts.replicas
    if stated is None:
        return max(service.floor, round(max(1, service.floor) * facts.knob))
    return int(stated[service.key] if isinstance(stated, Mapping) else stated)


class AllFixed:
    """Always the same number of units of every service."""

    def __init__(self, facts: Facts) -> None:
        self._wants = [Want(service, service.shapes, units_of(service, facts)) for service in facts.services]

    def wants(self, now_s: float, seen: Mapping[str, Seen], fleet: Fleet) -> list[Want]:  # noqa: ARG002
        """The same wants."""
        return self._wants


def static(scenario: Mapping[str, Any]) -> Peer:
    """The same number of replicas for ever, kept up on Karpenter."""
    return Peer(scenario, AllFixed, Karpenter)


class Trivial:
    """One answer for ever: what the world costs without a controller. Each service at its first choice alone."""

    def __init__(self, scenario: Mapping[str, Any]) -> None:
        self._facts = facts_of(scenario)
        self._answer: Answer | None = None

    def decide(self, now_s: float, view: Mapping[str, Any]) -> Answer:
        """Absolute instances and replicas."""
        if self._answer is None:
            self._answer = self._first(now_s, Fleet(self._facts, view))
        return self._answer

    def _first(self, now_s: float, fleet: Fleet) -> Answer:
        order = ByPrice()
        for service in self._facts.services:
            units = units_of(service, self._facts)
            for shape, place in order.ways(fleet, Want(service, service.shapes, units)):
                count, offering = ceil(units / shape.units - EPSILON), fleet.offerings[place]
                if fleet.sells(place, now_s) and fleet.needed_with(shape, place, count) <= offering.size:
                    fleet.put(shape, place, count)
                    break
        return fleet.answer()
