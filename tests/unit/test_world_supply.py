"""Who gets an instance in the simulated world, how long it takes, and who loses it."""

from __future__ import annotations

import math

import pytest

from autoscaler.ports import NoCapacity, Quota, Refused, Throttled, Transient
from chaos.scenario import Quota as QuotaRow
from chaos.world.timeline import Timeline
from chaos.world.world import World
from tests.worlds import BIG, BOOT_S, fault, row, scenario, world


def alive(made: World, offering: str) -> list[str]:
    """Instances that nobody has begun to take away, oldest first."""
    return [machine.instance for machine in made.pools.rows[offering].machines if machine.stays]


def launch(made: World, offering: str, count: int, token: str = "t") -> tuple[str, ...]:
    return made.cloud.launch(offering, count, f"{token}{made.timeline.now_s}")


# ---- time -----------------------------------------------------------------------------------------------------------
def test_events_run_in_order_of_time_and_then_of_entry() -> None:
    timeline, seen = Timeline(), []
    for name, at_s in (("late", 5.0), ("first", 1.0), ("second", 1.0)):
        timeline.at(at_s, lambda name=name: seen.append((timeline.now_s, name)))  # type: ignore[misc]
    timeline.run_until(4.0, lambda at_s: seen.append((at_s, "moves")))
    assert seen == [(1.0, "moves"), (1.0, "first"), (1.0, "second"), (4.0, "moves")]
    with pytest.raises(ValueError, match="it would be in the past"):
        timeline.at(3.9, lambda: None)


def test_an_event_may_cause_another_at_the_same_instant() -> None:
    timeline, seen = Timeline(), []
    timeline.at(2.0, lambda: timeline.after(0.0, lambda: seen.append(timeline.now_s)))
    timeline.run_until(2.0, lambda at_s: None)
    assert seen == [2.0]


# ---- pools ----------------------------------------------------------------------------------------------------------
def test_a_drop_takes_the_newest_after_its_notice_and_refuses_meanwhile() -> None:
    made = world(row("spot", {"steps": [[0, 4], [300, 2]]}, market="spot", notice_s=120.0))
    first = launch(made, "spot", 2)
    made.run_until(100.0)
    later = launch(made, "spot", 2)
    made.run_until(300.0)
    assert alive(made, "spot") == list(first)
    listed = {each.instance_id: each for each in made.cloud.describe(made.clock.now_s()).instances}
    assert {listed[key].reclaim_at_s for key in later} == {made.cloud.epoch_s + 420.0}
    with pytest.raises(NoCapacity):
        launch(made, "spot", 1)
    made.run_until(420.0)
    states = {each.instance_id: each.state for each in made.cloud.describe(made.clock.now_s()).instances}
    assert [states[key] for key in (*first, *later)] == ["running"] * 2 + ["terminating"] * 2
    made.run_until(441.0)
    assert len(made.pools.rows["spot"].machines) == 2


def test_a_pool_that_recovers_does_not_take_its_notice_back() -> None:
    made = world(row("spot", {"steps": [[0, 1], [300, 0], [310, 1]]}, market="spot"))
    (instance,) = launch(made, "spot", 1)
    made.run_until(600.0)
    assert instance not in made.pools.machines
    assert launch(made, "spot", 1)


def test_offerings_exist_from_their_start_to_their_end() -> None:
    made = world(row("later", 2, start_s=300.0, end_s=900.0, market="odcr"), row("od"), row("new", start_s=300.0))

    def listed(at_s: float) -> list[str]:
        made.run_until(at_s)
        return [each.offering for each in made.cloud.describe(made.clock.now_s()).offerings]

    assert listed(0.0) == ["later", "od"]  # a reservation is known from when it was bought
    opens = {each.offering: each.starts_at_s for each in made.cloud.describe(made.clock.now_s()).offerings}
    assert opens == {"later": made.cloud.epoch_s + 300.0, "od": None}
    with pytest.raises(NoCapacity) as early:
        launch(made, "later", 1)
    assert early.value.code == "ReservationCapacityExceeded"
    assert listed(300.0) == ["later", "od", "new"]
    assert len(launch(made, "later", 9)) == 2
    assert listed(900.0) == ["od", "new"]


def test_a_block_warns_40_minutes_before_its_end_and_takes_30_minutes_before() -> None:
    made = world(row("block", 2, market="block", end_s=6000.0), duration_s=7200.0)
    first = launch(made, "block", 1)
    made.run_until(3599.0)
    assert made.pools.machines[first[0]].stays
    made.run_until(3600.0)
    assert made.pools.machines[first[0]].reclaim_at_s == 4200.0
    (late,) = launch(made, "block", 1)
    assert made.pools.machines[late].reclaim_at_s == 4200.0
    made.run_until(4200.0)
    assert made.pools.rows["block"].machines[0].why.startswith("Server.CapacityBlockEnd")
    with pytest.raises(NoCapacity):
        launch(made, "block", 1)
    ends = [each.ends_at_s for each in made.cloud.describe(made.clock.now_s()).offerings]
    assert ends == [made.cloud.epoch_s + 6000.0]


