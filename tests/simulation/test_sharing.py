"""Who gets the GPUs there are, each situation through the whole loop on fakes with semantics."""

from __future__ import annotations

from autoscaler.core.reasons import ReasonCode
from policies.model import Variant
from tests.scene import CHAT, Scene, codes, offering, service, unit


def test_low_priority_is_never_left_pending_beside_high() -> None:
    chat, batch = service(), service("batch", priority=10, goal="cost", min_replicas=3)
    scene = Scene([unit(chat, batch)], [offering("a", count=2)])
    scene.load(CHAT, 0.0)
    scene.load("support/batch", 0.0)
    scene.run(300)
    assert scene.ready(CHAT) == 1
    assert scene.ready("support/batch") == 1
    assert sum(t.replicas for t in scene.plans[-1].targets) == 2, "targets are capped to what can be placed"
    assert scene.plans[-1].shortfalls[0].service == "support/batch"
    assert scene.plans[-1].shortfalls[0].replicas == 2


def test_the_critical_service_takes_the_place_of_the_least_important_when_nothing_can_be_bought() -> None:
    chat, batch = service(), service("batch", priority=10, goal="cost", min_replicas=2)
    scene = Scene([unit(chat, batch)], [offering("a", count=3)])
    scene.load(CHAT, 0.0)
    scene.load("support/batch", 0.0)
    scene.run(300)
    assert (scene.ready(CHAT), scene.ready("support/batch")) == (1, 2)
    scene.load(CHAT, 4.0)
    scene.run(300)
    assert (scene.ready(CHAT), scene.ready("support/batch")) == (3, 0)
    assert any(ReasonCode.PREEMPTED in codes(plan, "support/batch") for plan in scene.plans)


def test_quota_of_the_unit_is_a_hard_cap_and_the_plan_partial() -> None:
    """dynamo#8583: a plan above the cap is trimmed, not stuck."""
    scene = Scene([unit(service(), quota_gpus=2)], [offering("a")])
    scene.load(CHAT, 9.0)
    scene.run(600)
    assert scene.ready(CHAT) == 2
    assert ReasonCode.QUOTA_GPUS in codes(scene.plans[-1])


def test_budget_of_the_unit_is_kept() -> None:
    scene = Scene([unit(service(), budget_usd_per_h=2.5)], [offering("a", 1.0)])
    scene.load(CHAT, 9.0)
    scene.run(600)
    assert scene.ready(CHAT) == 2
    assert ReasonCode.BUDGET in codes(scene.plans[-1])


def test_on_demand_floor_is_met_before_spot_is_used() -> None:
    """ray#58491: keep N on-demand."""
    scene = Scene([unit(service(on_demand_floor=1))], [offering("spot", 0.3, market="spot"), offering("od", 1.0)])
    scene.load(CHAT, 4.0)
    scene.run(600)
    assert scene.running() == ["od", "spot", "spot"]


def test_replicas_of_two_services_share_an_instance() -> None:
    four = offering("quad", 4.0, instance_type="g6.12xlarge", gpus=4)
    variant = (Variant(id="quad", instance_type="g6.12xlarge"),)
    services = [service("a", variants=variant), service("b", variants=variant, priority=10)]
    scene = Scene([unit(*services)], [four])
    scene.load("support/a", 0.0)
    scene.load("support/b", 0.0)
    scene.run(300)
    assert scene.running() == ["quad"]
    assert (scene.ready("support/a"), scene.ready("support/b")) == (1, 1)


def test_tp_does_not_span_instances() -> None:
    two = offering("pair", 2.0, instance_type="g6.12xlarge", gpus=4)
    variant = (Variant(id="tp3", instance_type="g6.12xlarge", tp=3),)
    scene = Scene([unit(service(variants=variant, min_replicas=2))], [two])
    scene.load(CHAT, 0.0)
    scene.run(300)
    assert scene.running() == ["pair", "pair"]
