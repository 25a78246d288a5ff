"""A rolling-origin backtest over one series: what would have been said at every bin, and how good it was.

Pure; may not import a clock, a random generator, or anything that does I/O. Rows are bins of a regular grid; NaN is a
bin that nobody saw. The first half warms up, every bin of the second half is an origin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import reference
from .model import Forecaster
from .score import coverage, price_of_lead, ratio_interval, weighted_quantile_loss

Floats = npt.NDArray[np.float64]
Challenger = Callable[[Floats, int, int, int, Sequence[float]], Floats]  # values, first, last, per day, quantiles

CHALLENGERS: Mapping[str, Challenger] = {
    "last_value": reference.last_value,
    "seasonal_naive": reference.seasonal_naive,
}
PROVIDED_Q = 0.9  # the quantile whose hindsight head-room the fluid test tunes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One lead. `ratio` is ours ÷ last value with its 90 % interval; `halves` the coverage in each half of the scored
    span; `provisioned` and `provisioned_last_value` are the price of the lead at ≤ 1 % unmet demand.
    """

    lead_s: float
    n: int
    wql: dict[str, float]
    wql_mean: float
    coverage: dict[str, float]
    halves: tuple[dict[str, float], dict[str, float]]
    challengers: dict[str, float]
    ratio: tuple[float, float, float]
    provisioned: float
    provisioned_last_value: float


def predict(
    values: Floats, forecaster: Forecaster, present: npt.NDArray[np.bool_], step: Callable[[int], None] | None = None
) -> tuple[Floats, list[str]]:
    """[n, leads, quantiles] said at each row of `present`, NaN elsewhere; and the members that carry the weight last.

    A row outside `present` was not in the file: nothing was asked then.
    """
    out = np.full((len(values), len(forecaster.leads_s), len(forecaster.quantiles)), np.nan)
    state = forecaster.empty(1)
    for row in np.flatnonzero(present):
        state = forecaster.update(state, values[row : row + 1], int(row))
        out[row] = forecaster.forecast(state)[0]
        if step is not None:
            step(int(row))
    return out, [forecaster.member(state, 0, k) for k in range(len(forecaster.leads_s))]


def with_points(forecaster: Forecaster) -> Forecaster:
    """The same, asked for the single bin at each lead too (the fluid test's question), after its own leads."""
    leads = tuple(forecaster.leads_s)
    assert not isinstance(forecaster.commitment_s, Sequence)
    return Forecaster(
        forecaster.bin_s,
        leads * 2,
        (forecaster.commitment_s,) * len(leads) + (0.0,) * len(leads),
        forecaster.quantiles,
        forecaster.season_s,
    )


def cells(
    values: Floats,
    said: Floats,
    forecaster: Forecaster,
    challengers: Mapping[str, Challenger] = CHALLENGERS,
) -> tuple[Cell, ...]:
    """Scores of what `with_points(forecaster)` said [n, 2 leads, quantiles], over the second half of the rows."""
    return tuple(
        _cell(values, said[:, k], said[:, len(forecaster.leads_s) + k], k, forecaster, challengers)
        for k in range(len(forecaster.leads_s))
    )


def _cell(
    values: Floats, said: Floats, point: Floats, k: int, forecaster: Forecaster, challengers: Mapping[str, Challenger]
) -> Cell:
    qs, per_day = forecaster.quantiles, forecaster.grid.season
    first, last = forecaster.windows[k]
    half = len(values) // 2
    scored = slice(half, None)
    real = reference.window_maximum(values, first, last)
    asked = np.where(np.isnan(said).all(axis=1), np.nan, real)[scored]
    losses = weighted_quantile_loss(asked, said[scored], qs)
    others = {name: make(values, first, last, per_day, qs) for name, make in challengers.items()}
    middle = len(asked) // 2
    ours_half = (coverage(asked[:middle], said[scored][:middle]), coverage(asked[middle:], said[scored][middle:]))
    then = reference.window_maximum(values, first, first)[scored]
    return Cell(
        lead_s=float(forecaster.leads_s[k]),
        n=int((~np.isnan(asked)).sum()),
        wql=_named(qs, losses),
        wql_mean=float(losses.mean()),
        coverage=_named(qs, coverage(asked, said[scored])),
        halves=(_named(qs, ours_half[0]), _named(qs, ours_half[1])),
        challengers={
            name: float(weighted_quantile_loss(asked, other[scored], qs).mean()) for name, other in others.items()
        },
        ratio=ratio_interval(asked, said[scored], others["last_value"][scored], qs, per_day),
        provisioned=price_of_lead(then, point[scored][:, _nearest(qs, PROVIDED_Q)]),
        provisioned_last_value=price_of_lead(then, reference.filled(values)[scored]),
    )


def _named(qs: Sequence[float], values: Floats) -> dict[str, float]:
    return {f"{q:g}": float(value) for q, value in zip(qs, values, strict=True)}


def _nearest(qs: Sequence[float], q: float) -> int:
    return int(np.abs(np.asarray(qs) - q).argmin())
