"""`qm chaos`: many seeds on a few processes, resumable; what broke, how to see it again, and what was covered.

Reads the clock, starts processes and writes files; may not judge a run (`checks` and `run` do).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from autoscaler.commands.interrupt import interrupted
from autoscaler.commands.outcome import OK, VIOLATED, BadInput, check_json, write_json
from autoscaler.core.lifecycle import TRANSITIONS
from chaos.faults import KINDS
from chaos.scenario import load_scenario, scenario_of
from chaos.scoreboard.pool import workers

from .draw import Size, drawn, size_of
from .run import Run, run
from .shrink import shrunk, what_broke

MAX_SEED = 2**31
MAX_HOURS = 72.0
SHOWN = 5
SHRUNK = 3  # failures that are made small; more would take hours
TAIL_SHOWN = 12
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """`qm chaos`\'s options. `scenarios`: files to run instead of seeds."""

    scenarios: tuple[str, ...] = ()
    seeds: str = "0:100"
    hours: float = 1.0
    jobs: int = 2
    results: Path = Path("build/chaos")
    json_file: str | None = None


class Broken(BaseModel):
    """One broken promise of one seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    seed: int
    kind: str
    at_s: float
    detail: str


class Worst(BaseModel):
    """A score over all seeds, and the seeds in which it was worst."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    mean: float
    worst: float
    seeds: tuple[int, ...]


class ChaosReport(BaseModel):
    """`qm chaos --json`. `coverage`: the fraction of seeds that had each kind of fault; `transitions` likewise, of an
    instance\'s life; `scores`: attainment, cost, changes of direction, seconds of inversion and of reaction.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    seeds: int
    violations: tuple[Broken, ...]
    not_converged: tuple[int, ...]
    coverage: dict[str, float]
    transitions: dict[str, float]
    never_visited: tuple[str, ...]
    scores: dict[str, Worst]
    cpu_s: float
    wall_s: float


def chaos_command(given: Given) -> int:
    """Runs, prints, writes. 1 when a promise was broken or a world did not settle."""
    check_json(given.json_file)
    began_s = time.perf_counter()
    if given.scenarios:
        runs = [_timed(load_scenario(name)) for name in given.scenarios]
    else:
        size = size_of(_hours(given.hours))
        with interrupted(f"finished worlds are kept in {given.results}; the same command goes on there"):
            runs = list(_seeds(_range(given.seeds), size, given))
    report = report_of(runs, time.perf_counter() - began_s)
    for number, failed in enumerate([each for each in runs if each.failed][:SHOWN]):
        _tell(failed, given, number)
    if given.json_file is not None:
        write_json(given.json_file, report.model_dump_json(indent=1).encode())
    if given.json_file != "-":
        _show(report)
    return VIOLATED if report.violations or report.not_converged else OK


def _hours(hours: float) -> float:
    if not 0.1 <= hours <= MAX_HOURS:
        raise BadInput(f"--hours {hours:g}: give a number from 0.1 to {MAX_HOURS:g}")
    return hours


def _range(text: str) -> range:
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last) <= MAX_SEED):
        raise BadInput(f"--seeds {text[:60]}: give FROM:TO, two whole numbers, the smaller one first")
    return range(int(first), int(last))


def _timed(scenario: Any) -> Run:
    began_s = time.process_time()
    result = run(scenario)
    return result.model_copy(update={"cpu_s": time.process_time() - began_s})


def one(seed: int, size: Size) -> Run:
    """One seed, with the seconds of a core that it took."""
    return _timed(scenario_of(drawn(seed, size)))


# ---- many -----------------------------------------------------------------------------------------------------------
def _seeds(seeds: range, size: Size, given: Given) -> Iterator[Run]:
    """The run of every seed, in order; those that this version of the code has finished are read."""
    try:
        given.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--results {given.results}: {error.strerror}; give a folder") from error
    kept = given.results / f"{_version(size)}.jsonl"
    done = {each.seed: each for each in _read(kept)}
    todo = [seed for seed in seeds if seed not in done]
    kept.write_text("".join(each.model_dump_json() + "\n" for each in done.values()), encoding="utf-8")  # no torn line
    with kept.open("a", encoding="utf-8") as out, _bar(len(seeds)) as bar:
        task = bar.add_task("worlds", total=len(seeds), completed=len(seeds) - len(todo))
        for number, result in enumerate(_computed(todo, size, given.jobs), start=1):
            done[result.seed] = result
            out.write(result.model_dump_json() + "\n")
            out.flush()
            bar.update(task, advance=1)
            if not bar.console.is_terminal and len(todo) >= 10 and number % (len(todo) // 10) == 0:
                print(f"worlds: {number} of {len(todo)}", file=sys.stderr, flush=True)
    return iter([done[seed] for seed in seeds])


def _computed(todo: Sequence[int], size: Size, jobs: int) -> Iterator[Run]:
    if jobs == 1 or len(todo) < 2:
        yield from (one(seed, size) for seed in todo)
        return
    with workers(jobs) as pool:
        for future in as_completed([pool.submit(one, seed, size) for seed in todo]):
            yield future.result()


def _read(kept: Path) -> Iterator[Run]:
    """Runs of an earlier start; the last line may be torn."""
    for line in kept.read_text(encoding="utf-8").splitlines() if kept.exists() else ():
        try:
            yield Run.model_validate_json(line)
        except ValidationError:
            continue


def _version(size: Size) -> str:
    """Names the code and the size: what another version found says nothing of this one."""
    told = hashlib.sha256(repr(size).encode())
    for package in ("autoscaler", "chaos", "forecasting", "policies", "serve_apps"):
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                told.update(path.read_bytes())
    return told.hexdigest()[:16]


def _bar(total: int) -> Progress:
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal or total < 2, transient=True)


# ---- what it amounts to ---------------------------------------------------------------------------------------------
def report_of(runs: Sequence[Run], wall_s: float) -> ChaosReport:
    """The runs\' report."""
    kinds = Counter(kind for each in runs for kind in each.kinds)
    moves = Counter(move for each in runs for move in each.transitions)
    possible = {f"{a.value} > {b.value}" for a, after in TRANSITIONS.items() for b in after}
    return ChaosReport(
        seeds=len(runs),
        violations=tuple(
            Broken(seed=each.seed, kind=v.kind, at_s=v.at_s, detail=v.detail) for each in runs for v in each.violations
        ),
        not_converged=tuple(each.seed for each in runs if each.settled_after_s is None),
        coverage={kind: kinds[kind] / max(1, len(runs)) for kind in KINDS},
        transitions={move: count / max(1, len(runs)) for move, count in sorted(moves.items())},
        never_visited=tuple(sorted(possible - moves.keys())),
        scores=_scores(runs),
        cpu_s=sum(each.cpu_s for each in runs),
        wall_s=wall_s,
    )


