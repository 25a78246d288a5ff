"""Decide again what a journal says was decided, and compare: the same input must give the same bytes.

Pure: folds records with `core.learn` and judges with the loop's own `judge`. Where the journal was written by other
software or on another processor, numbers may differ by 1e-6 of their size and any action that changed is named. May not
read files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isclose
from typing import Any

from autoscaler.core.beliefs import EMPTY, Beliefs
from autoscaler.core.events import PLAN, CheckFailed, Observed, Opened, Planned, Record, Snapshot
from autoscaler.core.learn import learn
from autoscaler.core.model import Observation, Plan
from autoscaler.core.snapshot import save
from autoscaler.loop import judge

RELATIVE_TOLERANCE = 1e-6
DIFFERENCES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A plan that came out otherwise. `changes`: ``launches[run/3/0].count: 2 → 1``, journalled → decided again."""

    seq: int
    plan_id: str
    changes: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Replay:
    """What a replay found. `exact` is False once any run in the journal had other software than this one."""

    records: int = 0
    plans: int = 0
    identical: int = 0
    check_failures: int = 0
    snapshots: int = 0
    runs: int = 0
    exact: bool = True
    differences: list[Difference] = field(default_factory=list)


def replay(records: Iterable[Record], versions: tuple[tuple[str, str], ...]) -> Replay:
    """Fold `records`, deciding again at each plan. `versions` are this software's (`software.versions`)."""
    found = Replay()
    beliefs: Beliefs = EMPTY
    seen: Observation | None = None
    exact, runs = True, set[str]()
    for record in records:
        event = record.event
        match event:
            case Opened():
                exact = event.versions == versions
                found.exact = found.exact and exact
                runs.add(event.run_id)
            case Observed():
                seen = event.observation
            case Planned() if seen is not None:
                _compare_plans(found, record.seq, event.plan, _judge(seen, beliefs, event.at_s, event.plan.id), exact)
            case CheckFailed() if seen is not None:
                _compare_failures(found, record.seq, event, _judge(seen, beliefs, event.at_s, event.plan_id))
            case Snapshot():
                _compare_snapshot(found, record, beliefs)
            case _:
                pass
        beliefs = learn(beliefs, event)
        found.records += 1
    found.runs = len(runs)
    return found


def _judge(seen: Observation, beliefs: Beliefs, at_s: float, plan_id: str) -> Plan | CheckFailed:
    assert beliefs.policy is not None, "a plan was journalled before any policy"
    return judge(seen, beliefs.policy, beliefs, at_s, plan_id)


def _compare_plans(found: Replay, seq: int, journalled: Plan, again: Plan | CheckFailed, exact: bool) -> None:
    found.plans += 1
    if isinstance(again, CheckFailed):
        change = f"violations: none → {'; '.join(again.violations)}"
        found.differences.append(Difference(seq=seq, plan_id=journalled.id, changes=(change,)))
        return
    # The journalled plan has been through JSON; the other one goes through it too before bytes are compared.
    old, new = PLAN.dump_json(journalled), PLAN.dump_json(PLAN.validate_json(PLAN.dump_json(again)))
    if old == new:
        found.identical += 1
        return
    tolerance = 0.0 if exact else RELATIVE_TOLERANCE
    changes = tuple(
        changed("", PLAN.dump_python(journalled, mode="json"), PLAN.dump_python(again, mode="json"), tolerance)
    )
    if changes:
        found.differences.append(Difference(seq=seq, plan_id=journalled.id, changes=changes))


def _compare_failures(found: Replay, seq: int, journalled: CheckFailed, again: Plan | CheckFailed) -> None:
    found.check_failures += 1
    violations = again.violations if isinstance(again, CheckFailed) else ()
    if violations != journalled.violations:
        change = f"violations: {'; '.join(journalled.violations)} → {'; '.join(violations) or 'none'}"
        found.differences.append(Difference(seq=seq, plan_id=journalled.plan_id, changes=(change,)))


def _compare_snapshot(found: Replay, record: Record, beliefs: Beliefs) -> None:
    """A snapshot must say what the records before it amount to; the oldest kept segment has none before it."""
    event = record.event
    assert isinstance(event, Snapshot)
    found.snapshots += 1
    if found.records >= 3 and save(beliefs) != event.beliefs_json:
        change = "beliefs: the snapshot differs from the fold of the records before it"
        found.differences.append(Difference(seq=record.seq, plan_id="snapshot", changes=(change,)))


def changed(path: str, old: Any, new: Any, tolerance: float) -> Iterator[str]:
    """Where two JSON values differ by more than `tolerance` of their size, deepest first, rows named by their ids."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys() if old.keys() != new.keys() else old:
            yield from changed(f"{path}.{key}" if path else key, old.get(key), new.get(key), tolerance)
    elif isinstance(old, list) and isinstance(new, list):
        yield from _changed_rows(path, old, new, tolerance)
    elif _number(old) and _number(new):
        if not isclose(old, new, rel_tol=tolerance, abs_tol=0.0):
            yield f"{path}: {old!r} → {new!r}"
    elif old != new:
        yield f"{path}: {old!r} → {new!r}"


def _changed_rows(path: str, old: list[Any], new: list[Any], tolerance: float) -> Iterator[str]:
    before, after = _named(old), _named(new)
    for name in [*before, *(name for name in after if name not in before)]:
        where = f"{path}[{name}]"
        if name not in after:
            yield f"{where}: no longer there"
        elif name not in before:
            yield f"{where}: new"
        else:
            yield from changed(where, before[name], after[name], tolerance)


def _named(rows: list[Any]) -> dict[str, Any]:
    """Rows by id, or service and variant, or position."""
    names: dict[str, Any] = {}
    for number, row in enumerate(rows):
        name = str(number)
        if isinstance(row, dict):
            name = row.get("id") or "/".join(str(row[key]) for key in ("service", "variant") if key in row) or name
        names[name] = row
    return names


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
