"""Ours beside statsforecast's theta and MSTL, refitted at every origin, on a recorded week: one origin an hour."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forecasting.backtest import predict
from forecasting.model import Forecaster
from forecasting.reference import conformal, window_maximum
from forecasting.score import weighted_quantile_loss

Floats = npt.NDArray[np.float64]

DAY, EVERY, HORIZON = 144, 6, 6  # rows
QS = (0.5, 0.9, 0.95, 0.99)
FORECASTER = Forecaster(600.0, (1800.0,), 1800.0, QS)


def week() -> Floats:
    path = Path(os.environ["QM_DATA"]) / "demand" / "azure_2024_conv_week_10min.csv"
    with path.open(encoding="utf-8") as file:
        return np.array([float(row["requests_per_min_mid"]) for row in csv.DictReader(file)])


def theta() -> Any:
    from statsforecast.models import Theta

    return Theta(season_length=DAY)


def mstl() -> Any:
    from statsforecast.models import MSTL, AutoETS

    return MSTL(season_length=[DAY], trend_forecaster=AutoETS(model="ZZN"))


@pytest.mark.data
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [theta, mstl])
def test_no_challenger_is_more_than_five_percent_better(make: Callable[[], Any]) -> None:
    values = week()
    first, last = FORECASTER.windows[0]
    real = window_maximum(values, first, last)
    origins = np.arange(2 * DAY + 11, len(values), EVERY)
    centre = np.array([make().forecast(values[: at + 1], HORIZON)["mean"][first - 1 : last].max() for at in origins])
    theirs = conformal(centre, real[origins], -(-last // EVERY), DAY // EVERY, QS)
    ours = predict(values, FORECASTER, np.ones(len(values), dtype=np.bool_))[0][origins, 0]
    scored = origins >= len(values) // 2
    losses = [weighted_quantile_loss(real[origins][scored], said[scored], QS).mean() for said in (ours, theirs)]
    assert losses[0] < 1.05 * losses[1], losses
