"""From stamped values to a regular grid, with everything that is wrong with them named.

Pure; may not import a clock, a random generator, or anything that does I/O. A bin that has no row, or a row that says
nothing, is missing: NaN, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MOST_BINS = 2_000_000
MOST_PROBLEMS = 20
ON_GRID = 1e-3  # of a bin


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file: where it stands, its instant in seconds, its value (None: nothing was seen)."""

    line: int
    at_s: float
    value: float | None


@dataclass(frozen=True, eq=False)
class Series:
    """A regular grid: bin i begins at `start_s + i · bin_s`. `present` are the bins that have a row."""

    start_s: float
    bin_s: float
    values: Floats
    present: npt.NDArray[np.bool_]


def regular(rows: Sequence[Row], column: str) -> Series | tuple[str, ...]:
    """The series, or its problems as ``line: column: what is wrong, what to do``."""
    if len(rows) < 2:
        return (f"1: {column}: {len(rows)} sample; a forecast is tested on at least 2, half of them to learn from",)
    problems = _disorder(rows, column)
    if problems:
        return tuple(problems[:MOST_PROBLEMS])
    at_s = np.array([row.at_s for row in rows])
    gaps_s = np.diff(at_s)
    bin_s = float(np.median(gaps_s)) if np.median(gaps_s) in gaps_s else float(gaps_s.min())
    offsets = (at_s - at_s[0]) / bin_s
    index = np.rint(offsets).astype(np.int64)
    off = np.flatnonzero(np.abs(offsets - index) > ON_GRID * np.maximum(1.0, offsets * 1e-6))
    if len(off):
        row, amount = rows[off[0]], abs(offsets[off[0]] - index[off[0]]) * bin_s
        return (
            f"{row.line}: {column}: lies {amount:g} s off the grid of {bin_s:g} s bins that the other rows make (a "
            "clock that jumped?); put rows on one grid, leaving out those that are missing",
        )
    if index[-1] >= MOST_BINS:
        return (
            f"{rows[-1].line}: {column}: lies {index[-1]} bins of {bin_s:g} s after the first row, over {MOST_BINS}; "
            "cut the file, or check --time-unit",
        )
    values = np.full(index[-1] + 1, np.nan)
    values[index] = [np.nan if row.value is None else row.value for row in rows]
    present = np.zeros(len(values), dtype=np.bool_)
    present[index] = True
    if np.isnan(values).all():
        return (f"1: {column}: no row says anything; give a column with values (zeros count with --missing blank)",)
    return Series(float(at_s[0]), bin_s, values, present)


def _disorder(rows: Sequence[Row], column: str) -> list[str]:
    problems = []
    for before, row in pairwise(rows):
        if row.at_s == before.at_s:
            problems.append(f"{row.line}: {column}: has the instant of line {before.line}; keep one of the two")
        elif row.at_s < before.at_s:
            problems.append(f"{row.line}: {column}: lies before line {before.line}; sort the rows by time")
    return problems
