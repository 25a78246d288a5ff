"""Who gets the GPUs there are, each situation through the whole loop on fakes with semantics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from autoscaler.core.reasons import ReasonCode
from autoscaler.core.spend import month_left_h
from policies.model import Slo, Variant
from tests.scene import CHAT, Scene, codes, offering, service, unit

BATCH = "lab/batch"


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


def test_when_the_on_demand_one_is_lost_those_on_spot_serve_on_and_it_is_replaced() -> None:
    pools = [offering("spot", 0.3, market="spot"), offering("od", 1.0, count=1)]
    scene = Scene([unit(service(on_demand_floor=1))], pools)
    scene.load(CHAT, 4.0)
    scene.run(600)
    assert scene.running() == ["od", "spot", "spot"]
    scene.cloud.set_supply("od", 0)
    (steady,) = [m for m in scene.cloud.supply.machines.values() if m.offering == "od" and m.state == "running"]
    scene.cloud.reclaim(steady.instance_id, 30.0)
    scene.run(900)
    assert [name for name in scene.running() if name != "od"] == ["spot", "spot"]
    assert not any(drain.instance_id != steady.instance_id for plan in scene.plans for drain in plan.drains)
    scene.cloud.set_supply("od", 1)
    scene.run(2000)
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


# ---- shares: what is lent, and that it comes back --------------------------------------------------------------------
def shared(**over: Any) -> Scene:
    """Chat and a lab's batch work, two GPUs each by right, on four reserved GPUs."""
    chat, batch = service(min_replicas=0), service("batch", priority=10, goal="cost", min_replicas=0)
    units = [unit(chat, quota_gpus=2, **over), unit(batch, name="lab", quota_gpus=2)]
    scene = Scene(units, [offering("paid", count=4, market="odcr")])
    scene.load(CHAT, 0.0)
    scene.load(BATCH, 7.0)
    return scene


def test_idle_gpus_are_lent_and_come_back_when_their_owner_asks() -> None:
    scene = shared()
    scene.load(CHAT, 3.0)
    scene.run(600)
    assert (scene.ready(CHAT), scene.ready(BATCH)) == (2, 2)
    scene.load(CHAT, 0.0)
    scene.run(900)
    assert scene.ready(BATCH) == 4, "what is paid for anyway is used, beyond the unit's share"
    scene.load(CHAT, 3.0)
    scene.run(600)
    assert (scene.ready(CHAT), scene.ready(BATCH)) == (2, 2)


def test_a_unit_that_lends_nothing_or_one_gpu() -> None:
    for lends, beyond in ((False, 0), (1, 1), (True, 2)):
        scene = shared(lends=lends)
        scene.load(CHAT, 3.0)
        scene.run(600)
        scene.load(CHAT, 0.0)
        scene.run(900)
        assert scene.wanted(BATCH) == 2 + beyond
        if lends is not True:
            assert ReasonCode.QUOTA_GPUS in codes(scene.plans[-1], BATCH)


