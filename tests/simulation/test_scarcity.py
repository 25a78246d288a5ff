"""Named situations, each through the whole loop: observe, learn, decide, check, act, on fakes with semantics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.core.events import RECORD, Planned
from autoscaler.core.model import EngineLoad, Measured, Plan
from autoscaler.core.reasons import ReasonCode
from autoscaler.ports import Transient
from policies.model import PolicySet, Variant
from tests.scene import Scene, offering, service, unit

CHAT = "support/chat"
# One replica of the scene's shape carries 8 / (100 × 28 ms + 8 × 50 ms) × .7 = 1.75 requests per second.
ONE_REPLICA_RPS = 1.75


def codes(plan: Plan, key: str = CHAT) -> set[str]:
    return {reason.code for target in plan.targets if target.service == key for reason in target.reasons}


def test_floor_is_launched_booted_loaded_and_served() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.run(10)
    assert scene.grants() == [("a", 1)]
    scene.run(200)
    assert scene.ready(CHAT) == 1
    assert scene.grants() == [("a", 1)], "idle is a fixed point: nothing more was bought"


def test_load_is_met_by_replicas_in_proportion_and_no_more() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 4.0)
    scene.run(600)
    # 4 rps at the .95 quantile over a Poisson count of one minute is 4.4: three replicas of 1.75.
    assert scene.ready(CHAT) == 3
    assert sum(n for _, n in scene.grants()) == 3


def test_a_refused_launch_is_answered_from_another_pool_in_the_same_tick() -> None:
    scene = Scene([unit(service())], [offering("cheap", 1.0, count=0), offering("dear", 2.0)])
    scene.load(CHAT, 0.0)
    scene.run(10)
    assert scene.refusals() == ["cheap"]
    assert scene.grants() == [("dear", 1)]


def test_memory_of_a_refusal_outranks_price() -> None:
    """ray#53636, ray#39788: the exhausted type is not asked again although it is cheaper."""
    scene = Scene([unit(service())], [offering("cheap", 1.0, count=0), offering("dear", 2.0)])
    scene.load(CHAT, 0.0)
    scene.run(10)
    scene.load(CHAT, 6.0)
    scene.run(10)
    assert scene.refusals() == ["cheap"]
    assert scene.grants()[-1][0] == "dear"


def test_cooldown_grows_while_a_pool_stays_dry() -> None:
    """karpenter#2275: not the same dry offering after each fixed time."""
    scene = Scene([unit(service())], [offering("only", count=0)])
    scene.load(CHAT, 0.0)
    scene.run(3600)
    # 30 s doubling to 15 min, at 50–100 %: a fixed 30 s would make more than 100 calls in an hour.
    assert 6 <= len(scene.refusals()) <= 14
    assert ReasonCode.ONLY_COOLING_LEFT in codes(scene.plans[-1])


def test_a_quota_refusal_is_not_tried_in_every_zone() -> None:
    """autoscaler#4142, skypilot#975: quota is its own class and cools the whole region."""
    from autoscaler.adapters.local_supply import CloudConfig, QuotaConfig, Supply

    pools = [offering("a"), offering("b"), offering("spot", 5.0, market="spot")]
    scene = Scene([unit(service())], pools)
    quota = QuotaConfig(family="g", market="on_demand", gpus=0)
    scene.cloud.supply = Supply(CloudConfig(cluster="c", ray_address="a", offerings=tuple(pools), quotas=(quota,)))
    scene.load(CHAT, 0.0)
    scene.run(10)
    assert scene.refusals() == ["a"]
    assert scene.grants() == [("spot", 1)]


def test_two_pools_that_fail_together_are_asked_once() -> None:
    pools = [offering("a", count=0, pool="p"), offering("b", count=0, pool="p"), offering("c", 3.0)]
    scene = Scene([unit(service())], pools)
    scene.load(CHAT, 0.0)
    scene.run(10)
    assert scene.refusals() == ["a"]
    assert scene.grants() == [("c", 1)]


def test_starting_capacity_is_credited_so_a_long_boot_buys_nothing_twice() -> None:
    """aibrix#2670: replicas counted only when ready go 2→4→8→16."""
    scene = Scene([unit(service())], [offering("a", boot_s=10.0)])
    scene.serving.join_s = 600.0
    scene.load(CHAT, 4.0)
    scene.run(500)
    assert sum(n for _, n in scene.grants()) == 3


def test_starting_capacity_stops_counting_at_its_deadline() -> None:
    """ray#27521, eks-ami#2423: an instance that never joins is given back and replaced, and its pool not blamed."""
    scene = Scene([unit(service())], [offering("stuck", 1.0, count=1, boot_s=10.0), offering("b", 2.0)])
    scene.serving.join_s = 1e9
    scene.load(CHAT, 0.0)
    scene.run(900)
    assert scene.grants() == [("stuck", 1)]
    scene.run(60)
    scene.serving.join_s = 1.0
    scene.run(200)
    assert len(scene.grants()) == 2
    assert scene.ready(CHAT) == 1
    assert any(t.reasons[0].code is ReasonCode.STARTING_EXPIRED for p in scene.plans for t in p.terminates)


