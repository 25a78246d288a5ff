"""One run of the scoreboard: what it is, what its result depends on, and where the result is kept.

Runs the world and reads files; may not decide which runs there are. A job's result is a function of the job, its
scenario's content and the code, so it is kept under a digest of the three: what was run once is not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from chaos.peers import PEERS, tuned
from chaos.report import Report
from chaos.scenario import Recorded, Scenario, load_scenario

Count = tuple[tuple[str, int], ...]  # by service

OURS = "ours"
STATIC = "static"
LB1 = "lb1"
OWN = frozenset({OURS, "oracle-demand", "oracle-supply", LB1})
ROOT = Path(__file__).parents[2]
# What a run's result cannot depend on, and what only our own controller's can.
ASIDE = ("chaos/scoreboard", "chaos/live", "chaos/bench.py", "chaos/picture.py", "chaos/simulate.py",
         "autoscaler/adapters", "autoscaler/commands", "autoscaler/console", "autoscaler/cli.py")  # fmt: skip
OURS_ONLY = ("autoscaler/core", "autoscaler/loop.py", "autoscaler/act.py", "forecasting")
SHARED = ("autoscaler/core/capacity.py", "autoscaler/core/model.py")
BOUNDS = "chaos/bounds"


@dataclass(frozen=True, slots=True)
class Job:
    """One run: a scenario (shipped name or file), a controller, its knob (None: as it comes) and a seed.

    `counts`: replicas by service for a static plan; requests met by service for a bound.
    """

    scenario: str
    controller: str
    knob: float | None
    seed: int
    counts: Count = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a job gave: a report, or bounds (pairs of `at_zero_usd`, `per_met_usd`, `sunk_usd`), or why it failed."""

    report: Report | None = None
    bounds: tuple[dict[str, Any], ...] = ()
    error: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Store:
    """Results in a folder, one file each; None keeps nothing. A file is whole or not there."""

    folder: Path | None

    def get(self, job: Job) -> Outcome | None:
        """The result, if it is there. A damaged one is none: the run is made again."""
        path = self._path(job)
        if path is None or not path.exists():
            return None
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            report = Report.model_validate_json(json.dumps(kept["report"])) if kept["report"] else None
            return Outcome(report=report, bounds=tuple(kept["bounds"]), wall_s=kept["wall_s"])
        except (ValueError, TypeError, KeyError):
            return None

    def put(self, job: Job, outcome: Outcome) -> None:
        """Keep a result; failures are not kept, they are tried again."""
        path = self._path(job)
        if path is None or outcome.error:
            return
        kept = {
            "job": asdict(job),
            "report": json.loads(outcome.report.model_dump_json()) if outcome.report else None,
            "bounds": outcome.bounds,
            "wall_s": outcome.wall_s,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(kept), encoding="utf-8")
        part.replace(path)

    def _path(self, job: Job) -> Path | None:
        return self.folder / f"{digest(job)}.json" if self.folder else None


def run(job: Job) -> Outcome:
    """Do the job. Whatever goes wrong is its result: one run's failure must not hide the others'."""
    began_s = time.perf_counter()
    try:
        outcome = _bounds(job) if job.controller == LB1 else Outcome(report=_simulated(job))
    except Exception as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}"[:500])
    wall_s = time.perf_counter() - began_s
    return Outcome(report=outcome.report, bounds=outcome.bounds, error=outcome.error, wall_s=wall_s)


def scenario_of_job(job: Job) -> Scenario:
    """The scenario as the job runs it: ours with its knob, the fraction that every objective asks for."""
    return _scenario(job.scenario, job.knob if job.controller == OURS else None)


def digest(job: Job) -> str:
    """Of everything the result depends on."""
    known = [_content(job.scenario), _code(job.controller), asdict(job)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


# ---- running --------------------------------------------------------------------------------------------------------
def _simulated(job: Job) -> Report:
    from chaos.world import simulate

    controller: str | Callable[[Any], Any] = job.controller
    if job.controller == STATIC and job.counts:
        replicas = dict(job.counts)
        controller = lambda told: PEERS[STATIC]({**told, "peer": {"replicas": replicas}})  # noqa: E731
    elif job.controller in PEERS and job.knob is not None:
        controller = tuned(PEERS[job.controller], job.knob)
    report = simulate(scenario_of_job(job), controller, job.seed)
    return report.model_copy(update={"controller": job.controller})


def _bounds(job: Job) -> Outcome:
    from chaos.bounds.lower import bounds
    from chaos.bounds.problem import problem_of

    problem = problem_of(scenario_of_job(job), job.seed)
    return Outcome(bounds=tuple(asdict(bound) for bound in bounds(problem, dict(job.counts))))


@lru_cache(maxsize=64)
def _scenario(name: str, fraction: float | None) -> Scenario:
    plain = load_scenario(name)
    if fraction is None:
        return plain
    keys = [
        f"policies.{unit}.services.{service}.slo.fraction={fraction!r}"
        for unit, entry in enumerate(plain.policies)
        for service in range(len(entry.services))
    ]
    return load_scenario(name, keys)


# ---- digests --------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=64)
def _content(name: str) -> str:
    """Digest of the scenario with its policies, its part of the catalogue and its traces."""
    scenario = _scenario(name, None)
    told = hashlib.sha256(scenario.model_dump_json().encode())
    told.update(repr((scenario.shapes, scenario.catalogue_set)).encode())
    traces = [row.trace for row in scenario.demand if row.trace]
    traces += [row.count.trace for row in scenario.supply if isinstance(row.count, Recorded)]
    for trace in traces:
        file = scenario.file(trace)
        told.update(file.read_bytes() if file else b"absent")
    return told.hexdigest()


@lru_cache(maxsize=64)
def _code(controller: str) -> str:
    """Digest of the sources that the controller's runs depend on."""
    told = hashlib.sha256()
    for path in sorted(_sources(controller)):
        told.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return told.hexdigest()


def _sources(controller: str) -> Iterable[Path]:
    for top in ("autoscaler", "chaos", "forecasting", "policies", "serve_apps"):
        for path in (ROOT / top).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix not in (".py", ".yaml") or name.startswith((*ASIDE, "chaos/scenarios", "policies/units")):
                continue
            if name.startswith(BOUNDS) and controller != LB1:
                continue
            if controller not in OWN and name.startswith(OURS_ONLY) and name not in SHARED:
                continue
            yield path
