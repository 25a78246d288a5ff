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


PEERS: dict[str, Factory] = {
    "ray_serve": _lazy("pairs", "ray_serve"),
    "kpa": _lazy("pairs", "kpa"),
    "hpa": _lazy("pairs", "hpa"),
    "keda": _lazy("pairs", "keda"),
    "aibrix": _lazy("pairs", "aibrix"),
    "static": _lazy("fixed", "static"),
    "trivial": _lazy("fixed", "trivial"),
}
KNOBS: dict[str, Knob] = {
    "ray_serve": Knob("target_ongoing_requests, share of the largest batch within the SLO", 0.7),
    "kpa": Knob("target-utilization, share of the largest batch within the SLO", 0.7),
    "hpa": Knob("averageValue of requests in flight, share of the largest batch within the SLO", 0.7),
    "keda": Knob("threshold of waiting requests per replica", 5.0),
    "aibrix": Knob("targetValue of requests in flight, share of the largest batch within the SLO", 0.7),
    "static": Knob("replicas", 1.0),
}
