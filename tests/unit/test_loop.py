"""One tick after another: what is journalled, what is done, and what a crash between any two records leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from autoscaler import loop
from autoscaler.adapters.journal import FileJournal, MemoryJournal
from autoscaler.core.beliefs import EMPTY
from autoscaler.core.events import (
    EVENT,
    Acted,
    ActFailed,
    CheckFailed,
    Configured,
    Event,
    LaunchGranted,
    LaunchTried,
    Observed,
    Opened,
    Planned,
    PolicyRefused,
    Record,
)
from autoscaler.core.learn import fold
from autoscaler.core.model import CloudView, Missing
from autoscaler.core.snapshot import save
from autoscaler.ports import Broken, Policy, Transient
from autoscaler.software import versions
from tests.scene import Scene, offering, service, shapes_of, unit

KEY = "support/chat"


def scene(*, count: int = 8, min_replicas: int = 3) -> Scene:
    """A service that needs three one-GPU instances, of which the cheapest pool may hold `count`."""
    made = Scene(
        units=[unit(service(min_replicas=min_replicas))],
        offerings=[offering("cheap", price=1.0, count=count), offering("dear", price=2.0)],
    )
    made.load(KEY, 0.5)
    return made


def kinds(made: Scene) -> list[str]:
    return [event.kind for event in made.events]


def test_a_tick_is_journalled_in_the_order_of_the_loop() -> None:
    made = scene()
    made.run(10.0)
    assert kinds(made) == [
        "opened",
        "configured",
        "observed",
        "forecasted",
        "planned",
        "acted",
        "launch_tried",
        "launch_granted",
    ]


def test_what_is_decided_on_is_what_the_journal_gives_back() -> None:
    made = scene(count=1)
    made.run(200.0)
    again = fold(EVENT.validate_json(EVENT.dump_json(event)) for event in made.events)
    assert save(again) == save(made.controller.ledger.beliefs)


def test_the_clock_never_goes_back_behind_the_journal() -> None:
    made = scene()
    made.run(20.0)
    made.clock.advance(-500.0)
    plan = made.run(10.0)
    assert plan.at_s == made.plans[-2].at_s
    made.start()
    assert made.run(10.0).at_s == plan.at_s


def test_the_clock_is_read_once_a_tick() -> None:
    made = scene()
    reads = []
    clock = made.clock

    class Counting:
        def now_s(self) -> float:
            reads.append(1)
            return clock.now_s()

    made.controller.clock = Counting()
    made.run(30.0)
    assert len(reads) == 3


@pytest.mark.parametrize("port", ["metrics", "serving", "cloud"])
def test_a_port_that_fails_is_missing_with_its_reason_and_the_tick_goes_on(port: str) -> None:
    made = scene()
    made.run(300.0)
    getattr(made, port).failures.append(Transient("gone fishing"))
    made.run(10.0)
    seen = [event.observation for event in made.events if isinstance(event, Observed)][-1]
    view = {"metrics": seen.loads, "serving": seen.serving, "cloud": seen.cloud}[port]
    assert view == Missing(why="Transient: gone fishing")
    assert not made.plans[-1].terminates
    assert not made.plans[-1].drains


def test_targets_are_published_every_tick_with_a_rising_number() -> None:
    made = scene()
    made.run(50.0)
    assert [message.seq for message in made.serving.published] == [1, 2, 3, 4, 5]
    assert len({message.run_id for message in made.serving.published}) == 1


def test_runs_have_names_of_their_own() -> None:
    made = scene()
    made.run(10.0)
    made.start()
    made.run(10.0)
    runs = [event.run_id for event in made.events if isinstance(event, Opened)]
    assert len(set(runs)) == 2
    tokens = [event.token for event in made.events if isinstance(event, LaunchTried)]
    assert len(set(tokens)) == len(tokens)
    assert all(len(token) <= 64 for token in tokens)


def test_advice_is_journalled_and_nothing_is_done() -> None:
    made = scene()
    made.controller.advise = True
    for _ in range(3):
        made.controller.tick()
    assert set(kinds(made)) == {"opened", "configured", "observed", "forecasted", "planned"}
    assert not made.serving.published
    assert not made.cloud.launches
    assert any(event.plan.launches for event in made.events if isinstance(event, Planned))


# ---- policy ---------------------------------------------------------------------------------------------------------
@dataclass
class Source:
    """A policy source that answers what a test queued."""

    answers: list[Policy | Broken | None] = field(default_factory=list)

    def poll(self, now_s: float) -> Policy | Broken | None:
        return self.answers.pop(0) if self.answers else None


def policy_of(made: Scene, digest: str) -> Policy:
    return Policy(policy=made.policy, shapes=shapes_of(made.policy), digest=digest)


def test_a_broken_policy_is_journalled_and_the_last_good_one_stays() -> None:
    made = scene()
    made.run(10.0)
    made.controller.policy_source = Source([Broken(problems=("units/x.yaml:3: priority: too large",))])
    plan = made.run(10.0)
    assert [event.problems for event in made.events if isinstance(event, PolicyRefused)] == [
        ("units/x.yaml:3: priority: too large",)
    ]
    assert [target.wanted for target in plan.targets] == [3]
    assert made.controller.ledger.beliefs.policy == made.policy


def test_without_any_policy_nothing_is_planned() -> None:
    made = scene()
    made.controller.policy_source = Source([Broken(problems=("empty",))])
    assert made.controller.tick() is None
    assert kinds(made) == ["opened", "policy_refused"]


def test_only_a_changed_policy_is_journalled_again() -> None:
    made = scene()
    made.controller.policy_source = Source([policy_of(made, d) for d in ("one", "one", "two")])
    made.run(30.0)
    assert [event.digest for event in made.events if isinstance(event, Configured)] == ["one", "two"]


def test_a_policy_that_is_mended_back_ends_the_refusal() -> None:
    made = scene()
    made.controller.policy_source = Source([policy_of(made, "one"), Broken(problems=("no",)), policy_of(made, "one")])
    refused = []
    for _ in range(3):
        made.run(10.0)
        refused.append(made.controller.ledger.beliefs.policy_refused)
    assert refused == [False, True, False]
    assert [e.digest for e in made.events if isinstance(e, Configured)] == ["one", "one"]


def test_a_restart_with_the_same_policy_does_not_journal_it_again() -> None:
    made = scene()
    made.run(10.0)
    made.start()
    made.run(10.0)
    assert kinds(made).count("configured") == 1


# ---- check ----------------------------------------------------------------------------------------------------------
def test_a_plan_that_breaks_an_invariant_is_not_acted_on_and_the_last_targets_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = scene()
    made.run(20.0)
    launched, targets = len(made.cloud.launches), made.serving.published[-1].targets
    made.load(KEY, 50.0)
    monkeypatch.setattr(loop, "check", lambda *_, **__: ("sky is falling",))
    made.controller.tick()
    failed = made.events[-2]
    assert isinstance(failed, CheckFailed)
    assert failed.violations == ("sky is falling",)
    assert kinds(made)[-3:] == ["forecasted", "check_failed", "acted"]
    assert len(made.cloud.launches) == launched
    assert made.serving.published[-1].targets == targets
    assert made.serving.published[-1].seq == 3


def test_a_first_plan_that_breaks_an_invariant_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scene()
    monkeypatch.setattr(loop, "check", lambda *_, **__: ("sky is falling",))
    made.controller.tick()
    assert not made.serving.published
    assert not made.cloud.launches


def test_a_service_that_left_the_policy_while_its_plan_is_the_last_good_one_is_not_published() -> None:
    made = scene()
    made.run(200.0)
    made.policy = made.policy.model_copy(update={"units": (unit(service("other")),)})
    made.source.set(made.policy)
    made.serving.failures.append(Transient("not seen"))
    made.controller.tick()
    assert made.serving.published[-1].targets == {"support.other.l4": 0}
    assert [route.service for route in made.serving.published[-1].services] == ["support/other"]


# ---- crashes --------------------------------------------------------------------------------------------------------
class CrashError(BaseException):
    """The process is gone: nothing in it may handle this."""


class Mortal(MemoryJournal):
    """Kills the controller at append number `dies_at`, before or after it is written.

    `power_cut` also loses what was not made durable.
    """

    dies_at = 0
    after = False
    power_cut = False
    durable_count = 0

    def append(self, event: Event, *, durable: bool) -> Record:
        dying = len(self.records) + 1 == self.dies_at
        if dying:
            self.dies_at = 0
        if dying and not self.after:
            self._die()
        record = super().append(event, durable=durable)
        if durable:
            self.durable_count = record.seq
        if dying:
            self._die()
        return record

    def _die(self) -> None:
        if self.power_cut:
            del self.records[self.durable_count :]
        raise CrashError


SETTLED_S = 300.0


def lagging(made: Scene, lag_s: float) -> None:
    """From now on the cloud lists an instance only so long after its launch, as EC2 may."""
    describe = made.cloud.describe

    def late(now_s: float) -> CloudView:
        view = describe(now_s)
        return replace(view, instances=tuple(r for r in view.instances if now_s >= r.launched_at_s + lag_s))

    made.cloud.describe = late  # type: ignore[method-assign]


def owned(made: Scene) -> Counter[str]:
    """Instances that are paid for, by offering."""
    rows = made.cloud.supply.machines.values()
    return Counter(row.offering for row in rows if row.state in ("pending", "running"))


def bought(made: Scene) -> set[str]:
    """Collects every instance that the cloud gives from now on, whatever becomes of it."""
    launch, ids = made.cloud.launch, set[str]()

    def watched(offering: str, count: int, token: str) -> tuple[str, ...]:
        granted = launch(offering, count, token)
        ids.update(granted)
        return granted

    made.cloud.launch = watched  # type: ignore[method-assign]
    return ids


def records_until_settled() -> int:
    """Records of the ticks in which instances are bought, when nothing goes wrong."""
    made = scene(count=1)
    made.run(40.0)
    assert owned(made) == {"cheap": 1, "dear": 2}
    return len(made.journal.records)


@pytest.mark.parametrize("lag_s", [0.0, 25.0], ids=["listed at once", "listed late"])
@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
def test_a_crash_at_any_record_buys_nothing_twice_and_leaks_nothing(after: bool, power_cut: bool, lag_s: float) -> None:
    for dies_at in range(1, records_until_settled() + 1):
        made = scene(count=1)
        lagging(made, lag_s)
        ids = bought(made)
        made.journal = Mortal()
        made.journal.dies_at, made.journal.after, made.journal.power_cut = dies_at, after, power_cut
        made.start()
        with pytest.raises(CrashError):
            made.run(40.0)
        made.start()
        made.run(SETTLED_S)
        where = f"crash at record {dies_at}"
        assert owned(made) == {"cheap": 1, "dear": 2}, where
        assert len(ids) == 3, f"{where}: something was bought and given back"
        known = made.controller.ledger.beliefs.instances
        assert known.keys() == made.cloud.supply.machines.keys(), where
        assert not made.controller.ledger.beliefs.intents, where


def test_a_crash_inside_the_clouds_call_is_settled_by_the_listing() -> None:
    made = scene(count=1)
    ids = bought(made)
    launch = made.cloud.launch

    def dies(offering: str, count: int, token: str) -> tuple[str, ...]:
        launch(offering, count, token)
        raise CrashError

    made.cloud.launch = dies  # type: ignore[method-assign]
    with pytest.raises(CrashError):
        made.run(10.0)
    made.cloud.launch = launch  # type: ignore[method-assign]
    made.start()
    made.run(SETTLED_S)
    assert owned(made) == {"cheap": 1, "dear": 2}
    assert len(ids) == 3


def test_a_lost_reply_is_settled_by_the_listing() -> None:
    made = scene(count=1)
    lagging(made, 25.0)
    made.cloud.lose_replies = 1
    made.run(SETTLED_S)
    assert owned(made) == {"cheap": 1, "dear": 2}
    assert len(made.cloud.supply.machines) == 3
    assert len([row for row in made.events if isinstance(row, LaunchGranted)]) == 1


def test_a_journal_that_cannot_be_written_fails_the_tick_and_the_next_one_goes_on() -> None:
    made = scene()

    class Full(MemoryJournal):
        full = True

        def append(self, event: Event, *, durable: bool) -> Record:
            if self.full and isinstance(event, Planned):
                raise Transient("disk full")
            return super().append(event, durable=durable)

    journal = made.journal = Full()
    made.start()
    with pytest.raises(Transient, match="disk full"):
        made.controller.tick()
    assert not made.cloud.launches
    assert not made.serving.published
    journal.full = False
    made.run(SETTLED_S)
    assert owned(made) == {"cheap": 3}


# ---- segments -------------------------------------------------------------------------------------------------------
def with_files(made: Scene, folder: Path, segment_bytes: int) -> FileJournal:
    journal = FileJournal(folder, segment_bytes=segment_bytes)
    made.journal = journal  # type: ignore[assignment]
    made.start()
    return journal


def tick(made: Scene, count: int) -> None:
    for _ in range(count):
        assert made.controller.tick() is not None
        made.clock.advance(10.0)


def test_a_restart_from_the_newest_segment_believes_the_same_as_from_all_of_them(tmp_path: Path) -> None:
    made = scene(count=1)
    journal = with_files(made, tmp_path, segment_bytes=20_000)
    tick(made, 40)
    before = save(made.controller.ledger.beliefs)
    journal.close()
    assert len(list(tmp_path.glob("*.jsonl"))) > 1
    newest = FileJournal(tmp_path)
    records: Callable[[], list[Record]] = lambda: list(newest.read())  # noqa: E731
    assert records()[2].event.kind == "snapshot"
    assert save(fold(record.event for record in records())) == before
    assert fold(record.event for record in records()) != EMPTY


def test_the_loop_goes_on_over_a_new_segment_as_if_there_were_none(tmp_path: Path) -> None:
    cut, whole = scene(count=1), scene(count=1)
    with_files(cut, tmp_path, segment_bytes=20_000)
    tick(cut, 40)
    tick(whole, 40)
    assert save(cut.controller.ledger.beliefs) == save(whole.controller.ledger.beliefs)
    assert owned(cut) == owned(whole)


def test_acts_that_fail_are_journalled() -> None:
    made = scene()
    made.run(10.0)
    made.serving.failures += [Transient("not seen"), Transient("no board")]
    made.run(10.0)
    acts = [event for event in made.events if isinstance(event, Acted | ActFailed)]
    last = acts[-1]
    assert isinstance(last, ActFailed)
    assert (last.verb, last.error) == ("publish", "Transient: no board")


def test_versions_name_what_arithmetic_depends_on() -> None:
    names = dict(versions())
    assert names.keys() == {"python", "numpy", "pydantic", "quartermaster-serve", "sources", "cpu"}
    assert all(names.values())
