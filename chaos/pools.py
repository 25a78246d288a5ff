"""How many instances each pool can hold over a scenario: fixed, stepped, recorded, or a recorded one's stand-in.

Reads supply traces and draws from generators seeded by offering; may not read a clock or start anything.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np

from chaos.demand import MAX_PROBLEMS, MAX_SPAN_S, TraceProblems
from chaos.engine.spec import F8
from chaos.scenario import Outages, Recorded, Scenario, Steps, Supply
from policies.problems import suggestion

END = "END"  # in place of a number: the record of that zone ends here, and its last value holds
HEADER = ("t_seconds", "zone", "available_nodes")
MAX_BYTES = 1 << 28
MAX_NODES = 1_000_000
MAX_STEPS = 5_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """The pool holds ``count[i]`` instances in all from ``at_s[i]`` on; shapes (n,), `at_s` rises strictly from 0."""

    at_s: F8
    count: np.ndarray


def available(scenario: Scenario, offering: str, seed: int) -> Size:
    """What the offering can hold, ours included, over the scenario; 0 before its start and after its end.

    A recorded pool holds floor(available × scale). Raises TraceProblems for a supply trace that cannot be used.
    """
    row = scenario.offering(offering)
    at_s, count = _steps(scenario, row, seed)
    return _window(row, at_s, count)


def check_supply(scenario: Scenario) -> None:
    """Reads every supply trace. Raises TraceProblems with all that is wrong with them."""
    problems: list[str] = []
    for row in scenario.supply:
        try:
            available(scenario, row.id, scenario.seed)
        except TraceProblems as error:
            problems += error.problems
    if problems:
        raise TraceProblems(tuple(dict.fromkeys(problems)))


def _steps(scenario: Scenario, row: Supply, seed: int) -> tuple[F8, np.ndarray]:
    if isinstance(row.count, int):
        return np.zeros(1), np.array([row.count])
    if isinstance(row.count, Steps):
        return np.array([at_s for at_s, _ in row.count.steps]), np.array([count for _, count in row.count.steps])
    rng = np.random.default_rng([seed, crc32(f"pool/{row.id}".encode())])
    if isinstance(row.count, Outages):
        return _outages(row.count, scenario.duration_s, rng)
    path = scenario.file(row.count.trace)
    if path is not None:
        return _recorded(path, row.count)
    assert row.count.synthetic is not None
    return _outages(row.count.synthetic, scenario.duration_s, rng)


def _window(row: Supply, at_s: F8, count: np.ndarray) -> Size:
    """The steps within the offering's start and end."""
    end_s = row.end_s if row.end_s is not None else math.inf
    edges = np.unique(np.concatenate([[0.0, row.start_s], at_s, [end_s] if math.isfinite(end_s) else []]))
    edges = edges[edges >= 0.0]
    held = count[np.maximum(np.searchsorted(at_s, edges, side="right") - 1, 0)]
    held = np.where((edges >= row.start_s) & (edges < end_s), held, 0)
    changed = np.append(True, np.diff(held) != 0)
    return Size(edges[changed], held[changed].astype(np.int64))


def _outages(spec: Outages, duration_s: float, rng: np.random.Generator) -> tuple[F8, np.ndarray]:
    """Up and down in turn, beginning as a long-running pool would be found."""
    up = bool(rng.random() < spec.up_s / (spec.up_s + spec.down_s))
    at_s, count, now_s = [0.0], [spec.most if up else 0], 0.0
    while len(at_s) < MAX_STEPS:
        now_s += rng.exponential(spec.up_s if up else spec.down_s)
        if now_s >= duration_s:
            break
        up = not up
        at_s.append(now_s)
        count.append(spec.most if up else 0)
    return np.array(at_s), np.array(count)


# ---- supply traces --------------------------------------------------------------------------------------------------
def _recorded(path: Path, spec: Recorded) -> tuple[F8, np.ndarray]:
    """The trace from its second `from_s` on; the last value holds."""
    stat = path.stat()
    pools = _read(path, (stat.st_mtime_ns, stat.st_size))
    if spec.key not in pools:
        raise TraceProblems((f"{path}: has no zone {spec.key}; {suggestion(spec.key, sorted(pools))}",))
    at_s, nodes = pools[spec.key]
    if spec.from_s > 0 and spec.from_s >= max(last[0][-1] for last in pools.values()):
        raise TraceProblems((f"{path}: ends before from_s {spec.from_s:g}; lower it",))
    count = np.floor(nodes * spec.scale + 1e-9).astype(np.int64)
    first = max(int(np.searchsorted(at_s, spec.from_s, side="right")) - 1, 0)
    return np.maximum(at_s[first:] - spec.from_s, 0.0), count[first:]


@lru_cache(maxsize=16)
def _read(path: Path, _version: tuple[int, int]) -> dict[str, tuple[F8, F8]]:
    """Change points by zone. Raises TraceProblems."""
    problems: list[str] = []
    found: dict[str, list[tuple[float, float]]] = {}
    for line, row in _rows(path):
        if row[-1] == END:
            continue
        value = _entry(row)
        if isinstance(value, str):
            problems.append(f"{path}:{line}: {value}")
        elif value[1] < (found.get(value[0]) or [(-math.inf, 0.0)])[-1][0]:
            text = f"t_seconds: {row[0]} is earlier than the row before of {value[0]}, sort the file by time"
            problems.append(f"{path}:{line}: {text}")
        else:
            found.setdefault(value[0], []).append(value[1:])
        if len(problems) >= MAX_PROBLEMS:
            break
    if not found and not problems:
        problems.append(f"{path}:1: there are no rows after the header, give at least one")
    if problems:
        raise TraceProblems(tuple(problems))
    return {key: _columns(rows) for key, rows in found.items()}


def _columns(rows: list[tuple[float, float]]) -> tuple[F8, F8]:
    """Instants and nodes; of several rows at one instant the last counts."""
    table = np.array(rows)
    last = np.append(np.diff(table[:, 0]) > 0, True)
    return table[last, 0], table[last, 1]


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and fields of each row. Raises TraceProblems for what is not such a file at all."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise TraceProblems((f"{path}: is not a regular file of at most 256 MiB; give a CSV file with a header",))
        lines = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise TraceProblems((f"{path}: is not UTF-8 text; give a CSV file with a header",)) from error
    except OSError as error:
        raise TraceProblems((f"{path}: {error.strerror}; give a CSV file with a header",)) from error
    reader = csv.reader(lines)
    try:
        header = next(reader, [])
        if tuple(name.strip() for name in header) != HEADER:
            text = f"{','.join(header)[:200]!r} is not {','.join(HEADER)}, give a supply trace"
            raise TraceProblems((f"{path}:1: header: {text}",))
        yield from ((reader.line_num, row) for row in reader if row)
    except csv.Error as error:
        raise TraceProblems((f"{path}:{reader.line_num}: row: is not CSV ({error}), correct it",)) from error


def _entry(row: list[str]) -> tuple[str, float, float] | str:
    """Zone, instant and nodes of one row, or what is wrong with it."""
    if len(row) != len(HEADER):
        return f"row: {len(row)} fields where the header has {len(HEADER)}, the row is cut off or has extra commas"
    values = []
    for name, text, most in ((HEADER[0], row[0], MAX_SPAN_S), (HEADER[2], row[2], MAX_NODES)):
        try:
            value = float(text)
        except ValueError:
            return f"{name}: {text!r} is not a number, correct or remove the row"
        if not 0 <= value <= most:
            return f"{name}: {text} is not from 0 to {most:,.0f}, correct or remove the row"
        values.append(value)
    return row[1], values[0], values[1]
