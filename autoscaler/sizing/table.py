"""Reads a table of measured or wanted points, and the engines its rows are of. May not decide or predict anything.

The format is that of aiconfigurator's silicon data: model, system, precision, isl, osl, concurrency, tp_size (and
pp_size, attention_dp_size, moe_tp_size, moe_ep_size), ttft_ms, tpot_ms. Blank figures are those to predict.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from policies.problems import Problem, Problems

from .closed_loop import Load
from .fit import Point

TEXTS = ("model", "system", "precision")
NUMBERS = ("isl", "osl", "concurrency", "tp_size")
PARALLEL = ("pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
FIGURES = ("ttft_ms", "tpot_ms")
BLANK = ("", "nan", "null", "none", "na", "n/a")
MOST_PROBLEMS = 20
LARGEST = 1e12


class TableProblems(Problems):
    """The table cannot be used as it is; `problems` lists what to mend."""


@dataclass(frozen=True, slots=True, order=True)
class EngineKey:
    """What one set of constants holds for. Parallelism beyond `tp` is of the engine, not of the law."""

    model: str
    system: str
    precision: str
    tp: int
    pp: int = 1
    dp: int = 1
    moe_tp: int = 1
    moe_ep: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One line: `fields` as they stand, the engine, and the point per data-parallel rank."""

    line: int
    fields: tuple[str, ...]
    engine: EngineKey
    point: Point

    @property
    def measured(self) -> bool:
        """Whether some figure of the row was measured."""
        return self.point.ttft_s is not None or self.point.tpot_s is not None

    @property
    def mix(self) -> tuple[float, float]:
        """(input, output) tokens of a request."""
        return self.point.load.input_tokens, self.point.load.output_tokens


@dataclass(frozen=True, slots=True)
class Table:
    """A header and its rows, in the file's order."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]


def read_table(path: Path) -> Table:
    """The table in `path`. Raises TableProblems with every problem as ``file:line: column: …`` (the first twenty)."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except OSError as error:
        raise TableProblems([Problem(str(path), 1, "", f"{error.strerror}; name a file that can be read")]) from error
    except (UnicodeDecodeError, csv.Error) as error:
        text = f"is no CSV text ({error}); give a CSV in UTF-8"
        raise TableProblems([Problem(str(path), 1, "", text)]) from error
    header = tuple(word.strip() for word in lines[0]) if lines else ()
    problems = _header_problems(str(path), header)
    rows: list[Row] = []
    for line, fields in enumerate(lines[1:] if not problems else [], start=2):
        if any(field.strip() for field in fields):
            found = _row(line, header, tuple(field.strip() for field in fields))
            rows += [found] if isinstance(found, Row) else []
            problems += [] if isinstance(found, Row) else [Problem(str(path), line, key, text) for key, text in found]
    if not rows and not problems:
        problems.append(Problem(str(path), 1, "", "has no rows; give at least one point"))
    if problems:
        raise TableProblems(problems[:MOST_PROBLEMS])
    return Table(header, tuple(rows))


def _header_problems(name: str, header: Sequence[str]) -> list[Problem]:
    missing = [column for column in (*TEXTS, *NUMBERS) if column not in header]
    doubled = sorted({column for column in header if header.count(column) > 1})
    found = [Problem(name, 1, column, "is missing from the header; add the column") for column in missing]
    return found + [Problem(name, 1, column, "stands twice in the header; remove one") for column in doubled]


def _row(line: int, header: Sequence[str], fields: tuple[str, ...]) -> Row | list[tuple[str, str]]:
    if len(fields) != len(header):
        return [("", f"has {len(fields)} fields, the header {len(header)}; give every column, and quote commas")]
    cells = dict(zip(header, fields, strict=True))
    problems = [(name, "is blank; name one") for name in TEXTS if not cells[name]]
    numbers: dict[str, float] = {}
    for name in (*NUMBERS, *PARALLEL):
        value = _number(cells.get(name, "1"))
        if isinstance(value, str):
            problems.append((name, value))
        elif value is None and name in NUMBERS:
            problems.append((name, "is blank; write a number"))
        else:
            numbers[name] = 1.0 if value is None else value
    figures: dict[str, float | None] = {}
    for name in FIGURES:
        value = _number(cells.get(name, ""))
        if isinstance(value, str):
            problems.append((name, value))
        else:
            figures[name] = None if value is None else value / 1000.0
    problems += [(n, "is no whole number; write one") for n in ("tp_size", *PARALLEL) if numbers.get(n, 1.0) % 1.0]
    return problems or Row(line, fields, _engine(cells, numbers), _point(numbers, figures))


def _number(text: str) -> float | str | None:
    """The number above zero, None for blank, or what is wrong with it."""
    if text.lower() in BLANK:
        return None
    try:
        value = float(text)
    except ValueError:
        return f"{text[:40]} is no number; write one"
    if not 0.0 < value <= LARGEST:
        return f"is {text[:40]}; write a finite number above 0"
    return value


def _engine(cells: Mapping[str, str], numbers: Mapping[str, float]) -> EngineKey:
    tp, pp, dp, moe_tp, moe_ep = (int(numbers[name]) for name in ("tp_size", *PARALLEL))
    return EngineKey(cells["model"], cells["system"], cells["precision"], tp, pp, dp, moe_tp, moe_ep)


def _point(numbers: Mapping[str, float], figures: Mapping[str, float | None]) -> Point:
    """Data-parallel ranks share the concurrency evenly."""
    each = max(1.0, numbers["concurrency"] / numbers["attention_dp_size"])
    return Point(Load(numbers["isl"], numbers["osl"], each), figures["ttft_ms"], figures["tpot_ms"])


def by_engine(rows: Iterable[Row]) -> dict[EngineKey, list[Row]]:
    """The rows of each engine, in the table's order."""
    found: dict[EngineKey, list[Row]] = {}
    for row in rows:
        found.setdefault(row.engine, []).append(row)
    return found


def finite(value: float) -> float | None:
    """The value, or None where it is none."""
    return value if math.isfinite(value) else None
