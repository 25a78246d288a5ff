"""Ray's own ResourceDemandScheduler and the peer's layer launch the same nodes for the same missing replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil

from chaos.peers.facts import facts_of
from chaos.peers.layers import RAY_RECOVERY_S, RayV2
from chaos.peers.packing import Fleet, Want
from tests.peer_scene import Json, offering, row, scenario, service, shape, view

NOW_S = 5000.0
SIZES = {"one": 1, "two": 2, "four": 4, "eight": 8}  # GPUs of a node type


Table = dict[str, float]


def rays_launches(demand: dict[int, int], most: dict[str, int], prices: Table, scores: Table) -> Any:
    order = sorted(SIZES, key=lambda name: -prices[name] / SIZES[name])
    types = {
        name: NodeTypeConfig(
            name=name,
            min_worker_nodes=0,
            max_worker_nodes=most[name],
            resources={"GPU": float(SIZES[name])},
            priority=order.index(name),
        )
        for name in SIZES
    }
    requests = [ResourceRequestUtil.make({"GPU": float(gpus)}) for gpus, count in demand.items() for _ in range(count)]
    reply = ResourceDemandScheduler(event_logger=None).schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=types,
            resource_requests=ResourceRequestUtil.group_by_count(requests),
            recoverable_resource_availabilities=scores,
        )
    )
    return {launch.instance_type: launch.count for launch in reply.to_launch}


def our_launches(demand: dict[int, int], most: dict[str, int], prices: Table, scores: Table) -> Any:
    services = [service(f"s{gpus}", priority=gpus, markets=["interruptible"]) for gpus in demand]
    shapes = [
        shape(name, name, key=f"unit/s{gpus}", gpus=gpus, instance_gpus=SIZES[name])
        for gpus in demand
        for name in SIZES
        if SIZES[name] >= gpus
    ]
    supply = [offering(name, "interruptible", name, count=most[name]) for name in SIZES]
    told: Json = scenario(services=services, shapes=shapes, supply=supply)
    failed = {name: NOW_S - RAY_RECOVERY_S * score for name, score in scores.items()}
    rows = {name: row(prices[name], refused_at_s=failed.get(name)) for name in SIZES}
    facts = facts_of(told)
    wants = [Want(entry, entry.shapes, demand[entry.priority]) for entry in facts.services]
    return RayV2(facts).place(NOW_S, Fleet(facts, view({}, rows)), wants)["instances"]


def cases(count: int) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng([11, 5])
    found = []
    for _ in range(count):
        demand = {gpus: int(rng.integers(1, 14)) for gpus in (1, 2, 4, 8) if rng.random() < 0.5} or {1: 3}
        most = {name: int(rng.integers(1, 12)) for name in SIZES}
        scores = {name: float(rng.choice([0.1, 0.25, 0.5, 0.75])) for name in SIZES if rng.random() < 0.5}
        prices = {name: round(float(rng.uniform(1.0, 4.0)) * gpus, 3) for name, gpus in SIZES.items()}
        found.append((demand, most, prices, scores))
    return found


@pytest.mark.parametrize("case", cases(80))
def test_launches_are_those_of_rays_scheduler(case: tuple[Any, ...]) -> None:
    assert our_launches(*case) == rays_launches(*case)