def test_three_instances_that_die_at_boot_open_a_breaker_and_their_pool_is_not_blamed() -> None:
    """karpenter-aws#1407: no endless launches of what dies at once; another type is used meanwhile."""
    variants = (Variant(id="l4", instance_type="g6.2xlarge"), Variant(id="a10", instance_type="g5.2xlarge"))
    pools = [offering("ill", 1.0, boot_s=0.0), offering("well", 2.0, instance_type="g5.2xlarge")]
    scene = Scene([unit(service(variants=variants))], pools)
    scene.load(CHAT, 0.0)
    for _ in range(12):
        scene.run(10)
        for machine in scene.cloud.supply.machines.values():
            if machine.offering == "ill" and machine.state != "terminated":
                scene.cloud.supply.ended(machine.instance_id, scene.clock.at_s, "Client.InternalError: bad volume")
    assert [name for name, _ in scene.grants()] == ["ill", "ill", "ill", "well"]
    assert scene.refusals() == []
    scene.run(120)
    assert scene.ready(CHAT) == 1
    (reason,) = [r for p in scene.plans for la in p.launches for r in la.reasons if r.code is ReasonCode.BREAKER_OPEN]
    assert (reason.subject, dict(reason.numbers)["strikes"]) == ("g6.2xlarge", 3.0)


def test_a_granted_instance_that_ends_for_lack_of_capacity_is_a_refusal() -> None:
    scene = Scene([unit(service())], [offering("thin", 1.0, boot_s=0.0), offering("b", 2.0)])
    scene.load(CHAT, 0.0)
    scene.run(10)
    (machine,) = scene.cloud.supply.machines.values()
    scene.cloud.supply.ended(machine.instance_id, scene.clock.at_s, "Server.InsufficientInstanceCapacity: none left")
    scene.run(10)
    assert [name for name, _ in scene.grants()] == ["thin", "b"]
    assert scene.beliefs.offerings["thin"].last_refusal == "Server.InsufficientInstanceCapacity"


def test_falling_load_is_held_then_drained_then_given_back() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 6.0)
    scene.run(600)
    before = len(scene.running())
    scene.load(CHAT, 0.5)
    scene.run(60)
    assert len(scene.running()) == before, "held: the lead to get it back is two minutes"
    scene.run(900)
    assert scene.ready(CHAT) == 1
    assert len(scene.running()) == 1
    order = [type(row).__name__ for p in scene.plans for row in (*p.drains, *p.terminates)]
    assert order.index("Drain") < order.index("Terminate")


def test_a_reclaimed_instance_is_replaced_before_it_is_left() -> None:
    scene = Scene([unit(service())], [offering("spot", 0.4, market="spot"), offering("od", 1.0)])
    scene.load(CHAT, 0.0)
    scene.run(300)
    (victim,) = scene.cloud.supply.machines
    scene.cloud.set_supply("spot", 0)
    scene.cloud.reclaim(victim, 240.0)
    plan = scene.run(10)
    assert [d.instance_id for d in plan.drains] == [victim]
    assert plan.drains[0].deadline_at_s == scene.cloud.supply.machines[victim].reclaim_at_s
    assert scene.grants()[-1] == ("od", 1)
    scene.run(300)
    assert scene.ready(CHAT) == 1
    assert scene.running() == ["od"]


def test_the_target_of_a_leaving_replica_stays_until_a_successor_of_another_variant_is_ready() -> None:
    variants = (Variant(id="l4", instance_type="g6.2xlarge"), Variant(id="a10", instance_type="g5.2xlarge"))
    pools = [offering("spot", 0.4, market="spot"), offering("od", 1.0, instance_type="g5.2xlarge")]
    scene = Scene([unit(service(variants=variants))], pools)
    scene.load(CHAT, 0.0)
    scene.run(300)
    (victim,) = scene.cloud.supply.machines
    scene.cloud.set_supply("spot", 0)
    scene.cloud.reclaim(victim, 300.0)
    served = []
    for _ in range(28):
        scene.run(10)
        served.append(scene.ready(CHAT))
    assert min(served) >= 1, "never without a ready replica between the notice and its deadline"
    assert scene.running() == ["od"]


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
    scene.load(CHAT, 4.0)
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


def test_a_lost_launch_reply_is_settled_by_the_listing_and_not_bought_again() -> None:
    """packer#1367 and its kind: the call took effect, the answer did not arrive."""
    scene = Scene([unit(service())], [offering("a"), offering("b", 2.0)])
    scene.cloud.lose_replies = 1
    scene.load(CHAT, 0.0)
    scene.run(300)
    assert scene.running() == ["a"]
    assert scene.ready(CHAT) == 1


