"""Short forecasts of a rate from its recent samples: level, damped trend and a spread that is measured, never assumed.

Pure; may not import a clock, a random generator, or anything that does I/O. Samples are unequally spaced and may have
gaps: a gap is missing, not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

LEVEL_WINDOW_S = 60.0
TREND_WINDOW_S = 240.0
TREND_DAMPING = 0.5  # a trend seen over the window is believed for half of the lead
MIN_TREND_BINS = 6
BIN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A rate over one bin: `value` per second, `at_s` the bin's middle."""

    at_s: float
    value: float


def bins(samples: Sequence[tuple[float, float]], now_s: float, bin_s: float = BIN_S) -> tuple[Rate, ...]:
    """Means of `(at_s, rate)` samples in bins counted back from `now_s`, oldest first; empty bins are left out."""
    sums: dict[int, list[float]] = {}
    for at_s, value in samples:
        if at_s <= now_s:
            sums.setdefault(int((now_s - at_s) // bin_s), []).append(value)
    return tuple(
        [Rate(at_s=now_s - (k + 0.5) * bin_s, value=sum(sums[k]) / len(sums[k])) for k in sorted(sums, reverse=True)]
    )


def short_forecast(
    samples: Sequence[tuple[float, float]], now_s: float, lead_s: float, quantiles: Sequence[float]
) -> tuple[tuple[float, float], ...]:
    """Quantiles of the rate at `now_s + lead_s`, as `(quantile, rate)`; empty without samples in the trend window.

    The level is the mean of the last minute, which lies half of that minute back. The trend is the least-squares slope
    of the bins; it is added for the way to now, damped for the lead, and only ever to a level above zero: silence is
    never amplified. The spread is that of the bins about their line, at least the sampling error of a Poisson count
    over the level window.
    """
    first_s = now_s - TREND_WINDOW_S
    recent = [row for row in samples if first_s < row[0] <= now_s]
    if not recent:
        return ()
    newest_s = recent[-1][0]
    last_minute = [value for at_s, value in recent if at_s > newest_s - LEVEL_WINDOW_S]
    level = sum(last_minute) / len(last_minute)
    if level <= 0.0:
        return tuple((q, 0.0) for q in quantiles)
    slope, spread = _line(bins(recent, newest_s))
    seen_s = max(newest_s - recent[0][0], BIN_S)
    poisson = (level / min(seen_s, LEVEL_WINDOW_S)) ** 0.5
    behind_s = min(seen_s, LEVEL_WINDOW_S) / 2.0
    mean = max(0.0, level + slope * (behind_s + TREND_DAMPING * min(lead_s, seen_s)))
    sigma = max(spread, poisson)
    return tuple([(q, max(0.0, mean + _normal(q) * sigma)) for q in quantiles])


@lru_cache(maxsize=64)
def _normal(q: float) -> float:
    return NormalDist().inv_cdf(q)


def _line(rates: Sequence[Rate]) -> tuple[float, float]:
    """Least-squares slope (per second) and residual standard deviation; (0, 0) below `MIN_TREND_BINS` bins."""
    n = len(rates)
    if n < MIN_TREND_BINS:
        return 0.0, 0.0
    times, values = [rate.at_s for rate in rates], [rate.value for rate in rates]
    mean_t, mean_v = sum(times) / n, sum(values) / n
    off = [(at_s - mean_t, value - mean_v) for at_s, value in zip(times, values, strict=True)]
    slope = sum([t * v for t, v in off]) / sum([t**2 for t, _ in off])
    residuals = sum([(v - slope * t) ** 2 for t, v in off])
    return slope, (residuals / (n - 2)) ** 0.5
