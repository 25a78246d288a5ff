"""A scenario from a seed: who asks, what can be had, what goes wrong and when it is over. Plain values, as in a file.

Every concern draws from a stream of its own, so that one more fault moves no arrival. May not read a clock or a file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from chaos.faults import INSTANT, KINDS
from chaos.world.timeline import stream

HOUR_S = 3600.0
BAD_PART = 2.0 / 3.0  # of the time; after it nothing is wrong any more
HEALING_S = 3600.0  # the longest cooldown
LEAST_FAULTS, MOST_FAULTS = 4, 9
LEAST_S = 60.0  # that a fault lasts
AT_ONCE = 0.3  # of the faults are there from the beginning, when most is launched
BEGINNING_S = 180.0
TAKEN_OVER = 0.15  # of the worlds: another controller runs them for a while, and leaves them in the middle of its work
MODEL = "meta-llama/Meta-Llama-3.1-8B"
SHAPES = (
    {"id": "l40s", "instance_type": "g6e.2xlarge"},
    {"id": "l40s4", "instance_type": "g6e.12xlarge", "tp": 2},
    {"id": "l4", "instance_type": "g6.12xlarge", "tp": 2},
    {"id": "h100", "instance_type": "p5.48xlarge"},
)
MARKETS = ("on_demand", "on_demand", "spot", "spot", "odcr", "block")
SLO = {
    "latency": {"ttft_s": 2.0, "tpot_s": 0.1, "fraction": 0.95},
    "throughput": {"ttft_s": 15.0, "tpot_s": 0.2, "fraction": 0.9},
    "cost": {"deadline_s": 1800.0, "fraction": 0.9},
}
SACRIFICES = (["queue", "shed"], ["queue"], ["smaller_variant", "queue", "shed"], ["queue", "smaller_variant", "shed"])
# (least, most), by logarithm. Values that a kind allows and no world recovers from within an hour are left out.
VALUES: dict[str, tuple[float, float]] = {
    "price": (0.1, 20.0),
    "quota": (0.05, 0.9),
    "partial": (0.1, 0.9),
    "boot_slow": (1.5, 10.0),
    "node_slow": (1.2, 5.0),
    "load_slow": (1.5, 8.0),
    "metrics_absurd": (1e-3, 1e9),
    "metrics_ghost": (2.0, 1e4),
    "throttle": (0.02, 0.5),
    "describe_lag": (10.0, 120.0),
    "clock_step": (20.0, 600.0),
    "clock_drift": (0.01, 0.5),
    "policy_change": (0.2, 3.0),
    "controller_crash": (0.25, 40.0),
    "manual_targets": (0.5, 20.0),
    "capacity": (0.05, 0.9),
}


@dataclass(frozen=True, slots=True)
class Size:
    """How large the worlds are."""

    services: int
    pools: int
    hours: float

    @property
    def healed_s(self) -> float:
        """When the last fault is over."""
        return BAD_PART * self.hours * HOUR_S


HOUR = Size(4, 8, 1.0)
LONG = Size(12, 20, 6.0)


def size_of(hours: float) -> Size:
    """The small world up to three hours, else the large one."""
    return Size(HOUR.services, HOUR.pools, hours) if hours <= 3.0 else Size(LONG.services, LONG.pools, hours)


def drawn(seed: int, size: Size = HOUR) -> dict[str, Any]:
    """The scenario of `seed`, as its file would say it."""
    names = [f"u{number % max(2, size.services // 3)}/s{number}" for number in range(size.services)]
    supply = [_pool(stream(seed, f"swarm/pool/{n}"), n, size) for n in range(size.pools)]
    made = {
        "name": f"chaos-{seed}",
        "seed": seed,
        "duration_s": size.hours * HOUR_S + HEALING_S,
        "tick_s": float(stream(seed, "swarm/tick").choice([10.0, 15.0, 20.0, 30.0])),
        "policies": _units(stream(seed, "swarm/policy"), names, supply),
        "demand": [_demand(stream(seed, f"swarm/demand/{name}"), name, size) for name in names],
        "supply": supply,
        "quotas": _quotas(stream(seed, "swarm/quotas")),
        "faults": sorted(
            [
                *_faults(stream(seed, "swarm/faults"), names, supply, size),
                *_taken_over(stream(seed, "swarm/taken_over")),
            ],
            key=lambda row: (row["at_s"], row["kind"]),
        ),
        "nodes_slow_fraction": 0.03,
        "describe_lag_s": float(stream(seed, "swarm/lag").choice([0.0, 0.0, 5.0, 20.0])),
        "api_rate_per_s": 2.0,
    }
    copied: dict[str, Any] = json.loads(json.dumps(made))  # no part is shared, so that YAML writes each out
    return copied


# ---- supply ---------------------------------------------------------------------------------------------------------
def _pool(rng: np.random.Generator, number: int, size: Size) -> dict[str, Any]:
    shape = SHAPES[number % len(SHAPES)] if number < len(SHAPES) else SHAPES[int(rng.integers(len(SHAPES)))]
    market = "on_demand" if number < len(SHAPES) else str(rng.choice(MARKETS))
    row: dict[str, Any] = {
        "id": f"p{number}",
        "instance_type": shape["instance_type"],
        "zone": f"us-east-1{'abc'[int(rng.integers(3))]}",
        "market": market,
        "count": int(rng.integers(1, 6)),
        "price_usd_per_h": _rounded(2.0 * rng.uniform(0.5, 2.0) * (0.5 if market == "spot" else 1.0)),
        "notice_s": float(rng.choice([0.0, 30.0, 120.0])),
        "boot_s": {"dist": "lognormal", "mean": _rounded(rng.uniform(20.0, 200.0)), "cv": 0.4},
        "load_s": {"dist": "lognormal", "mean": _rounded(rng.uniform(10.0, 180.0)), "cv": 0.3},
    }
    if market in ("odcr", "block"):
        row["reservation"] = f"cr-{number}"
    if market == "block":
        row["end_s"] = _rounded(size.hours * HOUR_S * rng.uniform(0.7, 1.6))
    return row


def _quotas(rng: np.random.Generator) -> list[dict[str, Any]]:
    if rng.random() < 0.5:
        return []
    return [{"family": "g", "market": "on_demand", "gpus": int(rng.integers(8, 40))}]


# ---- policies and demand --------------------------------------------------------------------------------------------
def _units(rng: np.random.Generator, names: list[str], supply: list[dict[str, Any]]) -> list[dict[str, Any]]:
    units: dict[str, dict[str, Any]] = {}
    for name in names:
        key, service = name.split("/")
        unit = units.setdefault(key, {"unit": key, "owner": "nobody@example.com", "services": []})
        unit["services"].append(_service(rng, service, supply))
    for unit in units.values():
        if rng.random() < 0.4:
            unit["quota_gpus"] = sum(map(_floor_gpus, unit["services"])) + int(rng.integers(0, 9))
            unit["lends"], unit["borrows"] = bool(rng.random() < 0.7), bool(rng.random() < 0.7)
        if rng.random() < 0.4:
            unit["budget_usd_per_h"] = _rounded(rng.uniform(3.0, 20.0))
    return list(units.values())


def _floor_gpus(service: dict[str, Any]) -> int:
    """What the loader wants the quota to hold."""
    return int(service["min_replicas"] * min(variant.get("tp", 1) for variant in service["variants"]))


def _service(rng: np.random.Generator, name: str, supply: list[dict[str, Any]]) -> dict[str, Any]:
    goal = str(rng.choice(list(SLO)))
    offered = [shape for shape in SHAPES if any(row["instance_type"] == shape["instance_type"] for row in supply)]
    chosen = sorted(rng.choice(len(offered), size=int(rng.integers(1, len(offered) + 1)), replace=False))
    sleeps = bool(rng.random() < 0.25)
    least = 0 if sleeps else int(rng.integers(1, 3))
    made = {
        "name": name,
        "model": MODEL,
        "goal": goal,
        "priority": int(rng.integers(1, 1000)),
        "slo": SLO[goal],
        "min_replicas": least,
        "max_replicas": least + int(rng.integers(1, 8)),
        "scale_to_zero": sleeps,
        "variants": [offered[index] for index in chosen],
        "sacrifice": SACRIFICES[int(rng.integers(len(SACRIFICES) if len(chosen) > 1 else 2))],
        "preemption_grace_s": float(rng.choice([30.0, 60.0, 120.0])),
    }
    if rng.random() < 0.3:
        made["on_demand_floor"] = 1
    return made


def _demand(rng: np.random.Generator, name: str, size: Size) -> dict[str, Any]:
    rps = _rounded(float(np.exp(rng.uniform(np.log(0.05), np.log(2.0)))))
    profile: dict[str, Any] = {"kind": "constant", "rps": rps}
    if rng.random() < 0.5:
        at_s = rng.uniform(0.1, 0.5) * size.healed_s
        hold_s = rng.uniform(0.05, 0.2) * size.healed_s
        profile |= {"kind": "flash", "at_s": _rounded(at_s), "factor": _rounded(rng.uniform(1.5, 12.0))}
        profile |= {"ramp_s": _rounded(rng.uniform(10.0, 200.0)), "hold_s": _rounded(hold_s), "decay_s": 200.0}
    tokens = {"input_tokens": float(rng.integers(100, 3000)), "output_tokens": float(rng.integers(20, 300))}
    return {"service": name, "synthetic": profile, "cv": float(rng.choice([1.0, 1.0, 2.0]))} | tokens


# ---- faults ---------------------------------------------------------------------------------------------------------
def _faults(
    rng: np.random.Generator, names: list[str], supply: list[dict[str, Any]], size: Size
) -> list[dict[str, Any]]:
    kinds = sorted(KINDS)
    count = int(rng.integers(LEAST_FAULTS, MOST_FAULTS + 1))
    chosen = rng.choice(len(kinds), size=count, replace=False)
    return [_fault(rng, kinds[index], names, supply, size) for index in sorted(chosen)]


def _taken_over(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Ours is down while its first instances start, and comes back to nodes that it never saw join and another has just
    begun to drain.
    """
    if rng.random() >= TAKEN_OVER:
        return []
    at_s, down_s = _rounded(rng.uniform(5.0, 60.0)), _rounded(rng.uniform(120.0, 600.0))
    whole = {"at_s": at_s, "target": "*", "for_s": down_s}
    notice_s = _rounded(at_s + down_s - rng.uniform(15.0, 45.0))
    return [
        whole | {"kind": "controller_down"},
        whole | {"kind": "second_controller"},
        {"at_s": notice_s, "kind": "reclaim", "target": "*", "value": _rounded(rng.uniform(0.6, 1.0))},
    ]


