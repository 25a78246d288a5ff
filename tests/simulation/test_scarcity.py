"""Acquiring and giving back, each situation through the whole loop on fakes with semantics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.core.events import RECORD, Planned
from autoscaler.core.reasons import ReasonCode
from autoscaler.ports import Transient
from policies.model import PolicySet, Variant
from tests.scene import CHAT, Scene, codes, offering, service, unit


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
    # 30 s doubling to 15 min, at 50–100 %, and while somebody waits a probe whenever one in ten such outages would have
    # ended since the last: a fixed 30 s would make more than 100 calls in an hour.
    assert 6 <= len(scene.refusals()) <= 16
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


def test_work_returns_to_a_reservation_that_has_room_again_and_is_never_without_a_replica() -> None:
    """kubernetes-on-aws#11623: a paid reservation does not idle while on-demand runs; make before break."""
    scene = Scene([unit(service())], [offering("paid", 9.0, market="odcr", count=0), offering("od", 1.0)])
    scene.load(CHAT, 0.0)
    scene.run(300)
    assert scene.running() == ["od"]
    scene.cloud.set_supply("paid", 1)
    for _ in range(120):
        scene.run(10)
        assert scene.ready(CHAT) >= 1
    assert scene.running() == ["paid"]


def test_the_move_to_what_is_paid_for_ends_although_there_is_room_where_it_began() -> None:
    """Serve packs a successor beside what serves: the old instance is drained all the same, and none is lost."""
    paid = offering("paid", 9.0, market="odcr", count=0, gpus=4)
    scene = Scene([unit(service())], [paid, offering("od", 1.0, gpus=4)])
    scene.load(CHAT, 0.0)
    scene.run(300)
    scene.cloud.set_supply("paid", 1)
    for _ in range(60):
        scene.run(10)
        assert scene.ready(CHAT) >= 1
    assert scene.running() == ["paid"]
    assert scene.grants() == [("od", 1), ("paid", 1)]


def test_a_block_near_its_end_is_closed_and_its_replica_moves() -> None:
    """karpenter-aws#8362: no relaunch into an expiring block; the successor is ready 40 minutes before the end."""
    scene = Scene([unit(service())], [offering("block", 1.0, market="block"), offering("od", 2.0)])
    ends_at_s = scene.clock.at_s + 2400.0 + 600.0
    describe = scene.cloud.describe
    closing = {"block": ends_at_s}

    def with_end(now_s: float):  # type: ignore[no-untyped-def]
        view = describe(now_s)
        return replace(view, offerings=tuple(replace(o, ends_at_s=closing.get(o.offering)) for o in view.offerings))

    scene.cloud.describe = with_end  # type: ignore[method-assign]
    scene.load(CHAT, 0.0)
    scene.run(420)  # boot and load are two minutes, two and three quarters at the 90th percentile before any was seen
    assert scene.running() == ["block"]
    for _ in range(18):
        scene.run(10)
        assert scene.ready(CHAT) >= 1
    assert scene.clock.at_s == ends_at_s - 2400.0
    assert scene.running() == ["od"], "the successor serves, the block's instance has ended its work"
    scene.run(10)
    assert scene.grants() == [("block", 1), ("od", 1)]
    assert scene.ready(CHAT) == 1
