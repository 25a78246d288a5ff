"""Field reports of acquiring capacity, answered through real boto3: each test is one public complaint."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.core.model import CloudInstance
from autoscaler.ports import Misconfigured, NoCapacity, NotFound, PortError, Quota, Refused, Throttled, Transient
from chaos.ec2_server.state import Bucket, Pool, Reservation
from tests.ec2_rig import BIG, HUGE, WEST, A, B, Ec2Rig, ec2, offer, region

DAY_S = 86_400.0


def reservation(name: str, count: int, **changes: Any) -> Reservation:
    rows: dict[str, Any] = {
        "instance_type": BIG,
        "zone": A,
        "created_at_s": 0.0,
        "start_at_s": 0.0,
        "match": "targeted",
    }
    return Reservation(reservation_id=name, total=count, **(rows | changes))


def block(name: str, start_at_s: float, end_at_s: float, count: int = 2) -> Reservation:
    return reservation(name, count, start_at_s=start_at_s, end_at_s=end_at_s, kind="capacity-block")


def listed(rig: Ec2Rig) -> list[CloudInstance]:
    return list(rig.cloud.describe(rig.clock.now_s()).instances)


def offered(rig: Ec2Rig) -> list[str]:
    return [row.offering for row in rig.cloud.describe(rig.clock.now_s()).offerings]


# ---- refusals -------------------------------------------------------------------------------------------------------
def test_a_dry_pool_is_asked_once_and_not_behind_our_back() -> None:
    with ec2(region(pools={Pool(BIG, A): 0})) as rig:
        with pytest.raises(NoCapacity) as dry:
            rig.cloud.launch("od-a", 1, "t")
        assert (dry.value.offering, dry.value.code) == ("od-a", "InsufficientInstanceCapacity")
        assert rig.calls("RunInstances") == 1


def test_a_quota_is_not_taken_for_a_dry_pool() -> None:
    with ec2(region(quotas={("G", "on-demand"): 0, ("G", "spot"): 0})) as rig:
        for name, code in (("od-a", "VcpuLimitExceeded"), ("spot-a", "MaxSpotInstanceCountExceeded")):
            with pytest.raises(Quota) as full:
                rig.cloud.launch(name, 1, "t")
            assert full.value.code == code


def test_an_unknown_exhaustion_code_is_a_no_and_is_counted() -> None:
    with ec2() as rig:
        rig.fault("error", "RunInstances", 2, code="GpusSoldOutUntilSpring", status=400)
        for token in ("t1", "t2"):
            with pytest.raises(Refused):
                rig.cloud.launch("od-a", 1, token)
        assert rig.cloud.unknown == {"GpusSoldOutUntilSpring": 2}


def test_a_full_subnet_shuts_the_subnet_only() -> None:
    with ec2(region(subnets={"subnet-a": (A, 0), "subnet-b": (B, 9)})) as rig:
        for token in ("t1", "t2"):
            with pytest.raises(Refused):
                rig.cloud.launch("od-a", 1, token)
        assert rig.calls("RunInstances") == 1
        assert len(rig.cloud.launch("od-b", 1, "t3")) == 1
        rig.region.subnets["subnet-a"] = (A, 9)
        rig.clock.advance(301.0)
        assert len(rig.cloud.launch("od-a", 1, "t4")) == 1


def test_a_full_placement_group_refuses_every_type_in_it() -> None:
    offers = tuple(offer(f"g-{kind}", instance_type=kind, placement_group="pg") for kind in (BIG, HUGE))
    pools = {Pool(BIG, A): 5, Pool(HUGE, A): 5}
    with ec2(region(pools=pools, group_limit=1), offers=offers) as rig:
        rig.cloud.launch(f"g-{BIG}", 1, "t1")
        for kind in (BIG, HUGE):
            with pytest.raises(NoCapacity):
                rig.cloud.launch(f"g-{kind}", 1, f"t2-{kind}")
        assert rig.calls("RunInstances") == 2


def test_spot_without_its_role_shuts_spot_and_nothing_else() -> None:
    with ec2(region(spot_role=False)) as rig:
        for token in ("t1", "t2"):
            with pytest.raises(Misconfigured):
                rig.cloud.launch("spot-a", 1, token)
        assert rig.calls("RunInstances") == 1
        assert len(rig.cloud.launch("od-a", 1, "t3")) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"templates": {}}, "InvalidLaunchTemplateName.NotFoundException"),
        ({"images": set()}, "InvalidAMIID.NotFound"),
        ({"denied": {"RunInstances"}}, "UnauthorizedOperation"),
    ],
)
def test_what_is_wrong_everywhere_is_said_to_be_so(change: dict[str, Any], code: str) -> None:
    with ec2(region(**change)) as rig:
        with pytest.raises(Misconfigured) as wrong:
            rig.cloud.launch("od-a", 1, "t")
        assert wrong.value.code == code


# ---- open answers ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind", ["lost_after", "error_after", "garbled", "hang", "duplicate", "lost_before", "html", "page"]
)
@pytest.mark.parametrize("times", [1, 2])
def test_an_open_answer_is_settled_without_a_second_launch(kind: str, times: int) -> None:
    with ec2() as rig:
        rig.fault(kind, "RunInstances", times)
        try:
            ids = set(rig.cloud.launch("od-a", 2, "t"))
        except Transient:
            ids = set()
        rig.clock.advance(10.0)
        assert len(rig.region.instances) in (0, 2)
        assert {row.instance_id for row in listed(rig) if row.token == "t"} == set(rig.region.instances)
        assert ids in (set(), set(rig.region.instances))


def test_a_no_to_the_repeated_call_is_not_a_no_to_the_intent() -> None:
    with ec2(region(pools={Pool(BIG, A): 1})) as rig:
        rig.fault("lost_before", "RunInstances")
        rig.region.pools[Pool(BIG, A)] = 0
        with pytest.raises(Transient):
            rig.cloud.launch("od-a", 1, "t")


def test_an_answer_in_html_is_open_and_a_hanging_endpoint_ends() -> None:
    with ec2() as rig:
        rig.fault("html", "*", 20)
        with pytest.raises(Transient):
            rig.cloud.describe(rig.clock.now_s())
    with ec2() as rig:
        rig.fault("hang", "DescribeInstances", 20)
        with pytest.raises(Transient):
            rig.cloud.describe(rig.clock.now_s())


def test_a_login_page_is_not_an_empty_account() -> None:
    """A listing that only such a page answers would end every instance in the books, and all would be bought anew."""
    with ec2() as rig:
        (instance_id,) = rig.cloud.launch("od-a", 1, "t")
        rig.clock.advance(30.0)
        assert rig.states() == {instance_id: "running"}
        rig.fault("page", "*", 1000)
        for _ in range(60):
            rig.clock.advance(30.0)
            with pytest.raises(Transient, match="none of EC2's"):
                rig.states()
        rig.server.faults.clear()
        assert rig.states() == {instance_id: "running"}


def test_not_found_just_after_a_launch_is_not_death() -> None:
    with ec2(region(lag_s=30.0)) as rig:
        (instance_id,) = rig.cloud.launch("od-a", 1, "t")
        assert rig.states() == {instance_id: "pending"}
        with pytest.raises(Transient):
            rig.cloud.terminate(instance_id)
        rig.clock.advance(31.0)
        assert rig.states() == {instance_id: "running"}
        rig.cloud.terminate(instance_id)


def test_a_listing_that_steps_back_moves_nothing_back() -> None:
    with ec2(unsettled_every_s=0.1, describe_every_s=0.1) as rig:
        (instance_id,) = rig.cloud.launch("od-a", 1, "t")
        rig.clock.advance(60.0)
        assert rig.states() == {instance_id: "running"}
        rig.cloud.terminate(instance_id)
        rig.region.lag_s = 59.9
        rig.clock.advance(1.0)
        assert rig.states() == {instance_id: "terminating"}
        rig.region.lag_s = 100.0
        rig.clock.advance(1.0)
        assert rig.states() == {instance_id: "terminating"}
        rig.region.lag_s = 0.0
        rig.clock.advance(1.0)
        assert rig.states() == {instance_id: "terminated"}


# ---- calls ----------------------------------------------------------------------------------------------------------
def test_refusals_do_not_become_a_flood_of_calls() -> None:
    """amazon-ray#10: one bucket for the account and region."""
    with ec2(region(pools={Pool(BIG, A): 0}), calls_burst=10, calls_per_s=1.0) as rig:
        said: list[str] = []
        for number in range(100):
            with pytest.raises(PortError) as refused:
                rig.cloud.launch("od-a", 1, f"t{number}")
            said.append(type(refused.value).__name__)
        assert said.count("NoCapacity") == rig.calls() == 10
        assert said.count("Throttled") == 90


