"""Histograms with bins of constant relative width, compiled: 64 bins for each doubling, so within 1 % at the middle.

May not know what is counted. A bin is read off a float64's own bits (exponent and the first six bits of the mantissa).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import jit

PER_DOUBLING_BITS = 6
_SHIFT = 52 - PER_DOUBLING_BITS
_LOWEST = (1023 - 20) << PER_DOUBLING_BITS  # 2**-20 s, about a microsecond: everything below is counted there
BINS = 41 << PER_DOUBLING_BITS  # up to 2**21 s, about 24 days


@jit
def count(bins: Any, value: float) -> None:
    """Count one non-negative `value`."""
    index = (np.float64(value).view(np.int64) >> _SHIFT) - _LOWEST
    bins[min(max(index, 0), BINS - 1)] += 1


def quantile(bins: NDArray[np.int64], q: float) -> float:
    """The value at quantile `q` in [0, 1]: the middle of its bin; nan when nothing was counted."""
    total = int(bins.sum())
    if total == 0:
        return float("nan")
    rank = max(1, int(np.ceil(q * total)))
    index = int(np.searchsorted(np.cumsum(bins), rank))
    edges = (np.arange(index, index + 2, dtype=np.int64) + _LOWEST) << _SHIFT
    return float(edges.view(np.float64).mean())
