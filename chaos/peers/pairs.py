"""Each replica rule with its capacity layer: the peers that the bench knows by name. May not do I/O or read a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .facts import Facts, Seen, Service, facts_of
from .layers import Karpenter, RayV2
from .packing import Answer, Fleet, Want, observe
from .replicas import Apa, Hpa, Keda, Kpa


class Rule(Protocol):
    """One service's replica rule."""

    def want(self, now_s: float, seen: Seen) -> int:
        """Units wanted now."""


class Layer(Protocol):
    """What turns wants into instances and places."""

    def place(self, now_s: float, fleet: Fleet, wants: list[Want]) -> Answer:
        """The whole answer of a tick."""


class Pair:
    """A replica rule for every service over one capacity layer."""

    def __init__(
        self,
        scenario: Mapping[str, Any],
        rule: Callable[[Service, float], Rule],
        layer: Callable[[Facts], Layer],
    ) -> None:
        self._facts = facts_of(scenario)
        self.rules = {service.key: rule(service, self._facts.knob) for service in self._facts.services}
        self._layer = layer(self._facts)

    def decide(self, now_s: float, view: Mapping[str, Any]) -> Answer:
        """Absolute instances and replicas."""
        fleet = Fleet(self._facts, view)
        seen = observe(self._facts, view, fleet)
        wants = [
            Want(service, service.shapes, self.rules[service.key].want(now_s, seen[service.key]))
            for service in self._facts.services
        ]
        return self._layer.place(now_s, fleet, wants)


def ray_serve(scenario: Mapping[str, Any]) -> Pair:
    """Ray Serve's policy on Ray's autoscaler v2."""
    from .ray_serve import RayServe  # ray.serve takes more than a second to import

    return Pair(scenario, RayServe, RayV2)


def kpa(scenario: Mapping[str, Any]) -> Pair:
    """Knative's KPA on Karpenter."""
    return Pair(scenario, Kpa, Karpenter)


def hpa(scenario: Mapping[str, Any]) -> Pair:
    """The HPA on Karpenter."""
    return Pair(scenario, Hpa, Karpenter)


def keda(scenario: Mapping[str, Any]) -> Pair:
    """KEDA on vLLM's queue on Karpenter."""
    return Pair(scenario, Keda, Karpenter)


def aibrix(scenario: Mapping[str, Any]) -> Pair:
    """AIBrix's APA on Karpenter."""
    return Pair(scenario, Apa, Karpenter)