def _fault(
    rng: np.random.Generator, kind: str, names: list[str], supply: list[dict[str, Any]], size: Size
) -> dict[str, Any]:
    words = {
        "pools": ["*", *sorted({row[key] for row in supply for key in ("id", "zone", "instance_type", "market")})],
        "services": ["*", *names],
        "whole": ["*"],
    }[KINDS[kind].aim]
    at_s = rng.uniform(0.05, 0.8) * size.healed_s
    if rng.random() < AT_ONCE:
        at_s = rng.uniform(0.0, BEGINNING_S) if kind in INSTANT else 0.0
    made: dict[str, Any] = {"at_s": _rounded(at_s), "kind": kind, "target": str(rng.choice(words))}
    if kind not in INSTANT:
        longest_s = size.healed_s - made["at_s"]
        made["for_s"] = _rounded(float(np.exp(rng.uniform(np.log(LEAST_S), np.log(longest_s)))))
    if kind in VALUES:
        least, most = np.log(VALUES[kind])
        sign = -1.0 if kind == "clock_step" and rng.random() < 0.5 else 1.0
        made["value"] = sign * _rounded(float(np.exp(rng.uniform(least, most))))
    elif KINDS[kind].most == 1.0 and not KINDS[kind].value.startswith("without"):
        made["value"] = _rounded(rng.uniform(0.2, 1.0))
    return made


def _rounded(number: float) -> float:
    """Three digits: a scenario is for people to read."""
    return float(f"{number:.3g}")
