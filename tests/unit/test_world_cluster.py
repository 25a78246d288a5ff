"""Serve in the simulated world: where replicas go, which are stopped, what a drain and a lost node do."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.ports import NotFound
from chaos.world.world import World
from serve_apps.wire import LocalRule, PlanMessage
from tests.worlds import APP, BIG, BOOT_S, CHAT, LOAD_S, TYPE, demand, fault, row, service, states, unit, world

READY_S = BOOT_S + LOAD_S


def target(made: World, count: int, app: str = APP, offering: str = "") -> None:
    made.cluster.set_targets({(app, offering): count})


def settled(made: World, instances: int, replicas: int, offering: str = "od") -> list[str]:
    """So many instances joined and replicas ready; the instances' ids."""
    ids = made.cloud.launch(offering, instances, f"t{made.timeline.now_s}")
    target(made, replicas)
    made.run_until(made.timeline.now_s + READY_S)
    return list(ids)


def where(made: World) -> dict[str, str]:
    """Instance of each replica that has one."""
    return {r.name: r.nodes[0].machine.instance for r in made.cluster.replicas() if r.nodes}


def test_replicas_wait_for_a_node_then_load_then_serve() -> None:
    made = world(rps=0.0)
    target(made, 2)
    assert states(made) == ["pending", "pending"]
    made.cloud.launch("od", 1, "t")
    made.run_until(BOOT_S)
    assert states(made) == ["loading", "pending"]
    made.run_until(READY_S)
    assert states(made) == ["pending", "ready"]
    (replica,) = [r for r in made.cluster.replicas() if r.state == "ready"]
    assert replica.since_s == BOOT_S


def test_small_replicas_fill_the_fullest_node_that_has_room() -> None:
    variants = [{"id": "l40s", "instance_type": BIG}]
    made = world(row("od", instance_type=BIG), policies=[unit(service(variants=variants))], rps=0.0)
    (old,) = settled(made, 1, 2)
    made.cloud.launch("od", 1, "more")
    made.run_until(2 * READY_S)
    target(made, 4)
    made.run_until(3 * READY_S)
    assert list(where(made).values()) == [old] * 4
    target(made, 5)
    assert len(set(where(made).values())) == 2


def test_several_services_share_the_gpus_of_one_instance_first_come_first_served() -> None:
    one, two = ([{"id": "x", "instance_type": BIG, "tp": tp}] for tp in (2, 1))
    policies = [unit(service("chat", variants=one), name="a"), unit(service("chat", variants=two), name="b")]
    made = world(row("od", instance_type=BIG), policies=policies, demand=[demand(0.0, "a/chat")])
    target(made, 1, "b.chat.x")
    target(made, 2, "a.chat.x")
    made.cloud.launch("od", 1, "t")
    made.run_until(READY_S)
    assert states(made) == ["pending", "ready", "ready"]
    (node,) = made.cluster.nodes.values()
    assert node.free_gpus == 1
    target(made, 2, "b.chat.x")
    assert node.free_gpus == 0


def test_a_deployment_of_one_offering_is_placed_on_that_offerings_nodes_only() -> None:
    made = world(row("od"), row("spot", market="spot"), rps=0.0)
    target(made, 1, offering="spot")
    made.cloud.launch("od", 1, "t")
    made.run_until(READY_S)
    assert states(made) == ["pending"]
    made.cloud.launch("spot", 1, "t")
    made.run_until(2 * READY_S)
    assert states(made) == ["ready"]


def test_a_replica_over_two_nodes_is_placed_on_both_or_not_at_all_and_dies_with_either() -> None:
    variants = [{"id": "l40s", "instance_type": TYPE, "nodes_per_replica": 2}]
    made = world(policies=[unit(service(variants=variants))], rps=0.0)
    settled(made, 1, 1)
    assert states(made) == ["pending"]
    made.cloud.launch("od", 2, "more")
    made.run_until(3 * READY_S)
    assert states(made) == ["ready"]
    (replica,) = made.cluster.replicas()
    assert len(replica.nodes) == 2
    made.pools.stop(replica.nodes[1].machine, "gone")
    assert states(made) == ["loading"]  # the third node and the survivor
    assert made.cluster.nodes[next(iter(where(made).values()))].free_gpus == 0


# ---- Serve's order ---------------------------------------------------------------------------------------------------
def test_too_many_are_stopped_starting_first_then_on_the_emptiest_node_then_newest() -> None:
    variants = [{"id": "l40s", "instance_type": BIG}]
    made = world(row("od", instance_type=BIG), policies=[unit(service(variants=variants))], rps=0.0)
    settled(made, 2, 5)  # four on one node, one on the other
    alone = next(name for name, node in where(made).items() if list(where(made).values()).count(node) == 1)
    target(made, 7)
    assert states(made).count("loading") == 2
    target(made, 5)
    assert states(made) == ["ready"] * 5
    target(made, 4)
    assert [r.name for r in made.cluster.replicas() if r.state == "draining"] == [alone]
    newest = max((r for r in made.cluster.replicas() if r.state == "ready"), key=lambda r: r.serial)
    target(made, 3)
    assert newest.state == "draining"


