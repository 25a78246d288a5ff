"""Ours beside statsforecast's theta and MSTL, refitted at every origin: on a recorded week with one origin an hour, or,
with `QM_FORECAST_PROOF=1`, on both long series at three leads with every origin and the ratio's interval (an hour).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forecasting import reference
from forecasting.backtest import predict
from forecasting.model import Forecaster
from forecasting.reference import conformal, window_maximum
from forecasting.score import ratio_interval

Floats = npt.NDArray[np.float64]

DAY, HORIZON = 144, 9  # rows
QS = (0.5, 0.9, 0.95, 0.99)
FORECASTER = Forecaster(600.0, (600.0, 1800.0, 3600.0), 1800.0, QS)
WEEK = ("azure_2024_conv_week_10min.csv", "requests_per_min_mid")
FORTNIGHT = ("servegen_m_small_14d_10min.csv", "requests")
PROOF = os.environ.get("QM_FORECAST_PROOF") == "1"
CASES = (
    [(WEEK, lead, 1) for lead in range(3)] + [(FORTNIGHT, lead, 1) for lead in range(3)] if PROOF else [(WEEK, 1, 6)]
)


def recorded(name: str, column: str) -> Floats:
    path = Path(os.environ["QM_DATA"]) / "demand" / name
    with path.open(encoding="utf-8") as file:
        values = np.array([float(row[column]) for row in csv.DictReader(file)])
    return np.where(values > 0.0, values, np.nan)


def theta() -> Any:
    from statsforecast.models import Theta

    return Theta(season_length=DAY)


def mstl() -> Any:
    from statsforecast.models import MSTL, AutoETS

    return MSTL(season_length=[DAY], trend_forecaster=AutoETS(model="ZZN"))


@pytest.mark.data
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [theta, mstl])
@pytest.mark.parametrize(("series", "lead", "every"), CASES)
def test_no_challenger_is_more_than_five_percent_better(
    make: Callable[[], Any], series: tuple[str, str], lead: int, every: int
) -> None:
    values = recorded(*series)
    filled, (first, last) = reference.filled(values), FORECASTER.windows[lead]
    real = window_maximum(values, first, last)
    origins = np.arange(2 * DAY + 11, len(values), every)
    centre = np.array([make().forecast(filled[: at + 1], HORIZON)["mean"][first - 1 : last].max() for at in origins])
    theirs = conformal(centre, real[origins], -(-last // every), DAY // every, QS)
    ours = predict(values, FORECASTER, np.ones(len(values), dtype=np.bool_))[0][origins, lead]
    scored = origins >= len(values) // 2
    parts = (real[origins][scored], ours[scored], theirs[scored])
    ratio, low, high = ratio_interval(*parts, QS, DAY // every)
    print(f"{series[0]} {FORECASTER.leads_s[lead]:g} s {make.__name__}: {ratio:.3f} ({low:.3f}-{high:.3f})")
    assert ratio < 1.05 or low < 1.02
