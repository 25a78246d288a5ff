"""How fast the forecaster reacts and how far it overshoots: step, ramp, spike, gap, level shift, weekend, clock change.

All shapes are rows of one run: sixteen days of ten-minute bins about a daily wave, with 3 % of noise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from forecasting.model import Forecaster
from forecasting.reference import window_maximum

Floats = npt.NDArray[np.float64]

DAY = 144
AT = 10 * DAY + 30  # a Thursday, 05:00; the series begin on a Monday
FORECASTER = Forecaster(600.0, (600.0, 3600.0), 1800.0)
SHAPES = ("calm", "step", "ramp", "spike", "gap", "shift", "weekend", "clock", "silence")


def shapes() -> dict[str, Floats]:
    n = 16 * DAY
    rng = np.random.default_rng(5)
    noise = np.exp(0.03 * rng.standard_normal(n))
    at = np.arange(n)

    def wave(shift: npt.NDArray[np.int64] | int = 0) -> Floats:
        return np.asarray(100.0 * (1.0 + 0.4 * np.sin(2 * np.pi * (at + shift) / DAY)) * noise)

    made = {name: wave() for name in SHAPES}
    made["step"][AT:] *= 2.0
    made["ramp"][AT:] *= np.minimum(3.0, np.linspace(1.0, 3.0, 12)[np.minimum(at[AT:] - AT, 11)])
    made["spike"][AT] *= 5.0
    made["gap"][AT - 36 : AT] = np.nan
    made["shift"][AT:] *= 0.5
    made["weekend"] *= np.where((at // DAY) % 7 >= 5, 0.4, 1.0)
    made["clock"] = wave(np.where(at >= AT, 6, 0))
    made["silence"][AT : AT + 2 * DAY] = 0.0
    return made


@pytest.fixture(scope="module")
def run() -> dict[str, tuple[Floats, Floats]]:
    """By shape: the series [n], and what was said [n, leads, quantiles]."""
    series = shapes()
    rates = np.stack([series[name] for name in SHAPES], axis=1)
    state = FORECASTER.empty(len(SHAPES))
    said = []
    for index, row in enumerate(rates):
        state = FORECASTER.update(state, row, index)
        said.append(FORECASTER.forecast(state))
    stacked = np.stack(said)
    return {name: (series[name], stacked[:, k]) for k, name in enumerate(SHAPES)}


def over(run: dict[str, tuple[Floats, Floats]], name: str, lead: int, quantile: int) -> Floats:
    """[n] what was said ÷ what came, from `AT` on."""
    series, said = run[name]
    first, last = FORECASTER.windows[lead]
    return np.asarray((said[:, lead, quantile] / window_maximum(series, first, last))[AT:])


MEDIAN, Q95, Q99 = 0, 2, 3
SOON = 20 * 6  # rows until the seasonal members meet the event again, a day later
ECHO = 1.65  # what they may make of it then
LEADS = pytest.mark.parametrize("lead", [0, 1])


@LEADS
def test_calm_days_are_forecast_within_a_few_percent(run: dict[str, tuple[Floats, Floats]], lead: int) -> None:
    assert np.nanmax(np.abs(over(run, "calm", lead, MEDIAN) - 1.0)) < 0.12
    assert np.nanmax(over(run, "calm", lead, Q99)) < 1.3


@LEADS
def test_a_step_is_inside_the_band_with_the_first_bin_that_shows_it(
    run: dict[str, tuple[Floats, Floats]], lead: int
) -> None:
    assert over(run, "step", lead, Q95)[0] > 1.0
    assert over(run, "step", lead, MEDIAN)[:DAY].min() > 0.85
    assert over(run, "step", lead, MEDIAN)[:SOON].max() < 1.2
    assert np.nanmax(over(run, "step", lead, MEDIAN)) < ECHO
    assert over(run, "step", lead, Q95)[:DAY].max() < 2.2


@LEADS
def test_a_ramp_is_caught_up_with_an_hour_and_a_half_after_it_began(
    run: dict[str, tuple[Floats, Floats]], lead: int
) -> None:
    assert over(run, "ramp", lead, Q95)[9:DAY].min() > 0.95
    assert over(run, "ramp", lead, MEDIAN)[12:DAY].min() > 0.8
    assert over(run, "ramp", lead, MEDIAN)[:SOON].max() < 1.2
    assert np.nanmax(over(run, "ramp", lead, MEDIAN)) < ECHO
    assert over(run, "ramp", lead, Q95)[:DAY].max() < 2.6


@LEADS
def test_a_spike_of_one_bin_is_let_go_with_the_next(run: dict[str, tuple[Floats, Floats]], lead: int) -> None:
    assert over(run, "spike", lead, MEDIAN)[1:SOON].max() < 1.4
    assert np.nanmax(over(run, "spike", lead, MEDIAN)[1:]) < ECHO
    assert over(run, "spike", lead, MEDIAN)[6] < 1.1
    assert over(run, "spike", lead, Q95)[6] < 1.2


@LEADS
def test_a_gap_is_neither_zero_nor_forgotten(run: dict[str, tuple[Floats, Floats]], lead: int) -> None:
    _, said = run["gap"]
    assert not np.isnan(said[AT - 36 : AT]).any()
    assert said[AT - 36 : AT, lead, MEDIAN].min() > 50.0
    assert np.abs(over(run, "gap", lead, MEDIAN)[:6] - 1.0).max() < 0.12


@LEADS
def test_half_the_level_is_believed_within_the_hour(run: dict[str, tuple[Floats, Floats]], lead: int) -> None:
    assert over(run, "shift", lead, MEDIAN)[6:DAY].max() < 1.25
    assert over(run, "shift", lead, Q95)[6:DAY].max() < 1.4
    assert over(run, "shift", lead, MEDIAN)[:SOON].min() > 0.85
    assert np.nanmin(over(run, "shift", lead, MEDIAN)) > 1.0 / ECHO


@LEADS
def test_a_second_weekend_and_its_monday(run: dict[str, tuple[Floats, Floats]], lead: int) -> None:
    ratio, band = over(run, "weekend", lead, MEDIAN), over(run, "weekend", lead, Q95)
    saturday, monday = 12 * DAY - AT, 14 * DAY - AT
    assert ratio[saturday + 6 : saturday + DAY].max() < 1.6
    assert band[monday + 6 : monday + DAY].min() > 0.95
    assert np.nanmedian(np.abs(ratio[saturday:monday] - 1.0)) < 0.1


@LEADS
def test_after_a_clock_change_the_band_still_holds(run: dict[str, tuple[Floats, Floats]], lead: int) -> None:
    after = over(run, "clock", lead, Q95)[: 3 * DAY]
    assert (after >= 1.0).mean() > 0.85
    assert np.abs(over(run, "clock", lead, MEDIAN)[2 * DAY : 3 * DAY] - 1.0).max() < 0.15
    assert after.max() < 1.35


@LEADS
def test_silence_is_zero_and_what_comes_after_it_does_not_explode(
    run: dict[str, tuple[Floats, Floats]], lead: int
) -> None:
    series, said = run["silence"]
    quiet = said[AT + 12 : AT + 2 * DAY - 12, lead]
    assert quiet.min() >= 0.0
    assert np.median(quiet[:, MEDIAN]) < 5.0
    back = said[AT + 2 * DAY + 1 :, lead]
    assert back.max() <= 3.0 * np.nanmax(series)
    assert np.median(back[DAY // 2 :, MEDIAN] / series[AT + 2 * DAY + 1 + DAY // 2 :]) == pytest.approx(1.0, abs=0.25)
