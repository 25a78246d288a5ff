"""Small scenarios for the simulated world, from a few words. Times are constants unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from chaos.scenario import Scenario, scenario_of
from chaos.world.world import World

MODEL = "meta-llama/Meta-Llama-3.1-8B"
TYPE = "g6e.2xlarge"  # one L40S, catalogue prices
BIG = "g6e.12xlarge"  # four of them
CHAT = "support/chat"
APP = "support.chat.l40s"
BOOT_S, LOAD_S = 60.0, 30.0


def constant(mean_s: float) -> dict[str, Any]:
    return {"dist": "constant", "mean": mean_s}


def service(name: str = "chat", **over: Any) -> dict[str, Any]:
    """A latency service of one variant on one L40S."""
    fields: dict[str, Any] = {
        "name": name,
        "model": MODEL,
        "goal": "latency",
        "priority": 500,
        "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
        "min_replicas": 1,
        "max_replicas": 20,
        "variants": [{"id": "l40s", "instance_type": TYPE}],
    }
    return fields | over


def unit(*services: dict[str, Any], name: str = "support", **over: Any) -> dict[str, Any]:
    return {"unit": name, "owner": "o", "services": list(services)} | over


def row(name: str, count: Any = 8, **over: Any) -> dict[str, Any]:
    """An on-demand pool in a zone of its own."""
    fields: dict[str, Any] = {
        "id": name,
        "instance_type": TYPE,
        "zone": f"zone-{name}",
        "market": "on_demand",
        "count": count,
        "price_usd_per_h": 2.0,
        "boot_s": constant(BOOT_S),
        "load_s": constant(LOAD_S),
    }
    return fields | over


def demand(rps: float, name: str = CHAT, **over: Any) -> dict[str, Any]:
    """Requests of 500 tokens in, 100 out, evenly spread."""
    fields: dict[str, Any] = {
        "service": name,
        "synthetic": {"kind": "constant", "rps": rps},
        "input_tokens": 500,
        "output_tokens": 100,
    }
    return fields | over


def scenario(*rows: dict[str, Any], rps: float = 1.0, **over: Any) -> Scenario:
    """One service, 20 minutes, the catalogue's constants as they are, no slow nodes."""
    fields: dict[str, Any] = {
        "name": "small",
        "duration_s": 1200.0,
        "policies": [unit(service())],
        "demand": [demand(rps)],
        "supply": list(rows or (row("od"),)),
        "constants_sigma": 0.0,
        "nodes_slow_fraction": 0.0,
    }
    return scenario_of(fields | over)


def fault(kind: str, at_s: float, for_s: float = 0.0, **over: Any) -> dict[str, Any]:
    return {"kind": kind, "at_s": at_s, "for_s": for_s} | over


def world(*rows: dict[str, Any], seed: int = 1, **over: Any) -> World:
    return World(scenario(*rows, **over), seed)


def states(made: World) -> list[str]:
    """States of the replicas, sorted."""
    return sorted(replica.state for replica in made.cluster.replicas())


class Wants:
    """A controller under test that always wants the same."""

    def __init__(self, instances: dict[str, int], replicas: dict[tuple[str, str, str], int] | None = None) -> None:
        one = {("support/chat", "l40s", offering): count for offering, count in instances.items()}
        self.answer = {"instances": instances, "replicas": one if replicas is None else replicas}
        self.views: list[tuple[float, dict[str, Any]]] = []

    def __call__(self, scenario: dict[str, Any]) -> Wants:
        self.scenario = scenario
        return self

    def decide(self, now_s: float, view: dict[str, Any]) -> Any:
        self.views.append((now_s, view))
        return self.answer
