"""Controllers that never change their mind: the best static plan is found with them, and the world's speed measured.

May not do I/O or read a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .facts import Seen, Service
from .layers import Karpenter
from .packing import Answer
from .pairs import Peer, paired


class Fixed:
    """Always the same number of units."""

    def __init__(self, units: int) -> None:
        self._units = units

    def want(self, now_s: float, seen: Seen) -> int:  # noqa: ARG002 - a rule's signature
        """Units wanted."""
        return self._units


def static(scenario: Mapping[str, Any]) -> Peer:
    """``scenario["peer"]["replicas"]``: units, one number or by service; without it max(1, floor) × knob, rounded."""
    stated = (scenario.get("peer") or {}).get("replicas")

    def rule(service: Service, knob: float) -> Fixed:
        if stated is None:
            return Fixed(max(service.floor, round(max(1, service.floor) * knob)))
        return Fixed(int(stated[service.key] if isinstance(stated, Mapping) else stated))

    return paired(scenario, rule, Karpenter)


class Trivial:
    """The answer of the first tick for ever: what the world costs without a controller."""

    def __init__(self, scenario: Mapping[str, Any]) -> None:
        self._pair = static(scenario)
        self._answer: Answer | None = None

    def decide(self, now_s: float, view: Mapping[str, Any]) -> Answer:
        """Absolute instances and replicas."""
        if self._answer is None:
            self._answer = self._pair.decide(now_s, view)
        return self._answer


def trivial(scenario: Mapping[str, Any]) -> Trivial:
    """`static` without a reaction to anything, not even to a refusal."""
    return Trivial(scenario)
