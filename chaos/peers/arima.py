"""ARIMA(2,1,1) of a rate: fitted once by statsmodels and kept, then carried forward by its own recursion.

May not read a clock. A fit depends on the history alone, so runs that saw the same load share it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

ORDER = (2, 1, 1)


class Arima(NamedTuple):
    """Coefficients: ``w[t] = ar1·w[t−1] + ar2·w[t−2] + e[t] + ma1·e[t−1]``, w the differences of the series."""

    ar1: float
    ar2: float
    ma1: float


@lru_cache(maxsize=512)
def fitted(history: tuple[float, ...]) -> Arima:
    """Maximum likelihood on `history` (at least 16 values); a flat one gets zeros, which repeat its last value."""
    if np.ptp(np.diff(history)) == 0.0:
        return Arima(0.0, 0.0, 0.0)
    from statsmodels.tsa.arima.model import ARIMA  # two seconds to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit that did not converge still forecasts; its error is the peer's own
        result = ARIMA(np.asarray(history), order=ORDER).fit(method_kwargs={"maxiter": 50})
    ar1, ar2, ma1 = (float(value) for value in result.params[:3])
    return Arima(ar1, ar2, ma1)


def forecast(arima: Arima, history: Sequence[float], steps: int) -> list[float]:
    """The next `steps` values after `history`, innovations before its beginning being zero."""
    changes = np.diff(history).tolist()
    before, last, shock = 0.0, 0.0, 0.0
    for change in changes:
        expected = arima.ar1 * last + arima.ar2 * before + arima.ma1 * shock
        before, last, shock = last, change, change - expected
    value, found = float(history[-1]), []
    for _ in range(steps):
        change = arima.ar1 * last + arima.ar2 * before + arima.ma1 * shock
        before, last, shock = last, change, 0.0
        value += change
        found.append(value)
    return found
