"""What a forecast has to beat: a centre with the quantiles of its own errors over the last three days.

Pure; may not import a clock, a random generator, or anything that does I/O. Everything is causal: at row i only windows
that have ended by row i are known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BAND_DAYS = 3
LEAST = 6  # windows seen before a band is spoken of


def filled(values: Floats) -> Floats:
    """Each value, or the last one before it that was seen; NaN before any."""
    at = np.where(np.isnan(values), -1, np.arange(len(values)))
    last = np.maximum.accumulate(at)
    out: Floats = np.where(last >= 0, values[last], np.nan)
    return out


def window_maximum(values: Floats, first: int, last: int) -> Floats:
    """[n] the largest of the values `first`…`last` rows ahead; NaN where one of them is missing."""
    n = len(values)
    out = np.full(n, np.nan)
    if n > last:
        out[: n - last] = np.stack([values[k : n - last + k] for k in range(first, last + 1)]).max(axis=0)
    return out


def conformal(centre: Floats, real: Floats, last: int, per_day: int, qs: Sequence[float]) -> Floats:
    """[n, quantiles] the centre plus the empirical quantiles of real − centre over windows that ended in the last
    `BAND_DAYS` days, at least 0. Until `LEAST` have ended the centre stands for every quantile.
    """
    off = real - centre
    out = np.repeat(centre[:, None], len(qs), axis=1)
    for row in range(len(centre)):
        end = row - last + 1
        known = off[max(0, end - BAND_DAYS * per_day) : max(0, end)]
        known = known[~np.isnan(known)]
        if len(known) >= LEAST:
            out[row] += np.quantile(known, qs)
    return np.maximum(out, 0.0)


def last_value(values: Floats, first: int, last: int, per_day: int, qs: Sequence[float]) -> Floats:
    """[n, quantiles] the last value seen, with its conformal band."""
    return conformal(filled(values), window_maximum(values, first, last), last, per_day, qs)


def seasonal_naive(values: Floats, first: int, last: int, per_day: int, qs: Sequence[float]) -> Floats:
    """[n, quantiles] the same window a season ago, the last value where it is not known, with a conformal band."""
    seen = filled(values)
    centre = np.full(len(values), np.nan)
    if len(values) > per_day and per_day >= last:
        then = window_maximum(seen, first, last)
        centre[per_day:] = then[:-per_day]
    centre = np.where(np.isnan(centre), seen, centre)
    return conformal(centre, window_maximum(values, first, last), last, per_day, qs)