def test_nobody_buys_beyond_its_share() -> None:
    """A loan says who uses what is there; the bill of the company stays what its shares allow."""
    chat, batch = service(min_replicas=0), service("batch", priority=10, goal="cost", min_replicas=0)
    scene = Scene([unit(chat, quota_gpus=4), unit(batch, name="lab", quota_gpus=1)], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.load(BATCH, 7.0)
    scene.run(600)
    assert scene.running() == ["a"]


def test_a_borrower_takes_nothing_from_who_lives_within_its_share() -> None:
    scene = shared(borrows=True)
    scene.load(CHAT, 12.0)
    scene.run(900)
    assert (scene.ready(CHAT), scene.ready(BATCH)) == (2, 2), "chat is more important, but over its share"


def test_a_full_quota_goes_to_the_more_important_not_to_who_came_first() -> None:
    """llm-d#1447: a full budget freezes by arrival order."""
    small, large = (Variant(id="l4", instance_type="g6.2xlarge"),), (Variant(id="l40s", instance_type="g6e.2xlarge"),)
    chat, batch = service(min_replicas=0, variants=small), service("batch", priority=10, min_replicas=0, variants=large)
    pools = [offering("a"), offering("b", instance_type="g6e.2xlarge")]
    scene = Scene([unit(chat, batch, quota_gpus=3)], pools)
    scene.load(CHAT, 0.0)
    scene.load("support/batch", 6.0)
    scene.run(600)
    assert scene.wanted("support/batch") == 3
    scene.load(CHAT, 3.0)
    scene.run(720)  # the trend of the step asks for a third, which is held for a while
    assert (scene.ready(CHAT), scene.ready("support/batch")) == (2, 1), "the fewest that make room, on another type"
    assert any(ReasonCode.PREEMPTED in codes(plan, "support/batch") for plan in scene.plans)


def test_within_a_full_quota_places_change_hands_and_nothing_is_bought() -> None:
    """A replica that loads on an instance of ours is there a boot sooner than one that is launched."""
    batch = service("batch", priority=10, min_replicas=0)
    scene = Scene([unit(service(min_replicas=0), batch, quota_gpus=3)], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.load("support/batch", 6.0)
    scene.run(600)
    assert (scene.wanted(CHAT), scene.wanted("support/batch")) == (0, 3)
    scene.load(CHAT, 3.0)
    scene.run(240)
    assert scene.ready(CHAT) >= 2
    assert scene.grants() == [("a", 3)]
    assert not any(plan.drains or plan.terminates for plan in scene.plans)


def test_equals_share_a_shortage_by_what_each_was_promised() -> None:
    a, b = (service(name, priority=500, min_replicas=0, slo=Slo(ttft_s=2.0, fraction=0.9)) for name in "ab")
    scene = Scene([unit(a, b)], [offering("a", count=4)])
    scene.load("support/a", 6.0)
    scene.load("support/b", 0.0)
    scene.run(600)
    assert scene.wanted("support/a") == 4
    scene.load("support/b", 6.0)
    scene.run(600)
    assert (scene.ready("support/a"), scene.ready("support/b")) == (2, 2)
    moves = sum(e.verb == "drain" for e in scene.events if hasattr(e, "verb"))
    scene.run(600)
    assert sum(e.verb == "drain" for e in scene.events if hasattr(e, "verb")) == moves, "and nothing moves back"


# ---- money -----------------------------------------------------------------------------------------------------------
def test_the_month_is_paced_and_only_floors_may_exceed_it() -> None:
    """720 hours or so: 1.5 replicas of a dollar an hour are within the budget all the time, a third never is."""
    scene = Scene([unit(service(min_replicas=1), budget_usd_per_month=1600.0)], [offering("a", 1.0)])
    scene.load(CHAT, 9.0)
    scene.run(600)
    hours = month_left_h(scene.clock.now_s())
    affordable = max(1, int(1600.0 / hours))
    assert scene.ready(CHAT) == affordable
    assert ReasonCode.BUDGET_MONTH in codes(scene.plans[-1])
    assert scene.beliefs.spent["support"].usd < 1600.0


def test_a_floor_is_kept_even_without_a_cent_left() -> None:
    scene = Scene([unit(service(min_replicas=2), budget_usd_per_month=0.01)], [offering("a", 1.0)])
    scene.load(CHAT, 9.0)
    scene.run(600)
    assert scene.ready(CHAT) == 2


# ---- smaller variants ------------------------------------------------------------------------------------------------
BOTH = (Variant(id="l40s", instance_type="g6e.2xlarge"), Variant(id="l4", instance_type="g6.2xlarge"))


def by_variant(scene: Scene) -> dict[str, int]:
    view = scene.serving.observe(scene.clock.now_s())
    return dict(Counter(r.variant for r in view.replicas if r.state == "ready"))


def test_without_the_word_every_variant_is_as_good_and_the_cheapest_is_taken() -> None:
    scene = Scene([unit(service(variants=BOTH))], [offering("big", 3.0, instance_type="g6e.2xlarge"), offering("a")])
    scene.load(CHAT, 3.0)
    scene.run(300)
    assert by_variant(scene) == {"l4": 2}


def test_a_smaller_variant_stands_in_while_the_better_cannot_be_had_and_goes_again() -> None:
    chat = service(variants=BOTH, sacrifice=("smaller_variant", "queue", "shed"))
    pools = [offering("big", 3.0, count=1, instance_type="g6e.2xlarge"), offering("a")]
    scene = Scene([unit(chat)], pools)
    scene.load(CHAT, 3.0)
    scene.run(300)
    assert by_variant(scene) == {"l40s": 1, "l4": 1}
    assert ReasonCode.SMALLER_VARIANT in codes(scene.plans[-1])
    scene.cloud.supply.set_supply("big", 8)
    scene.run(1800)
    assert by_variant(scene) == {"l40s": 2}
    assert scene.running() == ["big", "big"]


def test_where_the_queue_comes_first_requests_wait_for_the_better_variant_as_long_as_they_may() -> None:
    chat = service(variants=BOTH, sacrifice=("queue", "smaller_variant", "shed"))
    scene = Scene([unit(chat)], [offering("big", 3.0, count=1, instance_type="g6e.2xlarge"), offering("a")])
    scene.load(CHAT, 3.0)
    scene.run(240)
    assert "l4" not in by_variant(scene), "big is asked again in 30 s, in time for the queue"
    scene.run(1800)
    assert by_variant(scene)["l4"] >= 1, "it is dry for longer than a request may wait"


def test_requests_that_may_wait_long_do_not_wait_for_a_pool_that_has_been_dry_for_longer() -> None:
    """Found by qm chaos: asked again within the quarter of an hour, and refused every time, it always seemed near."""
    chat = service(
        goal="cost", slo=Slo(deadline_s=3600.0), min_replicas=2, variants=BOTH, sacrifice=("queue", "smaller_variant")
    )
    scene = Scene([unit(chat)], [offering("big", 3.0, count=1, instance_type="g6e.2xlarge"), offering("a")])
    scene.load(CHAT, 3.0)
    scene.run(1800)
    assert "l4" not in by_variant(scene)
    scene.run(3600)
    assert by_variant(scene) == {"l40s": 1, "l4": 1}
