"""Complaints about how other autoscalers decide, each through the whole loop: what this one does instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.adapters.policy_folder import PolicyFolder, read_policy
from autoscaler.core.reasons import ReasonCode
from autoscaler.ports import Broken, Policy
from policies.load import PolicyProblems, load
from policies.model import PolicySet, Variant
from tests.calibration_rig import scaled
from tests.scene import CHAT, TIMING, Scene, codes, offering, service, unit
from tests.simulation.test_learning import reason, telling

BATCH, BULK = "support/batch", "support/bulk"
GOOD = """\
unit: support
owner: a@example.com
budget_usd_per_h: 20
services:
  - name: chat
    model: Qwen/Qwen3-8B
    goal: cost
    variants: [{id: v1, instance_type: g6.2xlarge}]
"""


@pytest.mark.parametrize("key", ["downscale_delay_s", "upscale_delay_s", "look_back_period_s"])
def test_a_delay_shorter_than_the_look_back_cannot_be_written(key: str, tmp_path: Path) -> None:
    """ray#26455: such a pair thrashes. Delays follow from measured leads; a policy that names one is refused."""
    (tmp_path / "a.yaml").write_text(GOOD + f"    {key}: 1\n")
    with pytest.raises(PolicyProblems, match=rf"a.yaml:9: services\[chat\].{key}: is not a known key"):
        load(tmp_path)


@pytest.mark.parametrize("goal", ["latency", "throughput", "cost"])
def test_a_load_that_comes_and_goes_every_minute_does_not_thrash(goal: str) -> None:
    """ray#26455: a hold is a lull and a look-back, so that what comes back within half a lead finds its capacity."""
    scene = Scene([unit(service(goal=goal))], [offering("a")])
    for minute in range(60):
        scene.load(CHAT, 6.0 if minute % 2 else 0.5)
        scene.run(60)
    late = scene.plans[len(scene.plans) // 3 :]
    assert not any(plan.launches or plan.drains for plan in late)


@pytest.mark.parametrize("tick_s", [2.0, 10.0, 30.0])
def test_delays_are_seconds_and_not_turns_of_the_loop(tick_s: float) -> None:
    """ray#62004: a loop that is three times slower holds as long, not three times as long."""
    scene = Scene([unit(service())], [offering("a")])

    def run(for_s: float) -> None:
        for _ in range(round(for_s / tick_s)):
            assert scene.controller.tick() is not None
            scene.clock.advance(tick_s)

    scene.load(CHAT, 6.0)
    run(1800.0)
    assert len(scene.running()) == 4
    scene.load(CHAT, 0.0)
    fell_at_s = scene.clock.at_s
    while len(scene.running()) == 4:
        run(tick_s)
    # One and a half leads of some 120 s, after a minute in which the level falls; and at most two ticks more.
    assert 180.0 <= scene.clock.at_s - fell_at_s <= 480.0


def test_a_fleet_without_load_stays_as_it_is_for_a_day() -> None:
    """llm-d#380: one more replica every loop, without any load."""
    scene = Scene([unit(service(min_replicas=2))], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.run(600)
    settled = scene.plans[-1].targets
    for _ in range(24):
        scene.run(10)
        scene.clock.advance(3590.0)
    assert scene.plans[-1].targets[0].replicas == settled[0].replicas == 2
    assert scene.grants() == [("a", 2)]
    assert not any(plan.drains or plan.terminates for plan in scene.plans)


@pytest.mark.parametrize("word", ["budget_usd_per_hour", "gpu_budget", "max_gpu_budget"])
def test_a_budget_under_a_name_that_nobody_reads_is_refused_and_the_old_one_stays(word: str, tmp_path: Path) -> None:
    """dynamo#11220: a renamed key switched the budget off, silently."""
    file = tmp_path / "a.yaml"
    file.write_text(GOOD)
    folder = PolicyFolder(tmp_path, lambda found: read_policy(found, "sim"))
    first = folder.poll(0.0)
    assert isinstance(first, Policy)
    assert first.policy.units[0].budget_usd_per_h == 20.0
    file.write_text(GOOD.replace("budget_usd_per_h", word))
    broken = folder.poll(60.0)
    assert isinstance(broken, Broken), "a policy in force is never replaced by one that says less"
    assert f"a.yaml:3: {word}" in " ".join(broken.problems)


def test_what_a_cold_engine_measures_changes_no_estimate() -> None:
    """dynamo#12430: the first windows of a new replica, five times slower, cut what all were thought to carry."""
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 1.0)
    while scene.ready(CHAT) < 1:
        scene.run(10)
    cold = scaled(TIMING, decode_base=5.0, batch_slope=5.0)
    for _ in range(5):
        scene.metrics.engine_loads = telling(scene, cold)
        scene.run(10)
    assert ReasonCode.CALIBRATED not in codes(scene.plans[-1])
    for _ in range(60):
        scene.metrics.engine_loads = telling(scene, TIMING)
        scene.run(10)
    learnt = dict(reason(scene.plans[-1], ReasonCode.CALIBRATED).numbers)
    assert learnt["decode_base"] == pytest.approx(1.0, rel=0.05)


def test_the_fewest_give_way_and_what_they_leave_is_kept_for_whom_they_left() -> None:
    """kueue#10131, #13797: random victims, and a freed quota that another took, so that more had to go."""
    small, large = (Variant(id="l4", instance_type="g6.2xlarge"),), (Variant(id="l40s", instance_type="g6e.2xlarge"),)
    batch = service("batch", priority=20, min_replicas=0, variants=small)
    bulk = service("bulk", priority=10, min_replicas=0, variants=small)
    dear = offering("b", instance_type="g6e.2xlarge", boot_s=200.0)
    scene = Scene([unit(service(min_replicas=0, variants=large), batch, bulk, quota_gpus=6)], [offering("a"), dear])
    scene.load(CHAT, 0.0)
    scene.load(BATCH, 4.0)
    scene.load(BULK, 4.0)
    scene.run(900)
    assert (scene.wanted(CHAT), scene.wanted(BATCH), scene.wanted(BULK)) == (0, 3, 3)
    scene.source.set(PolicySet(units=(unit(service(min_replicas=2, variants=large), batch, bulk, quota_gpus=6),)))
    scene.load(BULK, 6.0)  # who gives way asks for more while the claimant still boots
    for _ in range(90):
        scene.run(10)
        assert (scene.wanted(CHAT), scene.wanted(BATCH), scene.wanted(BULK)) == (2, 3, 1)
    assert (scene.ready(CHAT), scene.ready(BATCH), scene.ready(BULK)) == (2, 3, 1)
    assert sum(count for name, count in scene.grants() if name == "a") == 6, "what was freed was not bought again"
