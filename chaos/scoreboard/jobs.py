"""One run of the scoreboard: what it is, what its result depends on, and where the result is kept.

Runs the world and reads files; may not decide which runs there are. A job's result is a function of the job, its
scenario's content and the code, so it is kept under digests of the three: what was run once is not run again, and what
another version of the code gave can be told from it, and counted when that is asked for.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
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
TOPS = ("autoscaler", "chaos", "forecasting", "policies", "serve_apps")
ROOTS: tuple[str, ...] = (
    "chaos.world",
    "chaos.peers",
    "chaos.scenario",
)  # what a run uses is what these import, all the way down;
ASIDE = ("autoscaler/adapters", "autoscaler/render.py")  # of which these cannot change its result,
OURS_ONLY = ("autoscaler/core", "autoscaler/loop.py", "autoscaler/act.py", "autoscaler/ledger.py", "forecasting")
SHARED = tuple(f"autoscaler/core/{name}.py" for name in ("capacity", "lifecycle", "model", "publish", "units"))


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
    cpu_s: float = 0.0
    older: bool = False  # another version of the code gave it


@dataclass(frozen=True, slots=True)
class Store:
    """Results in a folder, one file each; None keeps nothing. A file is whole or not there. With `older`, the newest
    result of another version of the code stands in where there is none of this one.
    """

    folder: Path | None
    older: bool = False

    def get(self, job: Job) -> Outcome | None:
        """The result, if it is there. A damaged one is none: the run is made again."""
        path = self._path(job)
        if self.folder is None or path is None:
            return None
        found = _read(path)
        if found is not None or not self.older:
            return found
        others = sorted(
            self.folder.glob(f"{_told(job)}-*.json"), key=lambda other: (-other.stat().st_mtime, other.name)
        )
        stand_in = next((kept for other in others if (kept := _read(other)) is not None), None)
        return replace(stand_in, older=True) if stand_in is not None else None

    def put(self, job: Job, outcome: Outcome) -> None:
        """Keep a result; failures are not kept, they are tried again."""
        path = self._path(job)
        if path is None or outcome.error:
            return
        kept = {
            "job": asdict(job),
            "report": json.loads(outcome.report.model_dump_json()) if outcome.report else None,
            "bounds": outcome.bounds,
            "cpu_s": outcome.cpu_s,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(kept), encoding="utf-8")
        part.replace(path)

    def _path(self, job: Job) -> Path | None:
        return self.folder / f"{digest(job)}.json" if self.folder else None


def run(job: Job) -> Outcome:
    """Do the job. Whatever goes wrong is its result: one run's failure must not hide the others'."""
    began_s = time.process_time()
    try:
        outcome = _bounds(job) if job.controller == LB1 else Outcome(report=_simulated(job))
    except Exception as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}"[:500])
    return replace(outcome, cpu_s=time.process_time() - began_s)


def _read(path: Path) -> Outcome | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        report = Report.model_validate_json(json.dumps(kept["report"])) if kept["report"] else None
        return Outcome(report=report, bounds=tuple(kept["bounds"]), cpu_s=float(kept["cpu_s"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def scenario_of_job(job: Job) -> Scenario:
    """The scenario as the job runs it: ours with its knob, the fraction that every objective asks for."""
    return _scenario(job.scenario, job.knob if job.controller == OURS else None)


def digest(job: Job) -> str:
    """Of everything the result depends on: the job with its scenario, and the code."""
    return f"{_told(job)}-{_code(job.controller)[:16]}"


def _told(job: Job) -> str:
    return hashlib.sha256(json.dumps([_content(job.scenario), asdict(job)]).encode()).hexdigest()[:32]


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
    kinds = scenario.catalogue_set.instance_types
    used = sorted({row.instance_type for row in scenario.supply} | {shape.instance_type for shape in scenario.shapes})
    told.update(repr((scenario.policy_set, scenario.shapes, [kinds.get(kind) for kind in used])).encode())
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
    for name in sorted(_sources(controller)):
        told.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return told.hexdigest()


def _sources(controller: str) -> set[str]:
    """Paths, from the root, of the modules that the controller's runs use."""
    roots = ROOTS
    if controller == LB1:
        roots += ("chaos.bounds.lower", "chaos.bounds.problem")
    elif controller not in OWN:  # which are imported by name
        roots += tuple(f"chaos.peers.{path.stem}" for path in sorted((ROOT / "chaos/peers").glob("*.py")))
    names = {path.relative_to(ROOT).as_posix() for path in _imported(roots)}
    foreign = () if controller in OWN else OURS_ONLY
    return {name for name in names if not name.startswith((*ASIDE, *foreign)) or name in SHARED}


def _imported(roots: Iterable[str]) -> set[Path]:
    """The files of these modules and of all of ours that they import, at once or later."""
    found: set[Path] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        for file in (ROOT / module.replace(".", "/") / "__init__.py", ROOT / f"{module.replace('.', '/')}.py"):
            if module.split(".")[0] in TOPS and file.is_file() and file not in found:
                found.add(file)
                package = module if file.name == "__init__.py" else module.rpartition(".")[0]
                waiting += [package, *_names(file, package)]
    return found


def _names(file: Path, package: str) -> Iterable[str]:
    """Modules that a file may mean by its import statements; some are names inside a module, which no file has."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            whole = ".".join([*above, *([node.module] if node.module else [])])
            yield whole
            yield from (f"{whole}.{name.name}" for name in node.names)
