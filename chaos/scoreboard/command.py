"""`qm bench`: reads what is asked for, measures it, shows and writes the scoreboard.

The only part of the scoreboard that writes to the terminal's standard output. All input is checked before the first
run; bad input leaves as BadInput or a `Problems`.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autoscaler.commands.interrupt import interrupted
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
from chaos.scenario import load_scenario, public_scenarios
from chaos.streams import check_traces
from policies.problems import suggestion

from .figures import Row, Scoreboard
from .jobs import Store
from .page import publish
from .plan import CONTROLLERS, GROUPS, Asked, measure
from .pool import Pool

FULL_ONLY = ("week_full",)
MAX_SEEDS = 1000
PLAIN_WIDTH = 150  # columns of the table where there is no terminal
SHOWN_FAILURES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """`qm bench`'s options, as they were typed."""

    suite: str = "public"
    scenarios: str | None = None
    controllers: str = "all"
    seeds: str = "0:10"
    jobs: int = 2
    results: Path = Path("build/bench")
    older: bool = False
    html: Path | None = None
    publish: Path | None = None
    json_file: str | None = None


def bench_command(given: Given) -> int:
    """Measures, writes what was asked for, shows the table. 1 when a run failed or an invariant was violated."""
    asked, notes = _checked(given)
    for note in notes:
        Console(stderr=True).print(note, highlight=False)
    began_s = time.perf_counter()
    pool = Pool(Store(given.results, given.older), given.jobs)
    kept = f"finished runs are kept in {given.results}; the same command goes on there"
    with _alone(given.results), interrupted(kept):
        board = measure(asked, pool)
    if given.json_file is not None:
        write_json(given.json_file, board.model_dump_json(indent=1).encode())
    if given.html is not None:
        from .picture import page

        write_file("--html", given.html, page(board))
    if given.publish is not None:
        publish(board, given.publish)
    if given.json_file != "-":
        _show(board, time.perf_counter() - began_s, pool)
    return VIOLATED if board.failures or board.violations else OK