def test_being_throttled_slows_the_whole_account_down() -> None:
    with ec2(region(calls={"RunInstances": Bucket(1.0, 0.001)})) as rig:
        rig.cloud.launch("od-a", 1, "t1")
        with pytest.raises(Throttled) as theirs:
            rig.cloud.launch("od-a", 1, "t2")
        with pytest.raises(Throttled) as ours:
            rig.cloud.describe(rig.clock.now_s())
        assert (theirs.value.code, ours.value.code) == ("RequestLimitExceeded", "OwnCallLimit")


def test_at_rest_four_calls_a_minute_and_one_in_an_idle_region() -> None:
    reserved = reservation("cr-1", 2)
    offers = (offer("od-a"), offer("odcr", market="odcr", reservation="cr-1"))
    with ec2(region(reservations={"cr-1": reserved}), region(WEST), offers=offers) as rig:
        rig.cloud.launch("od-a", 2, "t")
        for _ in range(12):
            rig.clock.advance(10.0)
            listed(rig)
        idle = rig.server.account.regions[WEST]
        before, before_idle = rig.calls(), len(idle.log)
        for _ in range(60):
            rig.clock.advance(10.0)
            listed(rig)
        assert rig.calls() - before <= 40
        assert len(idle.log) - before_idle <= 10


