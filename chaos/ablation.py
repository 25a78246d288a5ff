"""`qm bench ablate`: what each idea of the decision is worth, by running our controller with and without it.

The same scenarios, seeds, arrivals and refusals; one idea is switched off at a time. The switches are here and not in
the product: nobody who runs it needs them. May not read a clock.

- ``hold``: what nobody needs is given back at once, however scarce it is (`core.hold`).
- ``lead``: offerings are ranked by price alone, not by when they serve and how often they are refused or lost
  (`core.rank`).
- ``forecast``: planned is what is asked now, not what will be when capacity ordered now serves (`core.demand`).
- ``calendar``: declared events are not known, and what ends is used until it is taken (`core.declared`, `core.rank`).
- ``outage_age``: an outage of an hour is as likely to end in the next minute as one of a minute (`core.odds`).
- ``canary``: pools that all cool are not asked before their cooldown is over (`core.rank`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from autoscaler.commands.interrupt import NOTHING, interrupted
from autoscaler.commands.outcome import OK, BadInput, check_json, write_json
from autoscaler.core import decide, demand, hold, odds, place, rank, release
from autoscaler.core.model import Offering
from chaos.demand import TraceProblems
from chaos.pools import check_supply
from chaos.replaced import Change, replaced
from chaos.report import Report
from chaos.scenario import Scenario, load_scenario, public_scenarios
from chaos.scoreboard.figures import attainment, highest, met
from chaos.streams import check_traces
from forecasting.baselines import short_forecast

ALL = "everything"  # nothing switched off


def _without_hold() -> list[Change]:
    return [(hold.Scarcity, "hold_s", lambda *_: 0.0)]


def _without_lead() -> list[Change]:
    price: Callable[..., float] = lambda need, option, offering, odds, usd_per_h, *_: usd_per_h  # noqa: ARG005, E731

    return [(rank, "_usd", price)]


def _without_forecast() -> list[Change]:
    return [
        (demand, "short_forecast", lambda rates, now_s, _, quantiles: short_forecast(rates, now_s, 0.0, quantiles)),
        (demand, "long_forecast", lambda *_: None),
    ]


def _without_calendar() -> list[Change]:
    def there(offering: Offering, _: float, now_s: float) -> bool:
        begun = offering.starts_at_s is None or now_s >= offering.starts_at_s
        return begun and (offering.ends_at_s is None or now_s < offering.ends_at_s)

    unknown: list[Change] = [(module, "open_for_work", there) for module in (decide, rank)]
    return [*unknown, (release, "_ends_at_s", lambda *_: None), (demand, "begun", lambda *_: None)]


def _without_outage_age() -> list[Change]:
    real = odds.opens
    return [(odds, "opens", lambda _, within_s: real(0.0, within_s))]


def _without_canary() -> list[Change]:
    return [(place, "canary", lambda *_: None)]


IDEAS: dict[str, Callable[[], list[Change]]] = {
    "hold": _without_hold,
    "lead": _without_lead,
    "forecast": _without_forecast,
    "calendar": _without_calendar,
    "outage_age": _without_outage_age,
    "canary": _without_canary,
}


class Row(BaseModel):
    """One scenario without one idea (or with everything): means over the seeds.

    `attainment_top` is that of the services of the highest priority, weighted by requests; `refused` are launch calls.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scenario: str
    without: str
    seeds: tuple[int, ...]
    attainment_top: float
    attainment_all: float
    cost_usd: float
    refused: float
    granted: float
    priority_inversion_s: float
    violations: int


def ablated(scenario: Scenario, idea: str, seeds: Sequence[int]) -> Row:
    """Our controller on the scenario without `idea`; ``everything`` leaves it whole."""
    from chaos.world import simulate

    with nullcontext() if idea == ALL else replaced(IDEAS[idea]()):
        reports = [simulate(scenario, "ours", seed) for seed in seeds]
    return Row(
        scenario=scenario.name,
        without=idea,
        seeds=tuple(seeds),
        attainment_top=fmean(attainment(report, highest(report)) for report in reports),
        attainment_all=fmean(_attained_by_any(report) for report in reports),
        cost_usd=fmean(report.cost_usd for report in reports),
        refused=fmean(sum(report.launches.refused.values()) for report in reports),
        granted=fmean(report.launches.granted for report in reports),
        priority_inversion_s=fmean(report.priority_inversion_s for report in reports),
        violations=sum(len(report.violations) for report in reports),
    )


def _attained_by_any(report: Report) -> float:
    requests = sum(row.requests for row in report.services.values())
    return sum(met(report).values()) / requests if requests else 1.0


def table(scenarios: Iterable[Scenario], ideas: Sequence[str], seeds: Sequence[int]) -> Iterator[Row]:
    """Every scenario whole and without each idea, in order, as they are done."""
    for scenario in scenarios:
        for idea in (ALL, *ideas):
            yield ablated(scenario, idea, seeds)


def ablate_command(scenarios: str | None, ideas: str | None, seeds: str, json_file: str | None) -> int:
    """Prints a line for each run as it is done, and what each idea is worth beside the whole; always 0."""
    check_json(json_file)
    chosen = [name.strip() for name in (ideas or ",".join(IDEAS)).split(",")]
    unknown = [name for name in chosen if name not in IDEAS]
    if unknown:
        raise BadInput(f"--without: {unknown[0]!r} is no idea; give one of {', '.join(IDEAS)}")
    names = scenarios.split(",") if scenarios else list(public_scenarios())
    worlds = [_world(name.strip()) for name in names]
    rows: list[Row] = []
    with interrupted(NOTHING):
        for row in table(worlds, chosen, _seeds(seeds)):
            rows.append(row)
            print(_line(row, next(one for one in rows if one.scenario == row.scenario)), flush=True)
    if json_file:
        write_json(json_file, json.dumps([row.model_dump() for row in rows]).encode())
    return OK


def _world(name: str) -> Scenario:
    scenario = load_scenario(name)
    try:
        notes = (*scenario.stand_ins(), *check_traces(scenario))
        check_supply(scenario)
    except TraceProblems as error:
        raise BadInput(*error.problems) from error
    for note in notes:
        print(f"{scenario.name}: {note}", file=sys.stderr)
    return scenario


def _seeds(words: str) -> range:
    first, _, last = words.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise BadInput(f"--seeds: {words!r} is no range; give FROM:TO, the last not included, such as 0:3")
    return range(int(first), int(last))


def _line(row: Row, whole: Row) -> str:
    misses = (1.0 - row.attainment_top) / max(1e-9, 1.0 - whole.attainment_top)
    beside = f"  cost × {row.cost_usd / whole.cost_usd:.3f}  misses × {misses:.2f}" if row is not whole else ""
    what = "whole" if row is whole else f"without {row.without}"
    top, every = f"top {row.attainment_top:.4f}", f"all {row.attainment_all:.4f}"
    calls = f"refused {row.refused:.0f}/{row.granted:.0f}  inversion {row.priority_inversion_s:.0f} s"
    return f"{row.scenario:12} {what:18} ${row.cost_usd:10.2f}  {top}  {every}  {calls}{beside}"
