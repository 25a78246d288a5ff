"""`qm simulate`: one scenario, one controller, one seed, from the file to the report.

The only part of the simulation that looks at a clock (how long it took) and at the terminal. Everything is checked
before anything runs; bad input leaves as BadInput or a `Problems`.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from autoscaler.commands.interrupt import NOTHING, interrupted
from autoscaler.commands.outcome import (
    OK,
    VIOLATED,
    BadInput,
    check_apart,
    check_file,
    check_json,
    write_file,
    write_json,
)
from chaos.demand import TraceProblems
from chaos.pools import check_supply
from chaos.report import Report, ServiceReport
from chaos.scenario import Scenario, load_scenario
from chaos.streams import check_traces

if TYPE_CHECKING:
    from chaos.world import Sample, Watch

MAX_SEED = 2**31
SHOWN_VIOLATIONS = 5
PLAIN_WIDTH = 130  # columns of the summary where there is no terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """`qm simulate`'s options. `seed` None: the scenario's own."""

    scenario: str
    controller: str = "ours"
    seed: int | None = None
    json_file: str | None = None
    html: Path | None = None
    journal: Path | None = None
    overrides: tuple[str, ...] = ()


def simulate_command(given: Given) -> int:
    """Runs the scenario, writes what was asked for, prints a summary. 1 when an invariant was violated."""
    scenario, notes = _checked(given)
    for note in notes:
        print(note, file=sys.stderr)
    recorder = _Recorder() if given.html is not None else None
    with interrupted(NOTHING if given.journal is None else f"{given.journal} has the journal up to the last tick"):
        report = run(scenario, given, recorder)
    if given.html is not None and recorder is not None:
        from chaos.picture import page

        write_file("--html", given.html, page(scenario, report, recorder.samples))
    if given.json_file is not None:
        write_json(given.json_file, report.model_dump_json(indent=1).encode())
    if given.json_file != "-":
        _show(report)
    return VIOLATED if report.violations else OK


def run(scenario: Scenario, given: Given, recorder: Watch | None = None) -> Report:
    """The report, with the time it took, under a progress bar where there is a terminal. Raises BadInput."""
    from chaos.world import UnknownController, simulate

    seed = given.seed if given.seed is not None else scenario.seed
    began_s = time.perf_counter()
    with _Bar(scenario, recorder) as watch:
        try:
            report = simulate(scenario, given.controller, seed, journal=given.journal, watch=watch)
        except UnknownController as error:
            raise BadInput(f"--controller {error}") from error
    return report.model_copy(update={"wall_s": time.perf_counter() - began_s})


def _checked(given: Given) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario, and what there is to say of it before it runs. Raises BadInput or Problems."""
    check_json(given.json_file)
    check_apart([Path(given.scenario)], {"--json": given.json_file, "--html": given.html})
    problems = []
    if given.seed is not None and not 0 <= given.seed <= MAX_SEED:
        problems.append(f"--seed {given.seed}: give a whole number from 0 to {MAX_SEED}")
    if given.html is not None:
        check_file("--html", given.html)
    if given.journal is not None and given.journal.exists() and _used(given.journal):
        problems.append(f"--journal {given.journal}: is not an empty folder; give a new one, a run begins with none")
    if problems:
        raise BadInput(*problems)
    scenario = load_scenario(given.scenario, given.overrides)
    found: list[str] = []
    notes: tuple[str, ...] = ()
    for check in (check_traces, check_supply):
        try:
            notes += tuple(check(scenario) or ())
        except TraceProblems as error:
            found += error.problems
    if found:
        raise BadInput(*found)
    return scenario, (*scenario.stand_ins(), *notes)


def _used(folder: Path) -> bool:
    return not folder.is_dir() or not os.access(folder, os.R_OK) or any(folder.iterdir())


class _Recorder:
    """A watch that keeps everything."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def sample(self, sample: Sample) -> None:
        """One more tick."""
        self.samples.append(sample)


class _Bar:
    """A watch that moves a progress bar on standard error, and passes samples on."""

    def __init__(self, scenario: Scenario, recorder: Watch | None) -> None:
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._recorder = recorder
        self._scenario = scenario
        self._task = self._progress.add_task(f"{scenario.name}: starting", total=scenario.duration_s)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._progress.stop()

    def sample(self, sample: Sample) -> None:
        """One more tick."""
        text = f"{self._scenario.name}: {sample.at_s / 3600:.1f} h, {sample.cost_usd:,.0f} USD"
        self._progress.update(self._task, completed=sample.at_s, description=text)
        if self._recorder is not None:
            self._recorder.sample(sample)


# ---- the summary ----------------------------------------------------------------------------------------------------
def _show(report: Report) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    table = Table(title=f"{report.scenario}, {report.controller}, seed {report.seed}", title_justify="left")
    for name in ("service", "requests", "SLO met", "wanted", "TTFT s p50 / p95 / p99", "TPOT ms p50 / p95", "lost"):
        table.add_column(name, justify="left" if name in ("service", "lost") else "right", no_wrap=name != "lost")
    for key, service in sorted(report.services.items(), key=lambda item: (-item[1].priority, item[0])):
        table.add_row(key, f"{service.requests:,}", _share(service.slo_attainment), _share(service.fraction),
                      _figures(service.ttft_s.p50, service.ttft_s.p95, service.ttft_s.p99),
                      _figures(service.tpot_s.p50, service.tpot_s.p95, scale=1000.0), _lost(service))  # fmt: skip
    console.print(table)
    for line in _lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(report: Report) -> list[str]:
    markets = ", ".join(f"{market} {usd:,.2f}" for market, usd in report.cost_usd_by.market.items())
    calls = report.launches
    refused = ", ".join(f"{count} {name}" for name, count in calls.refused.items()) or "none"
    lines = [
        f"cost {report.cost_usd:,.2f} USD ({markets})" if markets else f"cost {report.cost_usd:,.2f} USD",
        f"launches {calls.attempted} tried, {calls.granted} granted, refused: {refused}",
        f"{report.direction_changes} direction changes, {report.priority_inversion_s:,.0f} s of priority inversion, "
        f"{report.idle_reservation_h:,.1f} h of idle reservations",
        f"{report.requests:,} requests over {report.duration_s / 3600:,.1f} h in {report.wall_s:,.1f} s",
    ]
    shown = [f"violation at {each.at_s:,.0f} s: {each.kind}: {each.detail}" for each in report.violations]
    more = [f"... and {len(shown) - SHOWN_VIOLATIONS} more violations"] if len(shown) > SHOWN_VIOLATIONS else []
    return lines + shown[:SHOWN_VIOLATIONS] + more


def _share(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def _figures(*values: float | None, scale: float = 1.0) -> str:
    return " / ".join("-" if value is None else f"{value * scale:.3g}" for value in values)


def _lost(service: ServiceReport) -> str:
    named = (
        ("shed", service.shed),
        ("failed", service.failed),
        ("overflowed", service.overflowed),
        ("cold start", service.cold_start_misses),
    )
    return ", ".join(f"{count:,} {name}" for name, count in named if count)