@contextmanager
def _alone(results: Path) -> Iterator[None]:
    """Two benches in one folder would do everything twice. Raises BadInput when another one is at work there."""
    results.mkdir(parents=True, exist_ok=True)
    with (results / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BadInput(
                f"--results {results}: another qm bench is at work there; wait for it, or give a folder of its own"
            ) from error
        yield


def _checked(given: Given) -> tuple[Asked, tuple[str, ...]]:
    """What to measure, and what there is to say before. Raises BadInput or a scenario's Problems."""
    check_json(given.json_file)
    check_apart((), {"--json": given.json_file, "--html": given.html})
    if given.html is not None:
        check_file("--html", given.html)
    problems: list[str] = []
    if given.results.exists() and not given.results.is_dir():
        problems.append(f"--results {given.results}: is not a folder; give one, it is made where it is missing")
    if given.publish is not None and not (given.publish / "README.md").is_file():
        problems.append(f"--publish {given.publish}: holds no README.md; give the folder of the repository")
    names = _scenarios(given)
    controllers = tuple(dict.fromkeys(one for name in _words(given.controllers) for one in GROUPS.get(name, (name,))))
    for name in controllers:
        if name not in CONTROLLERS:
            known = suggestion(name, (*CONTROLLERS, *GROUPS))
            problems.append(f"--controllers {name}: is no controller of the scoreboard; {known}")
    if not controllers or not names:
        problems.append("--controllers and --scenarios: name at least one each")
    seeds = _seeds(given.seeds, problems)
    if problems:
        raise BadInput(*problems)
    notes = tuple(note for name in names for note in _notes(name))
    return Asked(scenarios=names, controllers=controllers, seeds=seeds), notes


def _scenarios(given: Given) -> tuple[str, ...]:
    if given.scenarios is not None:
        return _words(given.scenarios)
    return tuple(name for name in public_scenarios() if given.suite == "full" or name not in FULL_ONLY)


def _words(text: str) -> tuple[str, ...]:
    """The words between commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _seeds(text: str, problems: list[str]) -> tuple[int, ...]:
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < last - first <= MAX_SEEDS:
        problems.append(f"--seeds {text}: give FROM:TO with 1 to {MAX_SEEDS} seeds, for example 0:10")
    return tuple(range(first, last))


def _notes(name: str) -> tuple[str, ...]:
    """Reads the scenario and its traces. Raises Problems or BadInput."""
    scenario = load_scenario(name)
    try:
        notes = check_traces(scenario)
        check_supply(scenario)
    except TraceProblems as error:
        raise BadInput(*error.problems) from error
    return tuple(f"{scenario.name}: {note}" for note in (*scenario.stand_ins(), *notes))


# ---- the table ------------------------------------------------------------------------------------------------------
def _show(board: Scoreboard, wall_s: float, pool: Pool) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    table = Table(title=f"seeds {board.seeds[0]}-{board.seeds[-1]}; knobs chosen on {board.sweep_seeds}")
    for name in ("scenario", "controller", "knob"):
        table.add_column(name, overflow="fold")
    for name in ("attainment", "cost USD", "÷ LB1", "refused/grant", "turns", "inversion s", "cold"):
        table.add_column(name, justify="right")
    beaten = {(each.scenario, each.controller, each.knob) for each in board.dominated_by}
    for row in board.rows:
        table.add_row(*_cells(row), style="bold" if row.controller == "ours" else "")
    console.print(table)
    for scenario, controller, knob in sorted(beaten, key=repr):
        console.print(f"  dominated by {controller} (knob {_knob(knob)}) on {scenario}")
    for failure in board.failures[:SHOWN_FAILURES]:
        console.print(f"  FAILED {failure.scenario} {failure.controller} seed {failure.seed}: {failure.error}")
    if len(board.failures) > SHOWN_FAILURES:
        console.print(f"  … {len(board.failures)} runs failed in all")
    for broken in board.violations[:SHOWN_FAILURES]:
        console.print(
            f"  VIOLATED {broken.scenario} {broken.controller} seed {broken.seed}: {broken.count} × {broken.kind}"
        )
    whole_s = sum(board.spent_s.values())
    ran = len(pool.outcomes) - pool.reused
    console.print(
        f"  {len(pool.outcomes)} runs: {whole_s:,.0f} core-s, {whole_s / 120.0:.0f} min on 2 cores. {ran} of them now: "
        f"{whole_s - pool.reused_cpu_s:,.0f} core-s in {wall_s / 60.0:.1f} min; {pool.reused} kept from before"
    )
    if board.older:
        console.print(f"  {board.older} of them were made by another version of the code (--older)")
    console.print("  by controller: " + ", ".join(f"{who} {spent:,.0f} s" for who, spent in board.spent_s.items()))
    slow = sorted(pool.outcomes.items(), key=lambda pair: -pair[1].cpu_s)[:5]
    console.print("  dearest runs: " + ", ".join(f"{one.scenario} {one.controller} {o.cpu_s:.0f} s" for one, o in slow))


def _cells(row: Row) -> tuple[str, ...]:
    top, cost = row.attainment_top, row.cost_usd
    return (
        row.scenario,
        row.controller,
        _knob(row.knob),
        f"{top.mean:.4f} [{top.low:.4f}, {top.high:.4f}]",
        f"{cost.mean:,.2f} [{cost.low:,.2f}, {cost.high:,.2f}]",
        "–" if row.regret_lb1 is None else f"{1 + row.regret_lb1:.2f}",
        "–" if row.refused_per_grant is None else f"{row.refused_per_grant:.1f}",
        f"{row.direction_changes:.0f}",
        f"{row.priority_inversion_s:.0f}",
        f"{row.cold_start_misses:.0f}",
    )


def _knob(knob: float | None) -> str:
    return "–" if knob is None else f"{knob:.4g}"
