"""How far predictions are from rows that took no part in them. Pure; may not do I/O or read a clock.

Every score fits the law on one part of the measured rows and predicts the other. `alternate`: the first, third, … row
of each (engine, mix) is fitted, the others are scored; `alternate_odd` the other way round. `leave_mix_out`: each
(input, output) in turn. `roofline_…`: the roofline alone on each model and each GPU. `corrected_…`: the roofline as the
other models' or GPUs' rows correct it. Neither uses the catalogue's own measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from pydantic import BaseModel

from autoscaler.catalogue import Catalogue

from .closed_loop import answer
from .engines import laws
from .table import Row, finite

MOST_CONCURRENCY = 64.0


class Errors(BaseModel):
    """Relative errors of one figure over `n` scored rows: fractions; None without rows."""

    n: int
    median: float | None
    p90: float | None
    worst: float | None


class Score(BaseModel):
    """One way of splitting the rows. `left_out` names what was kept back, where it was one thing."""

    split: str
    left_out: str
    ttft: Errors
    tpot: Errors


def scores(rows: Sequence[Row], catalogue: Catalogue) -> tuple[Score, ...]:
    """Every split of the measured rows."""
    rows = [row for row in rows if row.measured]
    even = _every_other(rows)
    found = [
        _score(
            "alternate", "", [row for row in rows if row in even], [row for row in rows if row not in even], catalogue
        ),
        _score(
            "alternate_odd",
            "",
            [row for row in rows if row not in even],
            [row for row in rows if row in even],
            catalogue,
        ),
    ]
    found += _left_out("leave_mix_out", rows, lambda row: f"{row.mix[0]:g}/{row.mix[1]:g}", catalogue)
    for name, group in (("model", lambda row: row.engine.model), ("gpu", lambda row: row.engine.system)):
        found += _left_out(f"roofline_leave_{name}_out", rows, group, catalogue, alone=True)
        found += _left_out(f"corrected_leave_{name}_out", rows, group, catalogue)
    return tuple(found)


def _every_other(rows: Iterable[Row]) -> set[Row]:
    seen: dict[object, int] = {}
    even = set()
    for row in rows:
        key = (row.engine, row.mix)
        if seen.setdefault(key, 0) % 2 == 0:
            even.add(row)
        seen[key] += 1
    return even


def _left_out(
    split: str, rows: Sequence[Row], group: Callable[[Row], str], catalogue: Catalogue, *, alone: bool = False
) -> list[Score]:
    """One score for each group that is left out of the fit; `alone` leaves out everything."""
    bare = (
        catalogue.model_copy(update={"measurements": ()}) if split.startswith(("roofline", "corrected")) else catalogue
    )
    return [
        _score(
            split,
            name,
            [] if alone else [row for row in rows if group(row) != name],
            [row for row in rows if group(row) == name],
            bare,
        )
        for name in sorted({group(row) for row in rows})
    ]


def _score(split: str, left_out: str, fitted: Sequence[Row], scored: Sequence[Row], catalogue: Catalogue) -> Score:
    found = laws({row.engine for row in scored}, fitted, catalogue)
    ttft: list[float] = []
    tpot: list[float] = []
    for row in scored:
        known, point = found.get(row.engine), row.point
        if known is None or point.load.concurrency > MOST_CONCURRENCY:
            continue
        said = answer(known.law, point.load)
        ttft += [] if point.ttft_s is None else [abs(said[0] / point.ttft_s - 1.0)]
        tpot += [] if point.tpot_s is None else [abs(said[1] / point.tpot_s - 1.0)]
    return Score(split=split, left_out=left_out, ttft=_errors(ttft), tpot=_errors(tpot))


def _errors(values: list[float]) -> Errors:
    ordered = sorted(values)
    return Errors(
        n=len(ordered),
        median=finite(_quantile(ordered, 0.5)),
        p90=finite(_quantile(ordered, 0.9)),
        worst=finite(max(ordered, default=math.nan)),
    )


def _quantile(ordered: Sequence[float], q: float) -> float:
    if not ordered:
        return math.nan
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
