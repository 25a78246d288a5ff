"""Several offerings in one call, network cards, quotas, last words, notices from a queue: through real boto3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from autoscaler.act import Act, Inline
from autoscaler.adapters.ec2.notices import CALENDAR, STATE, Queue, told
from autoscaler.adapters.ec2.quotas import Quotas
from autoscaler.core.events import Acted, LaunchGranted, LaunchRefused, LaunchTried
from autoscaler.core.model import Launch, Plan, Terminate
from autoscaler.core.reasons import ReasonCode, why
from autoscaler.ports import FleetCloud, Misconfigured, NoCapacity, Quota, Superseded, Throttled, Transient
from chaos.ec2_server.state import Pool, Reservation
from serve_apps.wire import NodeReport, PlanMessage
from tests.ec2_rig import BIG, HUGE, A, B, Ec2Rig, ec2, offer, region

TEMPLATE = {
    "qm-node": {"ImageId": "ami-1", "CapacityReservationSpecification": {"CapacityReservationPreference": "none"}}
}
NODE: dict[str, Any] = {"launch_template": "qm-node"}
FOUR = (offer("od-a"), offer("od-b", B), offer("huge-b", B, instance_type=HUGE), offer("spot-a", A, "spot"))


class Quiet:
    """A serving side that no plan of these tests touches."""

    def publish(self, message: PlanMessage) -> None: ...


def plan(*acts: Launch | Terminate) -> Plan:
    launches = tuple(act for act in acts if isinstance(act, Launch))
    terminates = tuple(act for act in acts if isinstance(act, Terminate))
    return Plan(
        id="run/1", at_s=0.0, demands=(), targets=(), launches=launches, drains=(), terminates=terminates,
        routes=(), shortfalls=(),
    )  # fmt: skip


MESSAGE = PlanMessage(
    run_id="run", seq=1, published_at_s=0.0, stale_after_s=60.0, targets={}, local_rules={}, services=()
)


def carried_out(rig: Ec2Rig, *acts: Launch | Terminate) -> list[Any]:
    events: list[Any] = []

    def record(event: Any, *, durable: bool = False) -> Any:
        events.append(event)
        return event

    Act(rig.clock.now_s(), Quiet(), rig.cloud, record, Inline()).carry_out(plan(*acts), MESSAGE)  # type: ignore[arg-type]
    return events


def launch(count: int, *names: str) -> Launch:
    return Launch(id="run/1/0", service="s", variant="v", count=count, alternates=names, reasons=())


# ---- fleets ---------------------------------------------------------------------------------------------------------
def test_alternates_of_one_market_are_asked_in_one_call_and_partial_grants_are_accounted() -> None:
    pools = {Pool(BIG, A): 1, Pool(BIG, B): 2, Pool(HUGE, B): 0, Pool(BIG, A, "spot"): 2}
    with ec2(region(pools=pools, templates=TEMPLATE), offers=FOUR, **NODE) as rig:
        assert isinstance(rig.cloud, FleetCloud)
        events = carried_out(rig, launch(4, "od-a", "od-b", "huge-b", "spot-a"))
        assert [(e.token, e.offering, e.count) for e in events if isinstance(e, LaunchTried)] == [
            ("run/1/0/0", "od-a", 4),
            ("run/1/0/3", "spot-a", 1),
        ]
        granted = [(e.offering, len(e.instance_ids)) for e in events if isinstance(e, LaunchGranted)]
        assert granted == [("od-a", 1), ("od-b", 2), ("spot-a", 1)]
        assert [(e.offering, e.error) for e in events if isinstance(e, LaunchRefused)] == [("huge-b", "no_capacity")]
        assert (rig.calls("CreateFleet"), rig.calls("RunInstances")) == (1, 1)
        rig.clock.advance(30.0)
        listed = rig.cloud.describe(rig.clock.now_s()).instances
        assert sorted(row.offering for row in listed) == ["od-a", "od-b", "od-b", "spot-a"]


def test_the_order_of_alternates_is_the_order_of_the_fleet() -> None:
    with ec2(region(templates=TEMPLATE), offers=FOUR, **NODE) as rig:
        events = carried_out(rig, launch(2, "od-b", "od-a"))
        assert [(e.offering, len(e.instance_ids)) for e in events if isinstance(e, LaunchGranted)] == [("od-b", 2)]


def test_what_is_reserved_or_in_a_group_is_asked_alone() -> None:
    offers = (
        offer("od-a"),
        offer("od-b", B),
        offer("odcr", market="odcr", reservation="cr-1"),
        offer("group", placement_group="pg"),
    )
    with ec2(offers=offers) as rig:
        assert rig.cloud.together(["od-a", "od-b", "odcr"]) == ("od-a", "od-b")
        assert rig.cloud.together(["odcr", "od-a"]) == ()
        assert rig.cloud.together(["group", "od-a"]) == ()
        assert rig.cloud.together(["nowhere"]) == ()


@pytest.mark.parametrize("kind", ["lost_after", "error_after", "garbled", "hang", "lost_before", "html"])
@pytest.mark.parametrize("times", [1, 2])
def test_an_open_fleet_is_settled_without_a_second_one(kind: str, times: int) -> None:
    with ec2(region(templates=TEMPLATE), **NODE) as rig:
        rig.fault(kind, "CreateFleet", times)
        try:
            got = {i for ids in rig.cloud.launch_any(("od-a", "od-b"), 4, "t").granted.values() for i in ids}
        except Transient:
            got = set()
        rig.clock.advance(10.0)
        listed = {row.instance_id for row in rig.cloud.describe(rig.clock.now_s()).instances if row.token == "t"}
        assert len(rig.region.instances) in (0, 4)
        assert listed == set(rig.region.instances)
        assert got in (set(), listed)


def test_a_fleet_refused_as_a_whole_stops_where_every_other_call_would_be_refused_too() -> None:
    with ec2(region(denied={"CreateFleet"}, templates=TEMPLATE), offers=FOUR, **NODE) as rig:
        events = carried_out(rig, launch(1, "od-a", "od-b", "spot-a"))
        assert [e.code for e in events if isinstance(e, LaunchRefused)] == ["UnauthorizedOperation"]
        assert rig.calls("RunInstances") == 0


def test_a_subnet_that_is_full_is_left_out_of_the_next_fleet() -> None:
    subnets = {"subnet-a": (A, 0), "subnet-b": (B, 9)}
    with ec2(region(subnets=subnets, templates=TEMPLATE), **NODE) as rig:
        for token in ("t1", "t2"):
            answer = rig.cloud.launch_any(("od-a", "od-b"), 1, token)
            assert list(answer.granted) == ["od-b"]
            assert answer.refused["od-a"].code == "InsufficientFreeAddressesInSubnet"
        assert rig.region.calls["CreateFleet"].left > 0


# ---- one at a time --------------------------------------------------------------------------------------------------
def test_instances_that_talk_to_each_other_get_network_cards_and_a_group() -> None:
    efa = offer("gang", instance_type=HUGE, placement_group="pg", efa_interfaces=4)
    seen: list[dict[str, Any]] = []
    with ec2(region(pools={Pool(HUGE, A): 2}), offers=(efa,), security_groups=("sg-1",)) as rig:
        client = rig.cloud._callers["us-east-1"].clients.write
        client.meta.events.register("provide-client-params.ec2.RunInstances", lambda params, **_: seen.append(params))
        rig.cloud.launch("gang", 2, "t")
        assert all(each.group == "pg" for each in rig.region.instances.values())
    cards = seen[0]["NetworkInterfaces"]
    assert [(c["NetworkCardIndex"], c["DeviceIndex"], c["InterfaceType"]) for c in cards] == [
        (0, 0, "efa"), (1, 1, "efa-only"), (2, 1, "efa-only"), (3, 1, "efa-only"),
    ]  # fmt: skip
    assert {(c["SubnetId"], tuple(c["Groups"])) for c in cards} == {("subnet-a", ("sg-1",))}
    assert "SubnetId" not in seen[0]


def test_a_launch_asks_for_no_more_than_the_quota_leaves_and_then_not_at_all() -> None:
    sized = (offer("od-a", vcpus=48), offer("od-b", B, vcpus=48))
    with ec2(region(quotas={("G", "on-demand"): 4 * 48}), offers=sized) as rig:
        rig.cloud._quotas.vcpus = {("g", "on_demand"): 4.0 * 48}
        assert len(rig.cloud.launch("od-b", 9, "t1")) == 4
        with pytest.raises(Quota, match="the quota of G on_demand instances is 192 vCPU, all in use"):
            rig.cloud.launch("od-a", 1, "t2")
        assert rig.calls("RunInstances") == 1


def test_limits_are_read_by_their_codes_and_reserved_blocks_do_not_count() -> None:
    block = offer("block", market="block", reservation="cr-1", instance_type=HUGE, vcpus=192)
    quotas = Quotas((block, offer("huge", instance_type=HUGE, vcpus=192)))
    quotas.read([{"QuotaCode": "L-417A185B", "Value": 192.0}, {"QuotaCode": "L-FFFFFFFF", "Value": 1.0}])
    assert quotas.vcpus == {("p", "on_demand"): 192.0}
    row = {"InstanceType": HUGE, "Placement": {"AvailabilityZone": A}, "State": {"Name": "running"}}
    mine = [row | {"CapacityReservationId": "cr-1", "InstanceLifecycle": "capacity-block"}]
    assert quotas.room(quotas.offers[0], 5, mine) == 5
    assert quotas.room(quotas.offers[1], 5, mine) == 1
    with pytest.raises(Quota):
        quotas.room(quotas.offers[1], 5, [*mine, row])


def test_an_instance_that_never_joined_is_asked_for_its_last_words_before_it_ends() -> None:
    with ec2() as rig:
        (instance_id,) = rig.cloud.launch("od-a", 1, "t")
        rig.region.console[instance_id] = "booting\n\nqm-node: ray start failed:\n  no route to 10.0.0.5:6379\n"
        late = why(ReasonCode.STARTING_EXPIRED, age_s=901, limit_s=900)
        events = carried_out(rig, Terminate(id="x", instance_id=instance_id, reasons=(late,)))
        (acted,) = [event for event in events if isinstance(event, Acted) and event.verb == "terminate"]
        assert acted.detail == "booting | qm-node: ray start failed: | no route to 10.0.0.5:6379"
        assert rig.region.instances[instance_id].reason[0] == "Client.UserInitiatedShutdown"
        empty = why(ReasonCode.EMPTY, drained_for_s=1)
        carried_out(rig, Terminate(id="y", instance_id=instance_id, reasons=(empty,)))
        assert rig.calls("GetConsoleOutput") == 1


def test_the_offering_of_an_instance_is_where_it_landed() -> None:
    rows = {"cr-1": Reservation("cr-1", BIG, A, 1, 0.0, 0.0, match="targeted")}
    offers = (offer("od-a"), offer("odcr", market="odcr", reservation="cr-1"), offer("spot-a", market="spot"))
    with ec2(region(reservations=rows), offers=offers) as rig:
        for name in ("od-a", "odcr", "spot-a"):
            (instance_id,) = rig.cloud.launch(name, 1, f"t-{name}")
            rig.region.instances[instance_id].tags.pop("qm:offering")
        rig.clock.advance(30.0)
        assert sorted(row.offering for row in rig.cloud.describe(rig.clock.now_s()).instances) == [
            "od-a", "odcr", "spot-a",
        ]  # fmt: skip


# ---- who may act ----------------------------------------------------------------------------------------------------
@dataclass
class Term:
    """A tenure that ends when a test says so."""

    epoch: int = 7
    over: bool = False

    def check(self) -> None:
        if self.over:
            raise Superseded("epoch 7 is over")


def test_instances_carry_the_epoch_and_an_old_epoch_neither_launches_nor_ends_any() -> None:
    term = Term()
    with ec2(region(templates=TEMPLATE), **NODE) as rig:
        rig.cloud.hold(term)
        (instance_id,) = rig.cloud.launch("od-a", 1, "t1")
        assert rig.region.instances[instance_id].tags["qm:epoch"] == "7"
        term.over = True
        for act in (
            lambda: rig.cloud.launch("od-a", 1, "t2"),
            lambda: rig.cloud.launch_any(("od-a", "od-b"), 1, "t3"),
            lambda: rig.cloud.terminate(instance_id),
        ):
            with pytest.raises(Superseded):
                act()
        assert len(rig.region.instances) == 1
        assert rig.region.instances[instance_id].reason == ("", "")


def test_a_right_that_cannot_be_confirmed_sends_nothing_and_blames_no_pool() -> None:
    class Unknown(Term):
        def check(self) -> None:
            raise Transient("S3 does not answer")

    with ec2(region(templates=TEMPLATE), **NODE) as rig:
        rig.cloud.hold(Unknown())
        for act in (lambda: rig.cloud.launch("od-a", 1, "t1"), lambda: rig.cloud.launch_any(("od-a", "od-b"), 1, "t2")):
            with pytest.raises(Throttled):
                act()
        assert rig.calls("RunInstances") + rig.calls("CreateFleet") == 0


# ---- notices --------------------------------------------------------------------------------------------------------
def test_a_fatal_fault_empties_the_node_and_says_why_and_the_pool_is_not_blamed() -> None:
    said: dict[str, NodeReport] = {}
    with ec2() as rig:
        rig.cloud._notes = lambda: said
        (instance_id,) = rig.cloud.launch("od-a", 1, "t")
        rig.clock.advance(30.0)
        at_s = rig.clock.now_s()
        said[instance_id] = NodeReport(
            instance_id=instance_id, phase="joined", sent_at_s=at_s, fault="GPU 3: Xid 79, fallen off the bus"
        )
        (row,) = rig.cloud.describe(at_s).instances
        assert (row.reclaim_at_s, row.state_reason) == (at_s + 300.0, "NodeFault: GPU 3: Xid 79, fallen off the bus")
        said.clear()
        rig.clock.advance(10.0)
        assert rig.cloud.describe(rig.clock.now_s()).instances[0].reclaim_at_s == at_s + 300.0


def test_a_node_that_heard_of_its_own_end_first_is_believed() -> None:
    with ec2() as rig:
        (instance_id,) = rig.cloud.launch("spot-a", 1, "t")
        note = NodeReport(
            instance_id=instance_id, phase="draining", sent_at_s=0.0, reclaim_at_s=1_000_100.0, progress_bytes=64e6
        )
        rig.cloud._notes = lambda: {instance_id: note}
        (row,) = rig.cloud.describe(rig.clock.now_s()).instances
        assert (row.reclaim_at_s, row.progress_bytes) == (1_000_100.0, 64e6)


def event(kind: str, **detail: Any) -> dict[str, Any]:
    return {"detail-type": kind, "time": "1970-01-12T13:46:40Z", "detail": detail}


def test_events_say_when_to_be_empty_and_what_is_out_of_date() -> None:
    ends = "1970-01-12T13:56:40Z"
    rows = [
        event("EC2 Spot Instance Interruption Warning", **{"instance-id": "i-1"}),
        event("EC2 Interruptible Capacity Reservation Instance Interruption Warning",
              **{"instance-id": "i-2", "instance-termination-time": ends}),
        event("EC2 Instance Rebalance Recommendation", **{"instance-id": "i-3"}),
        {"detail-type": "EC2 Spot Instance Interruption Warning"},
        {},
    ]  # fmt: skip
    said = told(rows, 120.0)
    assert said.reclaim_at_s == {"i-1": 1_000_120.0, "i-2": 1_000_600.0}
    assert (said.instances_changed, said.reservations_changed) == (False, False)
    assert told([event(STATE, **{"instance-id": "i-1", "state": "terminated"})], 1.0).instances_changed
    assert not told([event(STATE, **{"instance-id": "i-1", "state": "running"})], 1.0).instances_changed
    assert all(told([event(kind)], 1.0).reservations_changed for kind in CALENDAR)


@dataclass
class Sqs:
    """A queue that gives what is not deleted again."""

    messages: dict[str, str]

    def receive_message(self, **_: Any) -> dict[str, Any]:
        rows = [{"MessageId": key, "ReceiptHandle": f"r-{key}", "Body": body} for key, body in self.messages.items()]
        return {"Messages": rows[:10]}

    def delete_message_batch(self, QueueUrl: str, Entries: list[dict[str, str]]) -> None:  # noqa: N803
        for row in Entries:
            self.messages.pop(row["Id"], None)


def test_a_message_is_deleted_only_after_the_look_that_followed_the_one_that_saw_it() -> None:
    sqs = Sqs({"m1": '{"detail-type": "x"}', "m2": "not JSON", "m3": "[1]"})
    queue = Queue(sqs, "url")
    queue.poll()
    assert queue.take() == ({"detail-type": "x"}, {}, {})
    queue.poll()
    assert len(sqs.messages) == 3
    queue.take()
    queue.poll()
    assert len(sqs.messages) == 0


def test_a_queue_that_cannot_be_read_is_said_once_and_so_is_its_return() -> None:
    broken, said = [True], []

    class Closed(Sqs):
        def receive_message(self, **more: Any) -> dict[str, Any]:
            if broken[0]:
                raise RuntimeError("access denied")
            queue.close()
            return super().receive_message(**more)

    def say(trouble: str) -> None:
        said.append(trouble)
        broken[0] = False

    queue = Queue(Closed({}), "url", say, retry_s=0.0)
    queue._loop()
    assert said == ["RuntimeError: access denied", ""]


def test_a_full_pool_elsewhere_is_no_reason_to_stop_and_a_wrong_offering_is_named() -> None:
    with ec2(region(pools={Pool(BIG, A): 0, Pool(BIG, B): 1}, templates=TEMPLATE), **NODE) as rig:
        answer = rig.cloud.launch_any(("od-a", "od-b"), 1, "t")
        assert isinstance(answer.refused["od-a"], NoCapacity)
        assert list(answer.granted) == ["od-b"]
        assert isinstance(rig.cloud.launch_any(("nowhere",), 1, "t").refused["nowhere"], Misconfigured)
