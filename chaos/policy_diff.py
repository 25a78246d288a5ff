"""`qm diff OLD NEW --scenario S`: what a change of policy would do, by running both in the same world.

Two folders of policies, one scenario, the same seeds, so the same arrivals, refusals and faults: what differs is what
the policy does. May not read a clock; the same files give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from autoscaler.commands.outcome import OK, VIOLATED, BadInput, check_json, write_json
from chaos.demand import TraceProblems
from chaos.pools import check_supply
from chaos.report import Report
from chaos.scenario import Scenario, load_scenario
from chaos.streams import check_traces
from policies.load import origins

POINT = 0.005  # of the requests: a smaller difference is nobody's gain
MAX_SEEDS = 100
PLAIN_WIDTH = 130


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Change(_Row):
    """One value in force that differs; None where a side does not have it."""

    key: str
    old: Any
    new: Any


class Pair(_Row):
    """One figure under both policies, a mean over the seeds; None where there was nothing to measure."""

    old: float | None
    new: float | None


class ServiceDiff(_Row):
    """`slo_attainment` is a fraction of requests, counts are of one run. `verdict`: wins, loses or same."""

    priority: Pair
    fraction: Pair
    slo_attainment: Pair
    shed: Pair
    overflowed: Pair
    tokens: Pair
    verdict: str


class PolicyDiff(_Row):
    """What `qm diff --json` writes. Money is USD of one run, `units` holds each unit's part of it."""

    scenario: str
    seeds: tuple[int, ...]
    changes: tuple[Change, ...]
    services: dict[str, ServiceDiff]
    units: dict[str, Pair]
    cost_usd: Pair
    priority_inversion_s: Pair
    wins: tuple[str, ...]
    loses: tuple[str, ...]
    violations: tuple[dict[str, Any], ...]


def diff_command(old: Path, new: Path, scenario: str, seeds: str, json_file: str | None) -> int:
    """Runs both, prints or writes the difference. 1 when an invariant was violated. Raises BadInput or Problems."""
    check_json(json_file)
    numbers = _seeds(seeds)
    before, after = (_scenario(scenario, folder) for folder in (old, new))
    found = diff(before, after, _changes(old, new), numbers)
    if json_file is not None:
        write_json(json_file, found.model_dump_json(indent=1).encode())
    if json_file != "-":
        _show(found)
    return VIOLATED if found.violations else OK


def _seeds(text: str) -> tuple[int, ...]:
    """``A:B`` without B, or one number."""
    first, colon, last = text.partition(":")
    try:
        numbers = tuple(range(int(first), int(last))) if colon else (int(first),)
    except ValueError:
        numbers = ()
    if not 0 < len(numbers) <= MAX_SEEDS or numbers[0] < 0:
        raise BadInput(f"--seeds {text}: give A:B with 0 <= A < B and at most {MAX_SEEDS} seeds, or one number")
    return numbers


def _scenario(name: str, folder: Path) -> Scenario:
    scenario = load_scenario(name, policies=folder)
    problems: list[str] = []
    for check in (check_traces, check_supply):
        try:
            check(scenario)
        except TraceProblems as error:
            problems += error.problems
    if problems:
        raise BadInput(*problems)
    return scenario


def _changes(old: Path, new: Path) -> tuple[Change, ...]:
    before, after = ({origin.key: origin.value for origin in origins(folder)} for folder in (old, new))
    return tuple(
        Change(key=key, old=before.get(key), new=after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    )


def diff(before: Scenario, after: Scenario, changes: tuple[Change, ...], seeds: Sequence[int]) -> PolicyDiff:
    """The difference between two scenarios that differ in their policies."""
    from chaos.world import simulate

    olds, news = ([simulate(scenario, "ours", seed) for seed in seeds] for scenario in (before, after))
    keys = sorted({*olds[0].services, *news[0].services})
    services = {key: _service(key, olds, news) for key in keys}
    units = sorted({unit for report in (*olds, *news) for unit in report.cost_usd_by.unit})
    return PolicyDiff(
        scenario=before.name,
        seeds=tuple(seeds),
        changes=changes,
        services=services,
        units={unit: _pair(olds, news, lambda r, u=unit: r.cost_usd_by.unit.get(u, 0.0)) for unit in units},
        cost_usd=_pair(olds, news, lambda report: report.cost_usd),
        priority_inversion_s=_pair(olds, news, lambda report: report.priority_inversion_s),
        wins=tuple(key for key, row in services.items() if row.verdict == "wins"),
        loses=tuple(key for key, row in services.items() if row.verdict == "loses"),
        violations=tuple(_violations("old", olds)) + tuple(_violations("new", news)),
    )


def _pair(olds: Sequence[Report], news: Sequence[Report], of: Any) -> Pair:
    return Pair(old=_mean(map(of, olds)), new=_mean(map(of, news)))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _service(key: str, olds: Sequence[Report], news: Sequence[Report]) -> ServiceDiff:
    def figure(name: str) -> Pair:
        return _pair(olds, news, lambda report: getattr(report.services[key], name) if key in report.services else None)

    met = figure("slo_attainment")
    return ServiceDiff(
        priority=figure("priority"),
        fraction=figure("fraction"),
        slo_attainment=met,
        shed=figure("shed"),
        overflowed=figure("overflowed"),
        tokens=figure("tokens"),
        verdict=_verdict(met),
    )


def _verdict(met: Pair) -> str:
    if met.old is None or met.new is None or abs(met.new - met.old) < POINT:
        return "same"
    return "wins" if met.new > met.old else "loses"


def _violations(side: str, reports: Sequence[Report]) -> Iterable[dict[str, Any]]:
    for report in reports:
        for each in report.violations:
            yield {"policy": side, "seed": report.seed, **each.model_dump()}


# ---- for a person ---------------------------------------------------------------------------------------------------
def _show(found: PolicyDiff) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    for line in _heading(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    table = Table()
    for name in ("service", "wanted", "SLO met before", "after", "shed before", "after", "verdict"):
        table.add_column(name, justify="left" if name in ("service", "verdict") else "right")
    rows = sorted(
        found.services.items(), key=lambda item: (-(item[1].priority.new or item[1].priority.old or 0), item[0])
    )
    for key, row in rows:
        wanted = row.fraction.new if row.fraction.new is not None else row.fraction.old
        met, shed = row.slo_attainment, row.shed
        table.add_row(key, _percent(wanted), _percent(met.old), _percent(met.new), _count(shed.old), _count(shed.new),
                      row.verdict)  # fmt: skip
    console.print(table)
    costs = [*found.units.items(), ("in all", found.cost_usd)]
    for name, pair in costs:
        console.print(f"{name}: {_usd(pair.old)} -> {_usd(pair.new)} USD", markup=False, highlight=False)


def _heading(found: PolicyDiff) -> Iterable[str]:
    seeds = f"{len(found.seeds)} seeds" if len(found.seeds) > 1 else f"seed {found.seeds[0]}"
    yield f"{found.scenario}, {seeds}: {len(found.changes)} values differ"
    for change in found.changes:
        yield f"  {change.key}: {json.dumps(change.old)} -> {json.dumps(change.new)}"
    for name, keys in (("win", found.wins), ("lose", found.loses)):
        yield f"who would {name}: {', '.join(keys) or 'nobody'}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100.0 * value:.2f} %"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