def test_a_stopped_replica_finishes_what_it_runs() -> None:
    made = world(demand=[demand(1.0, output_tokens=400)])
    settled(made, 1, 1)
    made.run_until(READY_S + 120.0)
    (replica,) = made.cluster.replicas()
    assert made.engine.in_flight(replica.handle) > 0
    target(made, 0)
    assert states(made) == ["draining"]
    made.run_until(READY_S + 160.0)
    assert states(made) == []
    assert made.engine.totals(0).failed == 0


# ---- drains and losses ----------------------------------------------------------------------------------------------
def test_a_drained_node_serves_until_its_successor_does() -> None:
    made = world()
    (old,) = settled(made, 1, 1)
    made.cluster.drain(old, made.timeline.now_s + 600.0)
    assert states(made) == ["pending", "ready"]
    made.cloud.launch("od", 1, "next")
    made.run_until(made.timeline.now_s + BOOT_S + LOAD_S / 2)
    assert states(made) == ["loading", "ready"]
    made.run_until(made.timeline.now_s + LOAD_S)
    assert states(made) == ["ready"]
    assert old not in where(made).values()
    assert not made.cluster.nodes[old].alive
    with pytest.raises(NotFound):
        made.cluster.drain(old, made.timeline.now_s + 1.0)


def test_a_drain_with_a_lower_target_empties_the_node_at_once() -> None:
    made = world(rps=0.0)
    first, second = settled(made, 2, 2)
    made.cluster.drain(second, made.timeline.now_s + 120.0)
    target(made, 1)
    made.run_until(made.timeline.now_s + 5.0)
    assert list(where(made).values()) == [first]


def test_a_replica_without_successor_is_stopped_in_time_to_finish_before_the_deadline() -> None:
    made = world()
    (only,) = settled(made, 1, 1)
    made.cluster.drain(only, made.timeline.now_s + 100.0)
    made.run_until(made.timeline.now_s + 69.0)
    assert states(made) == ["pending", "ready"]
    made.run_until(made.timeline.now_s + 2.0)
    assert "ready" not in states(made)
    made.run_until(made.timeline.now_s + 40.0)
    assert not made.cluster.nodes[only].alive


def test_a_lost_node_kills_its_replicas_and_serve_starts_others() -> None:
    made = world()
    (first,) = settled(made, 1, 1)
    made.run_until(200.0)
    made.pools.stop(made.pools.machines[first], "gone")
    assert states(made) == ["pending"]
    (node,) = made.cluster.seen_nodes()
    assert not node.alive
    made.run_until(300.0)
    assert made.cluster.seen_nodes() == ()
    totals = made.engine.totals(0)
    assert totals.requests == totals.finished + totals.shed + totals.failed + totals.overflowed + totals.in_flight


def test_loads_can_be_slow_fail_and_hang_and_replicas_crash() -> None:
    def loading(kind: str, **over: Any) -> World:
        made = world(faults=[fault(kind, 0, 70, target=CHAT, **over)], rps=0.0)
        settled(made, 1, 1)
        return made

    slow = loading("load_slow", value=2.0)
    assert states(slow) == ["loading"]
    slow.run_until(BOOT_S + 2 * LOAD_S)
    assert states(slow) == ["ready"]

    fails = loading("load_fail", value=1.0)
    fails.run_until(BOOT_S + 2 * LOAD_S - 1.0)
    assert states(fails) == ["loading"]
    fails.run_until(BOOT_S + 2 * LOAD_S)
    assert states(fails) == ["ready"]

    hangs = loading("load_hang", value=1.0)
    hangs.run_until(1000.0)
    assert states(hangs) == ["loading"]
    target(hangs, 0)
    target(hangs, 1)
    hangs.run_until(1000.0 + LOAD_S)
    assert states(hangs) == ["ready"]

    crash = world(faults=[fault("replica_crash", 200, value=0.5)], rps=0.0)
    settled(crash, 2, 2)
    crash.run_until(200.0)
    assert states(crash) == ["loading", "ready"]


# ---- the plan -------------------------------------------------------------------------------------------------------
def message(count: int, made: World, stale_after_s: float = 50.0) -> PlanMessage:
    rule = LocalRule(target_ongoing_per_replica=1.0, min_replicas=0, max_replicas=3, downscale_hold_s=60.0)
    return PlanMessage(
        run_id="r",
        seq=1,
        published_at_s=made.clock.now_s(),
        stale_after_s=stale_after_s,
        targets={APP: count, "not.ours.x": 3},
        local_rules={APP: rule},
        services=(),
    )


def test_a_stale_plan_hands_over_to_serves_local_rule() -> None:
    made = world(rps=0.0)
    made.serving.publish(message(1, made))
    assert made.serving.targets == {APP: 1}
    made.run_until(40.0)
    made.serving.follow_local_rule({CHAT: 5.0})
    assert made.serving.targets == {APP: 1}
    made.run_until(60.0)
    made.serving.follow_local_rule({CHAT: 5.0})
    assert made.serving.targets == {APP: 3}
    made.serving.publish(message(2, made))
    made.serving.follow_local_rule({CHAT: 5.0})
    assert made.serving.targets == {APP: 2}


def test_a_clock_that_steps_is_wrong_for_as_long_as_the_fault_lasts() -> None:
    made = world(faults=[fault("clock_step", 100, 50, value=-300.0)])
    seen = []
    for at_s in (99.0, 100.0, 149.0, 151.0):
        made.run_until(at_s)
        seen.append(made.clock.now_s() - made.cluster.epoch_s)
    assert seen == [99.0, -200.0, -151.0, 151.0]