# ---- reservations and blocks ----------------------------------------------------------------------------------------
def test_a_reservation_is_named_and_on_demand_never_eats_it() -> None:
    offers = (offer("od-a"), offer("odcr", market="odcr", reservation="cr-1"))
    with ec2(region(reservations={"cr-1": reservation("cr-1", 1, match="open")}), offers=offers) as rig:
        (bought,) = rig.cloud.launch("od-a", 1, "t1")
        (reserved,) = rig.cloud.launch("odcr", 1, "t2")
        assert rig.region.instances[bought].reservation == ""
        assert rig.region.instances[reserved].reservation == "cr-1"


def test_an_instance_outside_the_reservation_meant_is_counted_on_demand() -> None:
    """parallelcluster#4061: where an instance landed is looked at."""
    offers = (offer("od-a"), offer("odcr", market="odcr", reservation="cr-1"))
    with ec2(region(reservations={"cr-1": reservation("cr-1", 1)}), offers=offers) as rig:
        (instance_id,) = rig.cloud.launch("odcr", 1, "t")
        rig.region.instances[instance_id].reservation = ""
        rig.clock.advance(60.0)
        assert [row.offering for row in listed(rig)] == ["od-a"]


def test_an_exhausted_reservation_is_refused_without_a_call_until_it_is_listed_again() -> None:
    offers = (offer("odcr", market="odcr", reservation="cr-1"),)
    with ec2(region(reservations={"cr-1": reservation("cr-1", 1)}), offers=offers) as rig:
        listed(rig)
        (instance_id,) = rig.cloud.launch("odcr", 1, "t1")
        with pytest.raises(NoCapacity) as full:
            rig.cloud.launch("odcr", 1, "t2")
        assert (full.value.code, rig.calls("RunInstances")) == ("ReservationCapacityExceeded", 1)
        rig.cloud.terminate(instance_id)
        rig.clock.advance(1.0)
        listed(rig)
        assert len(rig.cloud.launch("odcr", 1, "t3")) == 1


def test_a_reservation_just_made_is_waited_for_until_it_is_active() -> None:
    """scylla-cluster-tests#8839: ReservationCapacityExceeded seconds after it was made."""
    start_at_s = 1_000_005.0
    offers = (offer("odcr", market="odcr", reservation="cr-1"),)
    with ec2(region(reservations={"cr-1": reservation("cr-1", 1, start_at_s=start_at_s)}), offers=offers) as rig:
        listed(rig)
        with pytest.raises(NoCapacity):
            rig.cloud.launch("odcr", 1, "t1")
        assert rig.calls("RunInstances") == 0
        rig.clock.advance(61.0)
        listed(rig)
        assert len(rig.cloud.launch("odcr", 1, "t2")) == 1


def test_a_reservation_that_is_gone_is_no_longer_offered() -> None:
    offers = (offer("od-a"), offer("odcr", market="odcr", reservation="cr-1"))
    with ec2(region(reservations={"cr-1": reservation("cr-1", 1)}), offers=offers) as rig:
        assert offered(rig) == ["od-a", "odcr"]
        del rig.region.reservations["cr-1"]
        with pytest.raises(NotFound):
            rig.cloud.launch("odcr", 1, "t")
        rig.clock.advance(61.0)
        assert offered(rig) == ["od-a"]


def test_several_blocks_of_one_type_and_zone_are_several_offerings() -> None:
    """karpenter-aws#8514: each reservation is an offering of its own."""
    rows = {name: block(name, 0.0, 2_000_000.0, count=1) for name in ("cr-1", "cr-2")}
    offers = tuple(offer(f"block-{name}", market="block", reservation=name) for name in rows)
    with ec2(region(reservations=rows), offers=offers) as rig:
        ids = [rig.cloud.launch(f"block-{name}", 1, "t")[0] for name in rows]
        assert [rig.region.instances[each].reservation for each in ids] == ["cr-1", "cr-2"]
        view = rig.cloud.describe(rig.clock.now_s())
        assert [(row.pool, row.ends_at_s) for row in view.offerings] == [("cr-1", 2_000_000.0), ("cr-2", 2_000_000.0)]


