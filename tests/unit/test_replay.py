"""A journal decided again: byte for byte on the same software, by name what changed otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from autoscaler import loop
from autoscaler.adapters.journal import FileJournal, read_all
from autoscaler.core.events import RECORD, CheckFailed, Configured, Event, Opened, Planned, Record, Snapshot
from autoscaler.core.model import Plan
from autoscaler.replay import changed, replay
from autoscaler.software import versions
from tests.scene import Scene, offering, service, unit


def written(*, restart: bool = False) -> list[Record]:
    """A shortage with growth and decline, as it reads back from its journal."""
    made = Scene(
        units=[unit(service(min_replicas=2))],
        offerings=[offering("cheap", price=1.0, count=1), offering("dear", price=2.0)],
    )
    made.load("support/chat", 0.5)
    made.run(200.0)
    if restart:
        made.start()
    made.load("support/chat", 20.0)
    made.run(300.0)
    made.load("support/chat", 0.0)
    made.run(1800.0)
    return [RECORD.validate_json(RECORD.dump_json(record)) for record in made.journal.records]


def edited(records: Iterable[Record], number: int, **changes: object) -> list[Record]:
    """The records with the plan of the first `number`-th Planned event changed."""
    rows, planned = list(records), 0
    for position, record in enumerate(rows):
        if isinstance(record.event, Planned):
            planned += 1
            if planned == number:
                plan = replace(record.event.plan, **changes)  # type: ignore[arg-type]
                rows[position] = replace(record, event=replace(record.event, plan=plan))
    return rows


def plans(records: Iterable[Record]) -> list[Plan]:
    return [record.event.plan for record in records if isinstance(record.event, Planned)]


@pytest.mark.parametrize("restart", [False, True], ids=["one run", "two runs"])
def test_every_plan_of_a_run_comes_out_byte_for_byte(restart: bool) -> None:
    records = written(restart=restart)
    found = replay(records, versions())
    assert (found.plans, found.identical, found.differences) == (230, 230, [])
    assert (found.records, found.runs, found.exact) == (len(records), 1 + restart, True)
    assert any(plan.launches for plan in plans(records))
    assert any(plan.terminates for plan in plans(records))


def test_a_changed_action_is_named_with_both_values() -> None:
    records = written()
    launches = plans(records)[0].launches
    changed_plan = edited(records, 1, launches=(replace(launches[0], count=7),))
    found = replay(changed_plan, versions())
    assert found.identical == 229
    assert found.differences[0].changes == (f"launches[{launches[0].id}].count: 7 → 2",)
    assert found.differences[0].plan_id == plans(records)[0].id


def test_an_action_that_is_no_longer_taken_and_a_new_one_are_named() -> None:
    records = written()
    launch = plans(records)[0].launches[0]
    found = replay(edited(records, 1, launches=()), versions())
    assert found.differences[0].changes == (f"launches[{launch.id}]: new",)
    found = replay(edited(records, 2, launches=(launch,)), versions())
    assert found.differences[0].changes == (f"launches[{launch.id}]: no longer there",)


def elsewhere(records: Iterable[Record]) -> list[Record]:
    """The same journal, written by other software."""
    rows = []
    for record in records:
        event: Event = record.event
        if isinstance(event, Opened):
            event = replace(event, versions=(("python", "2.7"),))
        rows.append(replace(record, event=event))
    return rows


def nudged(plan: Plan, factor: float) -> dict[str, object]:
    rows = tuple(replace(row, capacity_rps_per_replica=row.capacity_rps_per_replica * factor) for row in plan.routes)
    return {"routes": rows}


def test_other_software_may_differ_in_the_last_digits_only() -> None:
    records = elsewhere(written())
    close = edited(records, 5, **nudged(plans(records)[4], 1 + 1e-9))
    far = edited(records, 5, **nudged(plans(records)[4], 1 + 1e-5))
    found = replay(close, versions())
    assert (found.exact, found.identical, found.differences) == (False, 229, [])
    assert len(replay(far, versions()).differences) == 1


def test_the_same_software_may_not_differ_in_the_last_digit() -> None:
    records = written()
    found = replay(edited(records, 5, **nudged(plans(records)[4], 1 + 1e-9)), versions())
    assert "capacity_rps_per_replica" in found.differences[0].changes[0]


def test_a_plan_that_its_check_refused_must_be_refused_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Scene(units=[unit(service())], offerings=[offering("a")])
    made.load("support/chat", 0.5)
    made.run(10.0)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "check", lambda *_, **__: ("sky is falling",))
        made.controller.tick()
    found = replay(made.journal.records, versions())
    assert found.check_failures == 1
    assert found.differences[0].changes == ("violations: sky is falling → none",)
    assert any(isinstance(event, CheckFailed) for event in made.events)


def test_a_journal_cut_into_segments_replays_from_whichever_is_kept(tmp_path: Path) -> None:
    made = Scene(units=[unit(service(min_replicas=2))], offerings=[offering("a", count=1), offering("b", price=2.0)])
    made.load("support/chat", 0.5)
    journal = FileJournal(tmp_path, segment_bytes=150_000, keep=3)
    made.journal = journal  # type: ignore[assignment]
    made.start()
    for _ in range(400):
        made.controller.tick()
        made.clock.advance(10.0)
    assert len(list(tmp_path.glob("*.jsonl"))) == 3
    found = replay(read_all(tmp_path), versions())
    assert found.snapshots == 3
    assert found.plans == found.identical > 50
    assert found.runs == 1
    assert found.differences == []


def test_a_snapshot_that_differs_from_the_records_before_it_is_noticed() -> None:
    records = written()
    last = records[-1]
    beliefs = '{"at_s": 1.0}'
    found = replay(
        [*records, Record(seq=last.seq + 1, event=Snapshot(at_s=last.event.at_s, beliefs_json=beliefs))], versions()
    )
    assert [row.plan_id for row in found.differences] == ["snapshot"]


def test_a_changed_policy_replays_with_the_one_in_force() -> None:
    made = Scene(units=[unit(service(min_replicas=1))], offerings=[offering("a")])
    made.load("support/chat", 0.5)
    made.run(50.0)
    made.policy = made.policy.model_copy(update={"units": (unit(service(min_replicas=4)),)})
    made.source.set(made.policy)
    made.run(50.0)
    assert sum(isinstance(event, Configured) for event in made.events) == 2
    found = replay(made.journal.records, versions())
    assert found.identical == found.plans == 10
    assert sum(target.wanted for target in made.plans[-1].targets) == 4


@pytest.mark.parametrize(
    ("old", "new", "tolerance", "named"),
    [
        ({"a": 1}, {"a": 1}, 0.0, []),
        ({"a": 1}, {"a": 2}, 0.0, ["a: 1 → 2"]),
        ({"a": 1.0}, {"a": 1.0 + 1e-8}, 1e-6, []),
        ({"a": True}, {"a": False}, 1e-6, ["a: True → False"]),
        ({"a": None}, {"a": 1.0}, 1e-6, ["a: None → 1.0"]),
        ({"a": [{"service": "s", "variant": "v", "n": 1}]}, {"a": []}, 0.0, ["a[s/v]: no longer there"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, 0.0, ["a[1]: 2 → 3"]),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, 0.0, ["a.b: 'x' → 'y'"]),
    ],
)
def test_differences_are_named_by_where_they_are(old: object, new: object, tolerance: float, named: list[str]) -> None:
    assert list(changed("", old, new, tolerance)) == named
