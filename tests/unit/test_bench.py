"""The tick benchmark drives the real loop: its cluster is seen whole and acted on, and its figures are its ticks."""

from __future__ import annotations

import random

from autoscaler.act import Inline
from autoscaler.adapters.journal import MemoryJournal
from autoscaler.loop import Controller
from chaos.bench import Size, _World, bench_tick


def test_figures_are_ordered_and_of_the_size_asked_for() -> None:
    figures = bench_tick(Size(services=6, nodes=10, replicas_per_service=4), ticks=5)
    assert 0.0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert (figures["ticks"], figures["replicas"]) == (5.0, 24.0)


def test_the_generated_cluster_is_one_the_controller_believes() -> None:
    world = _World(Size(services=6, nodes=10, replicas_per_service=4), random.Random(1))
    controller = Controller(
        clock=world,
        metrics=world,
        serving=world,
        cloud=world,
        journal=MemoryJournal(),
        policy_source=world,
        executor=Inline(),
    )
    plan = controller.tick()
    assert plan is not None
    assert sum(route.ready for route in plan.routes) == 24
    assert len(controller.ledger.beliefs.instances) == 10
    assert sum(target.replicas for target in plan.targets) > 0
    assert world.published_bytes > 1000
