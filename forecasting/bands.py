"""How far off a centre may be: recency-weighted quantiles of what was, for many rows at once, in constant space.

Pure; may not import a clock, a random generator, or anything that does I/O. Residuals are logarithms of (realised
maximum of the window ÷ centre). Each row keeps a histogram whose older weight fades, so that the 1,000th service costs
what the first does; cells are spaced by asinh, fine about zero and wide in the tails.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]

CELLS = 128
UNIT = 0.01  # residual below which cells are even
CORRECT = 1.0
MOST = 0.9985
LARGEST = 3.0  # a factor of 20; further off counts as that far
_REACH = float(np.arcsinh(LARGEST / UNIT))
CENTRES: Floats = UNIT * np.sinh(np.linspace(-_REACH, _REACH, CELLS))


def prior(sigma: Floats, weight: float) -> Singles:
    """[..., cells] a Laplace histogram of scale `sigma` [...] that counts as `weight` observations."""
    mass = np.exp(-np.abs(CENTRES) / sigma[..., None]) * np.gradient(CENTRES)
    out: Singles = (weight * mass / mass.sum(axis=-1, keepdims=True)).astype(np.float32)
    return out


def learn(cells: Singles, residual: Floats, keep: Floats) -> None:
    """Fade `cells` [rows..., memories, cells] by `keep` [memories] and add `residual` [rows..., 1] to every memory, in
    place; a NaN residual changes nothing.
    """
    ok = ~np.isnan(residual)
    at = (np.arcsinh(np.clip(np.where(ok, residual, 0.0), -LARGEST, LARGEST) / UNIT) + _REACH) / (2.0 * _REACH)
    at = at * (CELLS - 1)
    low = np.minimum(at.astype(np.int64), CELLS - 2)
    share = np.where(ok, at - low, 0.0).astype(np.float32)
    cells *= np.where(ok, keep, 1.0).astype(np.float32)[..., None]
    flat, memories = cells.reshape(-1), cells.shape[-2]
    place = (np.arange(low.size * memories) * CELLS).reshape(-1, memories) + low.reshape(-1, 1)
    flat[place] += (ok - share).reshape(-1, 1)
    flat[place + 1] += share.reshape(-1, 1)


def quantiles(cells: Singles, levels: npt.NDArray[np.float64]) -> Floats:
    """[rows..., levels] residuals at `levels` [levels] or [rows..., levels]: linear inside a cell."""
    total = np.cumsum(cells, axis=-1)
    middle = (total - 0.5 * cells) / total[..., -1:]
    levels = np.broadcast_to(levels, (*cells.shape[:-1], levels.shape[-1]))
    out = np.empty(levels.shape)
    for k in range(levels.shape[-1]):
        level = levels[..., k : k + 1]
        high = np.clip((middle < level).sum(axis=-1, keepdims=True), 1, CELLS - 1)
        a, b = np.take_along_axis(middle, high - 1, -1), np.take_along_axis(middle, high, -1)
        share = np.clip((level - a) / np.maximum(b - a, 1e-12), 0.0, 1.0)
        out[..., k : k + 1] = CENTRES[high - 1] + share * (CENTRES[high] - CENTRES[high - 1])
    return out


def edges(cells: Singles, qs: Sequence[float]) -> Floats:
    """[rows..., quantiles] residuals at `qs`, upper ones raised by the conformal correction q·(1 + 1/n) for the n
    observations that a fading memory amounts to.
    """
    levels = np.asarray(qs, dtype=np.float64)
    count = np.maximum(cells.sum(axis=-1, keepdims=True, dtype=np.float64), 1.0)
    raised = np.where(levels > 0.5, np.minimum(levels * (1.0 + CORRECT / count), np.maximum(levels, MOST)), levels)
    return quantiles(cells, raised)
