"""A small scenario and a view of it, as peers get them: hand-made, so that a test states every figure it needs."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def service(name: str = "chat", **keys: Any) -> Json:
    """One entry of a policy, as the scenario's dump has it."""
    return {
        "name": name,
        "goal": "latency",
        "priority": 100,
        "slo": {"ttft_s": 2.0, "tpot_s": 0.1, "fraction": 0.95},
        "min_replicas": 1,
        "max_replicas": 100,
        "scale_to_zero": False,
        "markets": ["odcr", "block", "spot", "on_demand"],
        "zones": [],
        "instance_types": [],
        **keys,
    }


def law(step_s: float, kv_capacity_tokens: int = 100_000) -> Json:
    """A step that takes `step_s` whatever the batch, and prefill that takes nothing."""
    timing = {"a_s": step_s, "b_s_per_seq": 0.0, "c_s_per_ktoken": 0.0, "prefill_tps": 1e18}
    return {**timing, "kv_capacity_tokens": kv_capacity_tokens}


def shape(variant: str = "a", instance_type: str = "big", key: str = "unit/chat", **keys: Any) -> Json:
    """One engine shape: a replica takes one GPU of eight and carries 2 requests per second, which is 10 in flight."""
    return {
        "service": key,
        "variant": variant,
        "instance_type": instance_type,
        "gpus": 1,
        "nodes": 1,
        "instance_gpus": 8,
        "capacity_rps": 2.0,
        "max_batch": 20,
        "input_tokens": 1000.0,
        "output_tokens": 200.0,
        "timing": law(0.025),  # 2 requests per second × 200 tokens × 0.025 s = 10 in flight
        "load_prior_s": 60.0,
        "boot_prior_s": 120.0,
        **keys,
    }


def offering(place: str, market: str = "on_demand", instance_type: str = "big", **keys: Any) -> Json:
    """One row of supply."""
    return {"id": place, "instance_type": instance_type, "zone": "z1", "market": market, "count": 100, **keys}


def scenario(
    services: list[Json] | None = None,
    shapes: list[Json] | None = None,
    supply: list[Json] | None = None,
    **keys: Any,
) -> Json:
    """What `attr(scenario)` is given. One unit named ``unit``."""
    return {
        "policies": [{"unit": "unit", "services": services or [service()]}],
        "shapes": shapes or [shape()],
        "supply": supply or [offering("od")],
        "duration_s": 3600.0,
        "tick_s": 10.0,
        **keys,
    }


def row(price: float = 10.0, ready: int = 0, starting: int = 0, refused_at_s: float | None = None) -> Json:
    """One offering of a view."""
    refusal = None if refused_at_s is None else {"at_s": refused_at_s, "class": "no_capacity"}
    return {
        "ready": ready,
        "starting": starting,
        "draining": 0,
        "price_usd_per_h": price,
        "last_refusal": refusal,
        "ends_at_s": None,
    }


def load(rps: float | None = 0.0, queued: float | None = 0.0, running: float | None = 0.0, **keys: Any) -> Json:
    """One service of a view, 1000 tokens in and 200 out a request unless said otherwise."""
    rate = (
        {"prefill_tps": None, "decode_tps": None}
        if rps is None
        else {"prefill_tps": 1000 * rps, "decode_tps": 200 * rps}
    )
    return {"arrival_rps": rps, **rate, "queued": queued, "running": running, **keys}


def replicas(place: str, count: int, state: str = "ready", variant: str = "a", key: str = "unit/chat") -> list[Json]:
    """`count` replicas of a view."""
    return [{"service": key, "variant": variant, "offering": place, "state": state, "since_s": 0.0}] * count


def view(services: dict[str, Json], offerings: dict[str, Json], places: list[Json] | None = None) -> Json:
    """What `decide` is given."""
    return {"services": services, "offerings": offerings, "replicas": places or []}
