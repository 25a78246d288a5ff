"""Deciding on what is seen, and holding still without it: through the whole loop on fakes with semantics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.core.beliefs import Beliefs
from autoscaler.core.decide import decide
from autoscaler.core.events import Observed
from autoscaler.core.model import EngineLoad, Measured
from autoscaler.core.reasons import ReasonCode
from autoscaler.ports import Transient
from policies.model import PolicySet
from tests.scene import CHAT, INPUT_TOKENS, Scene, codes, offering, service, unit


def test_blind_metrics_hold_every_replica() -> None:
    """dynamo PR#14575, keda#3064: a metrics outage is not silence."""
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 6.0)
    scene.run(600)
    before = scene.ready(CHAT)
    scene.metrics.set_missing(CHAT)
    scene.run(3600)
    assert scene.ready(CHAT) == before
    assert any(r.code is ReasonCode.METRICS_MISSING for d in scene.plans[-1].demands for r in d.reasons)


def test_a_metrics_port_that_raises_is_blindness_too() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 6.0)
    scene.run(600)
    before = scene.ready(CHAT)
    scene.metrics.failures = [Transient("no board") for _ in range(360)]
    scene.run(3600)
    assert scene.ready(CHAT) == before


def engine(replica_id: str, kv_fraction: float) -> EngineLoad:
    seen = Measured(value=kv_fraction, at_s=0.0)
    return EngineLoad(replica_id=replica_id, running=seen, waiting=seen, kv_fraction=seen)


def test_a_kv_cache_fuller_than_planned_for_asks_for_more_before_latency_breaks() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 4.9)
    scene.run(600)
    assert scene.wanted(CHAT) == 3
    view = scene.serving.observe(scene.clock.now_s())
    scene.metrics.engine_loads = [engine(view.replicas[0].replica_id, 0.96), engine(view.replicas[1].replica_id, 0.2)]
    plan = scene.run(10)
    assert scene.wanted(CHAT) == 4
    (reason,) = [r for r in plan.demands[0].reasons if r.code is ReasonCode.KV_PRESSURE]
    figures = dict(reason.numbers)
    assert figures["kv_fraction"] == 0.96
    assert figures["limit"] == 0.8
    assert figures["extra_rps"] == pytest.approx(plan.demands[0].unheld_rps / 1.2 * 0.2)


def test_the_metrics_of_a_replica_that_is_gone_decide_nothing() -> None:
    """llm-d PR#385: Ray exports a dead engine's last values for minutes."""
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 4.0)
    scene.run(600)
    scene.metrics.engine_loads = [engine("ghost", 1.0)]
    scene.run(60)
    assert scene.wanted(CHAT) == 3
    assert scene.beliefs.services[CHAT].kv_fraction is None


def test_idle_scales_down() -> None:
    """dynamo#6985: idle is seen, and is not missing."""
    scene = Scene([unit(service(min_replicas=0, scale_to_zero=True))], [offering("a")])
    scene.load(CHAT, 6.0)
    scene.run(600)
    assert scene.ready(CHAT) > 1
    scene.load(CHAT, 0.0)
    scene.run(1200)
    assert scene.running() == []


def test_without_a_view_of_the_cluster_nothing_is_done_and_targets_stay() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 4.0)
    scene.run(600)
    before = {(t.variant, t.replicas) for t in scene.plans[-1].targets}
    scene.serving.failures = [Transient("dashboard gone")]
    plan = scene.run(10)
    assert (plan.launches, plan.drains, plan.terminates) == ((), (), ())
    assert {(t.variant, t.replicas) for t in plan.targets} == before
    assert codes(plan) == {ReasonCode.BLIND}


def test_noise_of_five_percent_changes_nothing() -> None:
    """llm-d#1427."""
    scene = Scene([unit(service())], [offering("a")])
    for step in range(120):
        scene.load(CHAT, 4.0 * (1.05 if step % 2 else 0.95))
        scene.run(10)
    targets = {sum(t.replicas for t in plan.targets) for plan in scene.plans[60:]}
    assert targets == {3}
    assert not any(plan.launches or plan.drains for plan in scene.plans[60:])


def test_nothing_is_amplified_from_zero() -> None:
    """ray PR#61731."""
    scene = Scene([unit(service(min_replicas=0, scale_to_zero=True))], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.run(600)
    assert scene.grants() == []
    assert all(t.wanted == 0 for plan in scene.plans for t in plan.targets)


def test_a_service_that_left_the_policy_is_not_repeated_while_blind() -> None:
    scene = Scene([unit(service(), service("old", priority=1))], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.load("support/old", 0.0)
    scene.run(200)
    scene.source.set(PolicySet(units=(unit(service(max_replicas=2)),)))
    scene.serving.failures = [Transient("dashboard gone")]
    plan = scene.run(10)
    assert {target.service for target in plan.targets} == {CHAT}
    assert scene.serving.published[-1].targets == {"support.chat.l4": 1}


def test_longer_contexts_that_are_forecast_take_capacity_before_they_come() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 4.0)
    scene.run(600)
    seen = next(e.observation for e in reversed(scene.events) if isinstance(e, Observed))
    known = scene.beliefs
    longer = replace(known.forecasts[CHAT], input_tokens=10 * INPUT_TOKENS)
    shift = replace(known, forecasts={CHAT: longer})

    def planned(beliefs: Beliefs) -> tuple[float, int]:
        plan = decide(seen, scene.policy, beliefs, seen.at_s, "p/1")
        return plan.routes[0].capacity_rps_per_replica, sum(target.wanted for target in plan.targets)

    (rps, replicas), (rps_then, replicas_then) = planned(known), planned(shift)
    assert rps_then < 0.8 * rps
    assert replicas_then > replicas