def _scores(runs: Iterable[Run]) -> dict[str, Worst]:
    found: dict[str, Worst] = {}
    for name in ("attainment", "cost_usd", "direction_changes", "inversion_s", "reaction_s", "settled_after_s"):
        rows = [(getattr(each, name), each.seed) for each in runs if getattr(each, name) is not None]
        if rows:
            rows.sort(key=lambda row: (row[0], row[1]) if name == "attainment" else (-row[0], row[1]))
            seeds = tuple(seed for _, seed in rows[:3])
            found[name] = Worst(mean=sum(value for value, _ in rows) / len(rows), worst=rows[0][0], seeds=seeds)
    return found


def _tell(failed: Run, given: Given, number: int) -> None:
    """One failure: what, where, the end of its journal, and how to see it again."""
    out = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    out.print(f"seed {failed.seed} ({', '.join(sorted(what_broke(failed)))}), commit {_commit()}")
    for each in failed.violations[:SHOWN]:
        out.print(f"  at {each.at_s:,.0f} s: {each.kind}: {each.detail}")
    if failed.settled_after_s is None:
        out.print(f"  not settled: {failed.unsettled}")
    for line in failed.tail[-TAIL_SHOWN:]:
        event = json.loads(line)
        out.print(f"    {event['kind']} {line[:160]}")
    if given.scenarios:
        return
    out.print(f"  again: qm chaos --seeds {failed.seed}:{failed.seed + 1} --hours {given.hours:g} --jobs 1")
    if number < SHRUNK:
        path = given.results / f"chaos-{failed.seed}.yaml"
        small = shrunk(drawn(failed.seed, size_of(given.hours)))
        path.write_text(yaml.safe_dump(small, sort_keys=False, width=120), encoding="utf-8")
        out.print(f"  the shortest that breaks it: qm chaos {path}")


def _commit() -> str:
    try:
        said = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.decode().strip()


def _show(report: ChaosReport) -> None:
    out = Console(soft_wrap=True, markup=False, highlight=False)
    broken = Counter(each.kind for each in report.violations)
    told = ", ".join(f"{count} {kind}" for kind, count in broken.most_common()) or "none"
    out.print(f"{report.seeds} worlds, {report.cpu_s:,.0f} s of a core; violations: {told}")
    out.print(f"not settled: {', '.join(map(str, report.not_converged)) or 'none'}")
    for name, score in report.scores.items():
        seeds = ", ".join(map(str, score.seeds))
        out.print(f"{name:18} mean {score.mean:12,.3f}  worst {score.worst:12,.3f} (seeds {seeds})")
    rare = sorted(report.coverage.items(), key=lambda row: row[1])
    out.print("faults, share of worlds: " + ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in rare))
    visited = sorted(report.transitions.items(), key=lambda row: row[1])
    out.print("lives, share of worlds: " + ", ".join(f"{move} {100 * share:.0f} %" for move, share in visited))
    out.print(f"never visited: {', '.join(report.never_visited) or 'none'}")