def test_a_future_block_is_in_the_calendar_and_its_end_is_announced_40_minutes_ahead() -> None:
    start_at_s, end_at_s = 1_003_600.0, 1_003_600.0 + DAY_S
    offers = (offer("block", market="block", reservation="cr-1"),)
    with ec2(region(reservations={"cr-1": block("cr-1", start_at_s, end_at_s)}), offers=offers) as rig:
        (row,) = rig.cloud.describe(rig.clock.now_s()).offerings
        assert (row.starts_at_s, row.ends_at_s) == (start_at_s, end_at_s)
        with pytest.raises(NoCapacity):
            rig.cloud.launch("block", 1, "t1")
        assert rig.calls("RunInstances") == 0
        rig.clock.advance(3601.0)  # it has begun, and no listing since has said so
        (instance_id,) = rig.cloud.launch("block", 1, "t2")
        rig.clock.advance(end_at_s - 2401.0 - rig.clock.now_s())
        assert listed(rig)[0].reclaim_at_s is None
        rig.clock.advance(2.0)
        assert listed(rig)[0].reclaim_at_s == end_at_s - 1800.0
        rig.clock.advance(700.0)
        assert rig.states()[instance_id] in ("terminating", "terminated")


# ---- ends -----------------------------------------------------------------------------------------------------------
def test_an_instance_that_dies_at_launch_says_why() -> None:
    with ec2(region(dies=("Client.InvalidKMSKey.InvalidState", "the key is disabled"))) as rig:
        rig.cloud.launch("od-a", 1, "t")
        rig.clock.advance(30.0)
        (row,) = listed(rig)
        assert (row.state, row.reclaim_at_s) == ("terminated", None)
        assert row.state_reason == "Client.InvalidKMSKey.InvalidState: the key is disabled"


def test_a_rebalance_recommendation_is_not_a_notice() -> None:
    with ec2() as rig:
        (instance_id,) = rig.cloud.launch("spot-a", 1, "t")
        advice = {"detail-type": "EC2 Instance Rebalance Recommendation", "time": "1970-01-12T13:46:40Z"}
        rig.region.notices.append(advice | {"detail": {"instance-id": instance_id}})
        assert listed(rig)[0].reclaim_at_s is None
        deadline_at_s = rig.region.interrupt(instance_id, rig.clock.now_s())
        assert listed(rig)[0].reclaim_at_s == deadline_at_s


def test_no_instance_outlives_its_hard_deadline_unseen() -> None:
    with ec2(max_life_s=DAY_S) as rig:
        (instance_id,) = rig.cloud.launch("od-a", 1, "t")
        made = rig.region.instances[instance_id]
        assert (made.shutdown, made.volumes_tagged) == ("terminate", True)
        assert made.tags["qm:deadline-at-s"] == f"{1_000_000.0 + DAY_S:.0f}"
        rig.clock.advance(DAY_S - 1801.0)
        assert listed(rig)[0].reclaim_at_s is None
        rig.clock.advance(2.0)
        assert listed(rig)[0].reclaim_at_s == 1_000_000.0 + DAY_S


def test_an_instance_left_in_another_region_is_seen_and_given_back_there() -> None:
    west = region(WEST)
    with ec2(region(), west) as rig:
        (instance_id,) = rig.cloud.launch("od-a", 1, "t")
        west.instances["i-lost"] = rig.region.instances.pop(instance_id)
        west.instances["i-lost"].instance_id = "i-lost"
        rig.clock.advance(61.0)
        assert rig.states()["i-lost"] == "running"
        rig.cloud.terminate("i-lost")
        assert west.instances["i-lost"].reason[0] == "Client.UserInitiatedShutdown"


def test_zones_without_a_subnet_or_the_type_are_not_offered() -> None:
    """skypilot#1730: zones without a subnet are never tried."""
    offers = (
        offer("good"),
        offer("no-type", instance_type=HUGE),
        offer("no-subnet", subnet="subnet-z"),
        offer("wrong-zone", subnet="subnet-b"),
    )
    with ec2(offers=offers) as rig:
        assert offered(rig) == ["good"]
        assert rig.cloud.dropped == {
            "no-type": f"{HUGE} is not offered in {A}",
            "no-subnet": "subnet subnet-z does not exist",
            "wrong-zone": f"subnet subnet-b is in {B}",
        }


def test_five_hundred_instances_are_listed_in_one_call_and_under_three_seconds() -> None:
    import time

    with ec2(region(pools={Pool(BIG, A): 500}, subnets={"subnet-a": (A, 600)}), offers=(offer("od-a"),)) as rig:
        rig.cloud.launch("od-a", 500, "t")
        rig.clock.advance(60.0)
        before, began_s = rig.calls("DescribeInstances"), time.process_time()
        assert len(listed(rig)) == 500
        assert time.process_time() - began_s < 3.0
        assert rig.calls("DescribeInstances") - before == 1
