"""Every peer as the bench knows it: a replica rule over a capacity layer. May not do I/O or read a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .facts import Facts, Seen, Service, facts_of
from .layers import Karpenter, RayV2
from .packing import Answer, Fleet, Registration, Want, observe
from .pools import SageMakerPools, TargetTracking
from .replicas import Apa, Hpa, Keda, Kpa
from .sageserve import SageServe
from .skyserve import SkyServe, SpotPlacement
from .sla import Dynamo
from .wva import Wva


class Rule(Protocol):
    """One service's replica rule."""

    def want(self, now_s: float, seen: Seen) -> int:
        """Units wanted now."""


class Planner(Protocol):
    """A rule for all services at once."""

    def wants(self, now_s: float, seen: Mapping[str, Seen], fleet: Fleet) -> list[Want]:
        """What every service should have now, most important first."""


class Layer(Protocol):
    """What turns wants into instances and places."""

    def place(self, now_s: float, fleet: Fleet, wants: list[Want]) -> Answer:
        """The whole answer of a tick."""


class EachAlone:
    """A rule of its own for every service."""

    def __init__(self, facts: Facts, rule: Callable[[Service, float], Rule]) -> None:
        self.rules = [(service, rule(service, facts.knob)) for service in facts.services]

    def wants(self, now_s: float, seen: Mapping[str, Seen], fleet: Fleet) -> list[Want]:  # noqa: ARG002
        """Any variant may serve."""
        return [Want(service, service.shapes, rule.want(now_s, seen[service.key])) for service, rule in self.rules]


class Peer:
    """A controller under test: what is seen, what is wanted, where it is to be had."""

    def __init__(
        self, scenario: Mapping[str, Any], planner: Callable[[Facts], Planner], layer: Callable[[Facts], Layer]
    ) -> None:
        self._facts = facts_of(scenario)
        self.planner = planner(self._facts)
        self._layer = layer(self._facts)
        self._registration = Registration()

    def decide(self, now_s: float, view: Mapping[str, Any]) -> Answer:
        """Absolute instances and replicas."""
        fleet = Fleet(self._facts, view, self._registration.stuck(now_s, view))
        wants = self.planner.wants(now_s, observe(self._facts, view, fleet), fleet)
        return self._layer.place(now_s, fleet, wants)


def paired(
    scenario: Mapping[str, Any], rule: Callable[[Service, float], Rule], layer: Callable[[Facts], Layer]
) -> Peer:
    """One rule a service over one capacity layer."""
    return Peer(scenario, lambda facts: EachAlone(facts, rule), layer)


def ray_serve(scenario: Mapping[str, Any]) -> Peer:
    """Ray Serve's policy on Ray's autoscaler v2."""
    from .ray_serve import RayServe  # ray.serve takes more than a second to import

    return paired(scenario, RayServe, RayV2)


def kpa(scenario: Mapping[str, Any]) -> Peer:
    """Knative's KPA on Karpenter."""
    return paired(scenario, Kpa, Karpenter)


def hpa(scenario: Mapping[str, Any]) -> Peer:
    """The HPA on Karpenter."""
    return paired(scenario, Hpa, Karpenter)


def keda(scenario: Mapping[str, Any]) -> Peer:
    """KEDA on vLLM's queue on Karpenter."""
    return paired(scenario, Keda, Karpenter)


def aibrix(scenario: Mapping[str, Any]) -> Peer:
    """AIBrix's APA on Karpenter."""
    return paired(scenario, Apa, Karpenter)


def wva(scenario: Mapping[str, Any]) -> Peer:
    """llm-d's WVA V2 with its limiter on Karpenter."""
    return Peer(scenario, Wva, Karpenter)


def dynamo(scenario: Mapping[str, Any]) -> Peer:
    """Dynamo's planner on Karpenter."""
    return paired(scenario, Dynamo, Karpenter)


def skyserve(scenario: Mapping[str, Any]) -> Peer:
    """SkyServe with its spot placer and on-demand fallback."""
    return paired(scenario, SkyServe, SpotPlacement)


def sageserve(scenario: Mapping[str, Any]) -> Peer:
    """SageServe's forecast and program on Karpenter."""
    return Peer(scenario, SageServe, Karpenter)


def sagemaker(scenario: Mapping[str, Any]) -> Peer:
    """SageMaker's target tracking on its instance pools."""
    return paired(scenario, TargetTracking, SageMakerPools)