def test_an_outage_of_a_zone_takes_every_pool_there() -> None:
    zone = world(row("a", zone="z"), row("b", zone="z"), row("c"), faults=[fault("capacity", 60, 600, target="z")])
    for name in "abc":
        launch(zone, name, 2, name)
    zone.run_until(60.0)
    assert [alive(zone, name) != [] for name in "abc"] == [False, False, True]


@pytest.mark.parametrize("family", ["g", "g6e"])
def test_a_quota_counts_gpus_of_every_type_of_its_family_in_one_market(family: str) -> None:
    small = scenario(row("one"), row("four", instance_type=BIG), row("spot", market="spot"))
    made = World(small.model_copy(update={"quotas": (QuotaRow(family=family, market="on_demand", gpus=6),)}), 1)
    assert len(launch(made, "one", 2, "a")) == 2
    assert len(launch(made, "four", 2, "b")) == 1
    with pytest.raises(Quota) as full:
        launch(made, "one", 1, "c")
    assert full.value.code == "VcpuLimitExceeded"
    assert launch(made, "spot", 8, "d")


def test_an_instance_is_pending_then_running_then_in_the_cluster() -> None:
    made = world()
    (instance,) = launch(made, "od", 1)
    machine = made.pools.machines[instance]
    assert (machine.state(14.9), machine.state(15.0), machine.joins_at_s) == ("pending", "running", BOOT_S)
    made.run_until(BOOT_S - 1.0)
    assert not made.cluster.nodes
    made.run_until(BOOT_S)
    assert list(made.cluster.nodes) == [instance]


def test_boots_are_drawn_per_instance_and_do_not_depend_on_other_streams() -> None:
    boots = {"dist": "lognormal", "mean": 100.0, "cv": 0.4}
    one, two = (world(row("od", boot_s=boots), faults=faults) for faults in ([], [fault("price", 0, 100)]))
    for made in (one, two):
        launch(made, "od", 5)
    joins = [[machine.joins_at_s for machine in made.pools.machines.values()] for made in (one, two)]
    assert joins[0] == joins[1]
    assert len(set(joins[0])) == 5


def test_slow_nodes_are_a_fraction_of_all() -> None:
    made = world(row("od", 4000), nodes_slow_fraction=0.03)
    launch(made, "od", 4000)
    slow = [machine.slow for machine in made.pools.machines.values()]
    assert set(slow) == {1.0, 1.5}
    assert 0.02 < slow.count(1.5) / 4000 < 0.04


# ---- the cloud's edge -----------------------------------------------------------------------------------------------
def test_launch_calls_beyond_the_burst_are_throttled_and_launch_nothing() -> None:
    made = world(row("od", 1000), api_rate_per_s=2.0)
    for number in range(100):
        made.cloud.launch("od", 1, f"t{number}")
    with pytest.raises(Throttled):
        made.cloud.launch("od", 1, "more")
    made.run_until(1.0)
    assert made.cloud.launch("od", 1, "x")
    assert made.cloud.launch("od", 1, "y")
    with pytest.raises(Throttled):
        made.cloud.launch("od", 1, "z")
    assert (made.tally.attempted, made.tally.granted, dict(made.tally.refused)) == (104, 102, {"throttled": 2})


def test_a_listing_that_lags_shows_the_world_as_it_was() -> None:
    made = world(describe_lag_s=30.0)
    made.run_until(100.0)
    (instance,) = launch(made, "od", 1)
    made.run_until(129.0)
    assert made.cloud.describe(made.clock.now_s()).instances == ()
    made.run_until(131.0)
    assert made.cloud.describe(made.clock.now_s()).instances[0].state == "pending"
    made.cloud.terminate(instance)
    made.run_until(150.0)
    assert made.cloud.describe(made.clock.now_s()).instances[0].state == "running"
    made.run_until(162.0)
    assert made.cloud.describe(made.clock.now_s()).instances[0].state == "terminating"


# ---- faults ---------------------------------------------------------------------------------------------------------
def test_a_dry_pool_refuses_and_keeps_what_runs() -> None:
    made = world(row("od"), row("other"), faults=[fault("dry", 60, 120, target="od")])
    kept = launch(made, "od", 2)
    made.run_until(60.0)
    with pytest.raises(NoCapacity):
        launch(made, "od", 1)
    assert launch(made, "other", 1)
    made.run_until(180.0)
    assert launch(made, "od", 1)
    assert set(kept) <= set(alive(made, "od"))