def test_a_call_that_never_took_effect_is_given_up_after_a_minute_and_made_again() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 0.0)
    launch = scene.cloud.launch

    def lost(offering: str, count: int, token: str) -> tuple[str, ...]:
        raise Transient(f"{offering} {count} {token}: connection reset before it was sent")

    scene.cloud.launch = lost  # type: ignore[method-assign]
    scene.run(10)
    scene.cloud.launch = launch  # type: ignore[method-assign]
    scene.run(50)
    assert scene.running() == [], "credited for a minute: it may still be coming"
    scene.run(30)
    assert scene.running() == ["a"]


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


def test_falling_demand_cancels_what_is_still_starting() -> None:
    """dynamo#14251, ray#43034: starting capacity goes first."""
    scene = Scene([unit(service(goal="cost"))], [offering("a", boot_s=290.0)])
    scene.load(CHAT, 0.0)
    scene.run(500)
    scene.load(CHAT, 9.0)
    scene.run(30)
    assert len(scene.running()) > 1
    scene.load(CHAT, 0.2)
    scene.run(270)
    assert len(scene.running()) == 1
    assert scene.ready(CHAT) == 1
    assert any(t.reasons[0].code is ReasonCode.SURPLUS_STARTING for p in scene.plans for t in p.terminates)


def test_a_restart_at_any_moment_continues_where_the_journal_ends() -> None:
    scene = Scene([unit(service())], [offering("a"), offering("b", 2.0)])
    scene.load(CHAT, 4.0)
    for _ in range(40):
        scene.run(10)
        scene.start()
    assert scene.ready(CHAT) == 3
    assert sum(n for _, n in scene.grants()) == 3


def test_a_changed_policy_is_followed_and_an_equal_one_is_not_journalled() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.run(200)
    scene.source.set(PolicySet(units=(unit(service(min_replicas=3)),)))
    scene.run(300)
    assert scene.ready(CHAT) == 3


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


def test_an_unreachable_slo_is_reported_and_not_chased() -> None:
    """dynamo PR#11624: a limit below the hardware's floor neither blocks nor explodes."""
    slow = service()
    slow = slow.model_copy(update={"slo": slow.slo.model_copy(update={"tpot_s": 0.001})})
    scene = Scene([unit(slow)], [offering("a")])
    scene.load(CHAT, 0.4)
    scene.run(600)
    assert ReasonCode.UNREACHABLE_SLO in codes(scene.plans[-1])
    assert scene.ready(CHAT) == 2, "0.61 rps at the quantile, .33 a replica at batch 1"


def test_decide_is_a_function_of_its_arguments() -> None:
    """Every plan of a busy run is made again from the journal alone, byte for byte."""
    from autoscaler.core.decide import decide
    from autoscaler.core.events import PLAN, Observed
    from autoscaler.core.learn import EMPTY, learn

    scene = Scene([unit(service())], [offering("a", count=2), offering("b", 2.0, count=1), offering("c", 3.0)])
    for rps in (0.0, 4.0, 9.0, 1.0):
        scene.load(CHAT, rps)
        scene.run(300)
    beliefs, observation, again = EMPTY, None, 0
    for record in scene.journal.read():
        event = RECORD.validate_json(RECORD.dump_json(record)).event
        if isinstance(event, Planned):
            assert observation is not None
            assert beliefs.policy is not None
            made = decide(observation, beliefs.policy, beliefs, event.at_s, event.plan.id)
            assert PLAN.dump_json(made) == PLAN.dump_json(event.plan)
            again += 1
        if isinstance(event, Observed):
            observation = event.observation
        beliefs = learn(beliefs, event)
    assert again == 120


@pytest.mark.parametrize("market", ["odcr", "block"])
def test_what_is_paid_for_is_filled_first(market: str) -> None:
    scene = Scene([unit(service())], [offering("cheap", 0.5), offering("paid", 9.0, market=market)])
    scene.load(CHAT, 0.0)
    scene.run(10)
    assert scene.grants() == [("paid", 1)]


def test_a_block_near_its_end_is_closed_and_its_replica_moves() -> None:
    """karpenter-aws#8362: no relaunch into an expiring block; work leaves 40 minutes before the end."""
    scene = Scene([unit(service())], [offering("block", 1.0, market="block"), offering("od", 2.0)])
    ends_at_s = scene.clock.at_s + 2400.0 + 600.0
    describe = scene.cloud.describe
    closing = {"block": ends_at_s}

    def with_end(now_s: float):  # type: ignore[no-untyped-def]
        view = describe(now_s)
        return replace(view, offerings=tuple(replace(o, ends_at_s=closing.get(o.offering)) for o in view.offerings))

    scene.cloud.describe = with_end  # type: ignore[method-assign]
    scene.load(CHAT, 0.0)
    scene.run(580)
    assert scene.running() == ["block"]
    scene.run(600)
    assert scene.running() == ["od"]
    assert scene.ready(CHAT) == 1
