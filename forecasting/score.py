"""Scores of quantile forecasts, and what they are worth: weighted quantile loss, coverage, intervals, provisioning.

Pure; may not import a clock or do I/O; the bootstrap draws from a generator with a named seed. Arrays: `real` [n],
`said` [n, quantiles]; rows with a NaN count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

DRAWS = 2000
BLOCKS_LEAST = 8  # with less than so many days, blocks are an eighth of the span


def pinball(real: Floats, said: Floats, qs: Sequence[float]) -> Floats:
    """[n, quantiles] pinball loss, in the rate's own unit (Koenker & Bassett 1978)."""
    levels = np.asarray(qs, dtype=np.float64)
    off = real[:, None] - said
    out: Floats = np.maximum(levels * off, (levels - 1.0) * off)
    return out


def usable(real: Floats, said: Floats) -> npt.NDArray[np.bool_]:
    """[n] rows that count."""
    ok: npt.NDArray[np.bool_] = ~np.isnan(real) & ~np.isnan(said).any(axis=1)
    return ok


def weighted_quantile_loss(real: Floats, said: Floats, qs: Sequence[float]) -> Floats:
    """[quantiles] 2 Σ pinball ÷ Σ real; NaN when there is nothing real."""
    ok = usable(real, said)
    total = float(real[ok].sum())
    if total <= 0.0:
        return np.full(len(qs), np.nan)
    out: Floats = 2.0 * pinball(real[ok], said[ok], qs).sum(axis=0) / total
    return out


def coverage(real: Floats, said: Floats) -> Floats:
    """[quantiles] fraction of rows at or below each quantile; NaN without rows."""
    ok = usable(real, said)
    if not ok.any():
        return np.full(said.shape[1], np.nan)
    out: Floats = (real[ok, None] <= said[ok]).mean(axis=0)
    return out


def ratio_interval(
    real: Floats, ours: Floats, theirs: Floats, qs: Sequence[float], per_day: int, seed: int = 0
) -> tuple[float, float, float]:
    """(ratio, low, high): mean loss of `ours` ÷ `theirs` and its 90 % interval, by resampling whole days of rows."""
    ok = usable(real, ours) & usable(real, theirs)
    a = np.where(ok, np.nan_to_num(pinball(real, ours, qs)).sum(axis=1), 0.0)
    b = np.where(ok, np.nan_to_num(pinball(real, theirs, qs)).sum(axis=1), 0.0)
    if not b.sum() > 0.0:
        return (float("nan"),) * 3
    block = max(1, min(per_day, len(real) // BLOCKS_LEAST))
    starts = np.arange(0, len(real), block)
    sums = np.stack([np.add.reduceat(row, starts) for row in (a, b)])
    rng = np.random.default_rng([seed, crc32(b"day-block bootstrap")])
    drawn = sums[:, rng.integers(0, len(starts), (DRAWS, len(starts)))].sum(axis=2)
    ratios = drawn[0] / np.maximum(drawn[1], 1e-300)
    low, high = np.quantile(ratios, (0.05, 0.95))
    return float(a.sum() / b.sum()), float(low), float(high)


def price_of_lead(real: Floats, said: Floats, unmet: float = 0.01) -> float:
    """Provisioned ÷ clairvoyant demand when `said` [n] is provided times the least head-room (one number, found in
    hindsight) that leaves at most `unmet` of the demand unmet; NaN without demand, inf when no head-room does.
    """
    ok = ~np.isnan(real) & ~np.isnan(said)
    demand, capacity = real[ok], said[ok]
    total = float(demand.sum())
    if total <= 0.0:
        return float("nan")

    def short(room: float) -> float:
        return float(np.maximum(0.0, demand - room * capacity).sum()) / total

    low, high = 0.0, 64.0
    if short(high) > unmet:
        return float("inf")
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if short(middle) <= unmet else (middle, high)
    return float(high * capacity.sum() / total)