def test_a_partial_grant_gives_at_least_one() -> None:
    made = world(faults=[fault("partial", 0, 600, value=0.5)])
    made.run_until(1.0)
    assert [len(launch(made, "od", count, str(count))) for count in (4, 1)] == [2, 1]


def test_a_quota_cut_refuses_and_takes_nothing() -> None:
    made = world(
        quotas=[{"family": "g6e", "market": "on_demand", "gpus": 4}], faults=[fault("quota", 60, 60, value=0.5)]
    )
    kept = launch(made, "od", 3)
    made.run_until(60.0)
    with pytest.raises(Quota):
        launch(made, "od", 1)
    assert alive(made, "od") == list(kept)
    made.run_until(121.0)
    assert launch(made, "od", 1)


def test_answers_that_are_wrong_lost_or_unknown() -> None:
    kinds = [
        fault("launch_error", 0, 10, target="error"),
        fault("ambiguous", 0, 10, target="lost"),
        fault("unknown_code", 0, 10, target="odd"),
    ]
    made = world(row("error"), row("lost"), row("odd"), faults=kinds)
    made.run_until(1.0)
    for name, error in (("error", Transient), ("lost", Transient), ("odd", Refused)):
        with pytest.raises(error):
            launch(made, name, 2, name)
    assert [len(made.pools.rows[name].machines) for name in ("error", "lost", "odd")] == [0, 2, 0]
    token = f"lost{made.timeline.now_s}"
    made.run_until(10.0)
    assert len(made.cloud.launch("lost", 2, token)) == 2
    assert len(made.pools.rows["lost"].machines) == 2


def test_boots_can_be_slow_or_in_vain_and_nodes_slow() -> None:
    kinds = [
        fault("boot_slow", 0, 10, target="slow", value=3.0),
        fault("no_join", 0, 10, target="never"),
        fault("node_slow", 0, 10, target="lame", value=2.0),
    ]
    made = world(row("slow"), row("never"), row("lame"), faults=kinds)
    made.run_until(1.0)
    for name in ("slow", "never", "lame"):
        launch(made, name, 1, name)
    machines = {machine.row.id: machine for machine in made.pools.machines.values()}
    assert machines["slow"].joins_at_s == 1.0 + 3.0 * BOOT_S
    assert machines["never"].joins_at_s == math.inf
    assert machines["lame"].slow == 2.0


@pytest.mark.parametrize(("kind", "gone_at_s"), [("reclaim", 220.0), ("kill", 100.0)])
def test_reclaims_and_kills_hit_the_fraction_they_name(kind: str, gone_at_s: float) -> None:
    made = world(row("od"), faults=[fault(kind, 100, value=0.5)])
    launch(made, "od", 6)
    made.run_until(100.0)
    assert len(alive(made, "od")) == 3
    made.run_until(300.0)
    stops = [machine.stopped_at_s for machine in made.pools.rows["od"].machines]
    assert stops == [math.inf] * 3
    assert made.tally.gpu_s["on_demand"] == pytest.approx(3 * gone_at_s)


def test_calls_can_be_throttled_listings_gone_and_doubled() -> None:
    kinds = [
        fault("throttle", 100, 50, value=0.1),
        fault("describe_gone", 200, 10),
        fault("describe_twice", 300, 10),
        fault("describe_lag", 400, 50, value=1000.0),
    ]
    made = world(faults=kinds)
    launch(made, "od", 1)
    made.run_until(100.0)
    made.cloud.describe(0.0)
    with pytest.raises(Throttled):
        made.cloud.describe(0.0)
    made.run_until(200.0)
    with pytest.raises(Transient):
        made.cloud.describe(0.0)
    made.run_until(300.0)
    assert len(made.cloud.describe(0.0).instances) == 2
    made.run_until(400.0)
    assert made.cloud.describe(0.0).instances == ()


def test_perfect_supply_grants_beyond_the_pool_at_the_cheapest_price_and_reclaims_nothing() -> None:
    rows = (
        row("spot", {"steps": [[0, 1], [100, 0]]}, market="spot", price_usd_per_h=1.0),
        row("od", 1, price_usd_per_h=4.0),
        row("mine", 1, market="odcr", price_usd_per_h=0.5),
    )
    made = World(scenario(*rows), 1, generous=True)
    assert (len(launch(made, "spot", 5, "a")), len(launch(made, "od", 5, "b")), len(launch(made, "mine", 5, "c"))) == (
        5, 5, 1,
    )  # fmt: skip
    made.run_until(600.0)
    assert len(alive(made, "spot")) == 5
    assert [made.pools.price_usd_per_h(made.pools.rows[name]) for name in ("spot", "od", "mine")] == [1.0, 1.0, 0.5]
