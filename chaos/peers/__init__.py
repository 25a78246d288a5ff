"""Peer autoscalers as controllers under test: `PEERS[name](scenario)` has `decide(now_s, view)`. Docs: docs/peers.md.

Every peer has one main knob; `scenario["peer"]["knob"]` multiplies its default. Each is imported when it is asked for.
May not do I/O or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol


class Controller(Protocol):
    """What the world drives, once a tick."""

    def decide(self, now_s: float, view: Mapping[str, Any]) -> dict[str, dict[Any, int]]:
        """``{"instances": {offering: n}, "replicas": {(service, variant, offering): n}}``, absolute."""


Factory = Callable[[Mapping[str, Any]], Controller]


@dataclass(frozen=True, slots=True)
class Knob:
    """A peer's main knob: what its authors tell operators to tune. `default` in its own unit, before the multiplier."""

    name: str
    default: float


def _lazy(module: str, attr: str) -> Factory:
    def factory(scenario: Mapping[str, Any]) -> Controller:
        made: Controller = getattr(import_module(f".{module}", __name__), attr)(scenario)
        return made

    return factory


def tuned(factory: Factory, multiplier: float) -> Factory:
    """`factory` with its knob at `multiplier` × the default."""
    return lambda scenario: factory({**scenario, "peer": {**(scenario.get("peer") or {}), "knob": multiplier}})


PEERS: dict[str, Factory] = {
    "ray_serve": _lazy("pairs", "ray_serve"),
    "kpa": _lazy("pairs", "kpa"),
    "hpa": _lazy("pairs", "hpa"),
    "keda": _lazy("pairs", "keda"),
    "aibrix": _lazy("pairs", "aibrix"),
    "wva": _lazy("pairs", "wva"),
    "dynamo": _lazy("pairs", "dynamo"),
    "skyserve": _lazy("pairs", "skyserve"),
    "sageserve": _lazy("pairs", "sageserve"),
    "sagemaker": _lazy("pairs", "sagemaker"),
    "static": _lazy("fixed", "static"),
    "trivial": _lazy("fixed", "Trivial"),
}
KNOBS: dict[str, Knob] = {
    "ray_serve": Knob("target_ongoing_requests, share of those in flight at the planned rate", 1.0),
    "kpa": Knob("concurrency target, share of the requests in flight at the planned rate", 1.0),
    "hpa": Knob("averageValue of requests in flight, share of those at the planned rate", 1.0),
    "keda": Knob("threshold of waiting requests per replica", 5.0),
    "aibrix": Knob("targetValue of requests in flight, share of those at the planned rate", 1.0),
    "wva": Knob("scale-up threshold of tokens held (the scale-down threshold moves with it)", 0.85),
    "dynamo": Knob("SLA-bounded engine rate and batch, share of the planned ones", 1.0),
    "skyserve": Knob("target_qps_per_replica, share of the planned rate", 1.0),
    "sageserve": Knob("rate that the program lets a replica carry, share of the planned one", 1.0),
    "sagemaker": Knob("target of concurrent requests, share of those in flight at the planned rate", 1.0),
    "static": Knob("replicas", 1.0),
}
