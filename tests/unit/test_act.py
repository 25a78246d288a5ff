"""A plan carried out: order, the ladder of alternates, what each refusal stops, and the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from autoscaler.act import Act, Executor, Inline, Pool
from autoscaler.adapters.journal import MemoryJournal
from autoscaler.adapters.local_supply import CloudConfig, OfferingConfig, QuotaConfig
from autoscaler.core.events import (
    Acted,
    ActFailed,
    Event,
    LaunchAmbiguous,
    LaunchGranted,
    LaunchRefused,
    LaunchTried,
    Record,
)
from autoscaler.core.model import Drain, Launch, Offering, Plan, Terminate
from autoscaler.core.reasons import ReasonCode, why
from autoscaler.ledger import Ledger
from autoscaler.ports import Cloud, Misconfigured, NotFound, Refused, Throttled, Transient
from serve_apps.wire import PlanMessage
from tests.fakes import FakeClock, FakeCloud, FakeServing
from tests.scene import offering

MESSAGE = PlanMessage(
    run_id="r", seq=1, published_at_s=0.0, stale_after_s=10.0, targets={}, local_rules={}, services=()
)


def launch(*alternates: str, count: int = 1, number: int = 0) -> Launch:
    return Launch(id=f"r/1/{number}", service="u/s", variant="v", count=count, alternates=alternates, reasons=())


def plan(*launches: Launch, drains: Sequence[Drain] = (), terminates: Sequence[Terminate] = ()) -> Plan:
    return Plan(
        id="r/1",
        at_s=1.0,
        demands=(),
        targets=(),
        launches=launches,
        drains=tuple(drains),
        terminates=tuple(terminates),
        routes=(),
        shortfalls=(),
    )


class Stage:
    """A cloud of the given pools, a cluster, and a journal."""

    def __init__(self, *offerings: OfferingConfig, quotas: tuple[QuotaConfig, ...] = ()) -> None:
        config = CloudConfig(cluster="c", ray_address="a", offerings=offerings, quotas=quotas)
        self.clock = FakeClock()
        self.cloud = FakeCloud(config, self.clock)
        self.serving = FakeServing(self.cloud, self.clock, shapes=())
        self.ledger = Ledger(MemoryJournal(), lambda event, beliefs: None)

    def act(self, wanted: Plan, executor: Executor | None = None, cloud: Cloud | None = None) -> list[Event]:
        """Carry the plan out; the events that were journalled."""
        view = self.cloud.supply.view(0.0)
        Act(
            now_s=self.clock.now_s(),
            serving=self.serving,
            cloud=cloud or self.cloud,
            record=self.ledger.record,
            executor=executor or Inline(),
            offerings={row.offering: row for row in view.offerings},
        ).carry_out(wanted, MESSAGE)
        return self.events

    @property
    def events(self) -> list[Event]:
        return [record.event for record in self.ledger.journal.read()]

    def owned(self) -> dict[str, int]:
        """Instances by offering."""
        rows = [machine.offering for machine in self.cloud.supply.machines.values()]
        return {name: rows.count(name) for name in sorted(set(rows))}


def tried(events: list[Event]) -> list[tuple[str, str, int]]:
    return [(e.token, e.offering, e.count) for e in events if isinstance(e, LaunchTried)]


def only(kind: type[Event], events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


def test_a_dry_pool_is_answered_from_the_next_one_in_the_same_tick() -> None:
    stage = Stage(offering("a", count=0), offering("b"))
    events = stage.act(plan(launch("a", "b", count=2)))
    assert tried(events) == [("r/1/0/0", "a", 2), ("r/1/0/1", "b", 2)]
    refused = only(LaunchRefused, events)[0]
    assert isinstance(refused, LaunchRefused)
    assert (refused.error, refused.code) == ("no_capacity", "InsufficientInstanceCapacity")
    assert stage.owned() == {"b": 2}


def test_each_attempt_is_journalled_before_the_call_and_after_it() -> None:
    stage = Stage(offering("a", count=0), offering("b"))
    kinds = [event.kind for event in stage.act(plan(launch("a", "b")))]
    assert kinds == ["acted", "launch_tried", "launch_refused", "launch_tried", "launch_granted"]


def test_what_a_partial_grant_leaves_goes_to_the_next_pool() -> None:
    stage = Stage(offering("a", count=2), offering("b", count=1), offering("c"))
    events = stage.act(plan(launch("a", "b", "c", count=4)))
    assert [row[1:] for row in tried(events)] == [("a", 4), ("b", 2), ("c", 1)]
    assert stage.owned() == {"a": 2, "b": 1, "c": 1}


def test_nothing_more_is_asked_for_once_all_is_granted() -> None:
    stage = Stage(offering("a"), offering("b"))
    assert tried(stage.act(plan(launch("a", "b")))) == [("r/1/0/0", "a", 1)]


def test_a_quota_refusal_skips_the_family_in_that_market_but_not_others() -> None:
    stage = Stage(
        offering("g6-a"),
        offering("g5-b", instance_type="g5.xlarge"),
        offering("g6-spot", market="spot"),
        quotas=(QuotaConfig(family="g", market="on_demand", gpus=0),),
    )
    events = stage.act(plan(launch("g6-a", "g5-b", "g6-spot")))
    assert [row[1] for row in tried(events)] == ["g6-a", "g6-spot"]
    assert stage.owned() == {"g6-spot": 1}


def test_a_pool_that_refused_one_launch_is_not_asked_by_the_others_of_the_tick() -> None:
    stage = Stage(offering("a", count=0), offering("a2", pool="a", count=0), offering("b"))
    events = stage.act(plan(launch("a", "b"), launch("a", "a2", "b", number=1)))
    assert [(token, name) for token, name, _ in tried(events)] == [
        ("r/1/0/0", "a"),
        ("r/1/0/1", "b"),
        ("r/1/1/2", "b"),
    ]


def test_an_ambiguous_answer_stops_the_launch_so_that_nothing_is_bought_twice() -> None:
    stage = Stage(offering("a"), offering("b"))
    stage.cloud.lose_replies = 1
    events = stage.act(plan(launch("a", "b")))
    assert [row[1] for row in tried(events)] == ["a"]
    assert len(only(LaunchAmbiguous, events)) == 1
    assert stage.owned() == {"a": 1}
    assert list(stage.ledger.beliefs.intents) == ["r/1/0/0"]


def test_being_throttled_stops_the_launch_and_says_nothing_about_capacity() -> None:
    stage = Stage(offering("a"), offering("b"))
    stage.cloud.failures.append(Throttled("slow down", "RequestLimitExceeded"))
    events = stage.act(plan(launch("a", "b"), launch("a", number=1)))
    assert [row[1] for row in tried(events)] == ["a", "a"]
    assert stage.owned() == {"a": 1}
    assert stage.ledger.beliefs.offerings["a"].refused == 0


def test_a_wrong_request_stops_the_launch_because_it_is_wrong_everywhere() -> None:
    stage = Stage(offering("a"), offering("b"))
    stage.cloud.failures.append(Misconfigured("no such image", "InvalidAMIID.NotFound"))
    assert [row[1] for row in tried(stage.act(plan(launch("a", "b"))))] == ["a"]


@pytest.mark.parametrize("error", [Refused("no", "Blocked"), NotFound("no such type", "Unsupported")])
def test_any_other_no_moves_on(error: Refused | NotFound) -> None:
    stage = Stage(offering("a"), offering("b"))
    stage.cloud.failures.append(error)
    assert [row[1] for row in tried(stage.act(plan(launch("a", "b"))))] == ["a", "b"]


def test_drains_and_publish_come_before_terminates_and_launches() -> None:
    stage = Stage(offering("a", boot_s=0.0))
    stage.act(plan(launch("a", count=2)))
    stage.clock.advance(5.0)
    stage.serving.observe(stage.clock.now_s())
    drain = Drain(id="r/2/0", instance_id="i-0001", deadline_at_s=9.0, reasons=(why(ReasonCode.SURPLUS),))
    terminate = Terminate(id="r/2/1", instance_id="i-0002", reasons=())
    before = len(stage.events)
    events = stage.act(plan(launch("a", number=2), drains=[drain], terminates=[terminate]))[before:]
    done = [event.verb if isinstance(event, Acted) else event.kind for event in events]
    assert done == ["drain", "publish", "terminate", "launch_tried", "launch_granted"]


def test_a_refused_drain_terminate_or_publish_is_journalled_and_stops_nothing() -> None:
    stage = Stage(offering("a"))
    stage.serving.failures.append(Transient("no board"))
    drain = Drain(id="r/1/0", instance_id="i-1", deadline_at_s=9.0, reasons=())
    terminate = Terminate(id="r/1/1", instance_id="i-2", reasons=())
    events = stage.act(plan(launch("a"), drains=[drain], terminates=[terminate]))
    failures = [(e.verb, e.error.split(":")[0]) for e in events if isinstance(e, ActFailed)]
    assert failures == [("drain", "Transient"), ("terminate", "InvalidInstanceID.NotFound")]
    assert stage.owned() == {"a": 1}


# ---- the deadline ---------------------------------------------------------------------------------------------------
class SlowCloud(FakeCloud):
    """Launches and terminates take effect, and answer only when `gate` opens."""

    gate: threading.Event

    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        granted = super().launch(offering, count, token)
        self.gate.wait(10.0)
        return granted

    def terminate(self, instance_id: str) -> None:
        self.gate.wait(10.0)


def slow(stage: Stage) -> SlowCloud:
    cloud = SlowCloud(CloudConfig(cluster="c", ray_address="a", offerings=(offering("a"), offering("b"))), stage.clock)
    cloud.gate = threading.Event()
    return cloud


def until(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 5.0
    while not done() and time.monotonic() < end_s:
        time.sleep(0.005)
    assert done()


def test_a_call_still_open_at_the_deadline_is_ambiguous_and_its_late_answer_is_ignored() -> None:
    stage = Stage(offering("a"), offering("b"))
    cloud = slow(stage)
    pool = Pool(workers=2, deadline_s=0.1)
    events = stage.act(plan(launch("a", "b", count=9)), pool, cloud)
    ambiguous = only(LaunchAmbiguous, events)
    assert [(e.token, e.why) for e in ambiguous if isinstance(e, LaunchAmbiguous)] == [
        ("r/1/0/0", "no answer by the tick's deadline")
    ]
    cloud.gate.set()
    ended = threading.Event()
    pool.run([ended.set])
    until(ended.is_set)
    assert stage.events == events  # neither a grant nor a second attempt for what was missing
    assert len(cloud.launches) == 1


def test_one_hanging_call_does_not_hold_up_the_others() -> None:
    stage = Stage(offering("a"), offering("b"))
    cloud = slow(stage)
    terminate = Terminate(id="r/1/9", instance_id="i-1", reasons=())
    began_s = time.monotonic()
    events = stage.act(plan(launch("a"), terminates=[terminate]), Pool(workers=2, deadline_s=0.1), cloud)
    assert time.monotonic() - began_s < 5.0
    failed = [e.error for e in events if isinstance(e, ActFailed)]
    assert failed == ["no answer by the tick's deadline"]
    assert [row[1] for row in tried(events)] == ["a"]
    cloud.gate.set()


def test_a_launch_that_no_worker_was_free_for_is_left_to_the_next_tick() -> None:
    stage = Stage(offering("a"), offering("b"))
    cloud = slow(stage)
    events = stage.act(plan(launch("a"), launch("b", number=1)), Pool(workers=1, deadline_s=0.1), cloud)
    assert [row[1] for row in tried(events)] == ["a"]
    cloud.gate.set()


def test_many_launches_on_a_pool_are_each_journalled_whole() -> None:
    names = [f"p{n}" for n in range(20)]
    stage = Stage(*(offering(name, count=n % 2) for n, name in enumerate(names)))
    launches = [launch(names[n], names[(n + 1) % 20], number=n) for n in range(0, 20, 2)]

    class Locked(FakeCloud):
        """The books of the fake are not for several threads at once."""

        def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
            with lock:
                return stage.cloud.launch(offering, count, token)

    lock = threading.Lock()
    cloud = Locked(CloudConfig(cluster="c", ray_address="a", offerings=(offering("p0"),)), stage.clock)
    events = stage.act(plan(*launches), Pool(workers=8, deadline_s=5.0), cloud)
    assert len(only(LaunchRefused, events)) == len(only(LaunchGranted, events)) == 10
    assert sum(stage.owned().values()) == 10
    assert not stage.ledger.beliefs.intents


def test_a_journal_that_cannot_be_written_stops_the_launch_before_the_call() -> None:
    stage = Stage(offering("a"))

    class Full(MemoryJournal):
        def append(self, event: Event, *, durable: bool) -> Record:
            if isinstance(event, LaunchTried):
                raise Transient("disk full")
            return super().append(event, durable=durable)

    stage.ledger.journal = Full()
    with pytest.raises(Transient, match="disk full"):
        stage.act(plan(launch("a")))
    assert stage.owned() == {}


def test_an_adapters_defect_is_ambiguous_and_not_swallowed() -> None:
    stage = Stage(offering("a"))

    class Broken(FakeCloud):
        def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
            raise KeyError("surprise")

    cloud = Broken(CloudConfig(cluster="c", ray_address="a", offerings=(offering("a"),)), stage.clock)
    with pytest.raises(KeyError):
        stage.act(plan(launch("a")), cloud=cloud)
    assert [e.why for e in stage.events if isinstance(e, LaunchAmbiguous)] == [
        "defect of the adapter: KeyError('surprise')"
    ]


def test_offerings_the_cloud_no_longer_lists_speak_for_themselves_only() -> None:
    stage = Stage(offering("a", count=0), offering("b"))
    empty: dict[str, Offering] = {}
    act = Act(
        now_s=1.0,
        serving=stage.serving,
        cloud=stage.cloud,
        record=stage.ledger.record,
        executor=Inline(),
        offerings=empty,
    )
    act.carry_out(plan(launch("a", "b")), MESSAGE)
    assert stage.owned() == {"b": 1}
