"""`qm bench world`: how many requests the simulated world handles per second of one core.

One service at a steady 200 requests per second on some sixty one-GPU instances, 10 s ticks, everything drawn: boots,
loads, slow nodes, true constants. Once under a controller that always answers the same, once under the loop.
"""

from __future__ import annotations

import json
import resource
import time  # noqa: TID251  # a benchmark times real code
from collections.abc import Mapping
from typing import Any

from autoscaler.commands.outcome import OK, write_json
from chaos.scenario import Scenario, scenario_of
from chaos.world import Factory, simulate

RPS = 200.0
WARM_UP_S = 600.0  # compiles, and fills caches


class Steady:
    """Always the same: what the mean rate needs and a fifth more, on the one offering."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        (shape,), (row,) = told["shapes"], told["supply"]
        count = int(1.2 * RPS / shape["capacity_rps"]) + 1
        key = (shape["service"], shape["variant"], row["id"])
        self._answer = {"instances": {row["id"]: count}, "replicas": {key: count}}

    def decide(self, now_s: float, view: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002
        """See the class."""
        return self._answer


def world_command(requests: int, json_file: str | None) -> int:
    """Run the benchmark and show it; always 0, because a slow machine is no fault."""
    figures = bench_world(requests)
    if json_file:
        write_json(json_file, json.dumps(figures).encode())
    else:
        print("  ".join(f"{name} {figure:.4g}" for name, figure in figures.items()))
    return OK


def bench_world(requests: int) -> dict[str, float]:
    """`{requests, trivial_rps, ours_rps, ours_tick_ms, rss_mib}`: simulated requests per CPU second, about `requests`
    of them under each controller.
    """
    made = _scenario(max(WARM_UP_S, requests / RPS))
    took_s: dict[str, float] = {}
    total = 0
    controllers: dict[str, str | Factory] = {"trivial": Steady, "ours": "ours"}
    for name, controller in controllers.items():
        simulate(_scenario(WARM_UP_S), controller, 1)
        began_s = time.process_time()
        total = simulate(made, controller, 1).requests
        took_s[name] = time.process_time() - began_s
    return {
        "requests": float(total),
        "trivial_rps": total / took_s["trivial"],
        "ours_rps": total / took_s["ours"],
        "ours_tick_ms": 1000.0 * took_s["ours"] / (made.duration_s / made.tick_s),
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
    }


def _scenario(duration_s: float) -> Scenario:
    kind = "g6e.2xlarge"
    service = {
        "name": "chat",
        "model": "meta-llama/Meta-Llama-3.1-8B",
        "goal": "latency",
        "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
        "max_replicas": 100,
        "variants": [{"id": "l40s", "instance_type": kind}],
    }
    return scenario_of(
        {
            "name": "bench",
            "duration_s": duration_s,
            "policies": [{"unit": "bench", "owner": "bench", "services": [service]}],
            "demand": [{"service": "bench/chat", "synthetic": {"kind": "constant", "rps": RPS}}],
            "supply": [{"id": "od", "instance_type": kind, "zone": "us-east-1a", "market": "on_demand", "count": 100}],
        }
    )
