"""The forecaster's promises: no look-ahead, state that survives a restart, rows that are alone, and its cost."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest

from autoscaler.core.series import Arrays
from forecasting import bands
from forecasting.backtest import cells, predict, with_points
from forecasting.model import Forecaster
from forecasting.reference import last_value, window_maximum
from forecasting.score import coverage, price_of_lead, ratio_interval, weighted_quantile_loss

Floats = npt.NDArray[np.float64]

FORECASTER = Forecaster(600.0, (600.0, 1800.0), 1800.0)


def load(n: int, seed: int = 1) -> Floats:
    rng = np.random.default_rng(seed)
    at = np.arange(n)
    return np.asarray(50.0 * (1.2 + np.sin(2 * np.pi * at / 144)) * np.exp(0.1 * rng.standard_normal(n)))


def said(values: Floats, forecaster: Forecaster = FORECASTER) -> Floats:
    return predict(values, forecaster, np.ones(len(values), dtype=np.bool_))[0]


@pytest.mark.parametrize("cut", [40, 150, 260])
def test_what_comes_after_a_cut_changes_nothing_said_before_it(cut: int) -> None:
    whole = load(300)
    other = whole.copy()
    other[cut:] = np.where(np.arange(300 - cut) % 3 == 0, np.nan, 17.0 * other[cut:])
    before, after = said(whole), said(other)
    assert before[:cut].tobytes() == after[:cut].tobytes()
    assert before[cut:].tobytes() != after[cut:].tobytes()


def test_state_survives_a_restart_bit_for_bit() -> None:
    values = load(400)
    state = FORECASTER.empty(1)
    for index in range(250):
        state = FORECASTER.update(state, values[index : index + 1], index)
    again = dict(Arrays.unpack(Arrays(state).pack()))
    assert Arrays(again) == Arrays(state)
    for index in range(250, 400):
        state, again = (FORECASTER.update(each, values[index : index + 1], index) for each in (state, again))
    assert Arrays(again) == Arrays(state)
    again["offset"] = np.nextafter(again["offset"], 1.0)
    assert Arrays(again) != Arrays(state)


def test_an_update_changes_no_array_that_it_was_given() -> None:
    state = FORECASTER.empty(2)
    for index in range(60):
        state = FORECASTER.update(state, load(60)[[index, index]], index)
    before = Arrays({key: value.copy() for key, value in state.items()})
    FORECASTER.update(state, np.array([3.0, np.nan]), 75)
    assert Arrays(state) == before


def test_services_forecast_together_are_forecast_as_if_alone() -> None:
    rows = np.stack([load(200, seed) * 10.0**seed for seed in range(3)], axis=1)
    rows[50:60, 1] = np.nan
    state = FORECASTER.empty(3)
    for index, row in enumerate(rows):
        state = FORECASTER.update(state, row, index)
    alone = np.stack([said(rows[:, k])[-1] for k in range(3)])
    np.testing.assert_allclose(FORECASTER.forecast(state), alone, rtol=1e-6)


def test_a_service_that_joins_late_changes_nothing_for_the_others() -> None:
    values = load(120)
    one = two = FORECASTER.empty(1)
    for index in range(60):
        one = two = FORECASTER.update(one, values[index : index + 1], index)
    two = FORECASTER.joined(two, 1)
    for index in range(60, 120):
        one = FORECASTER.update(one, values[index : index + 1], index)
        two = FORECASTER.update(two, values[[index, index]], index)
    np.testing.assert_allclose(FORECASTER.forecast(two)[0], FORECASTER.forecast(one)[0], rtol=1e-9)
    assert np.isfinite(FORECASTER.forecast(two)[1]).all()


def test_bins_left_out_are_bins_that_nobody_saw() -> None:
    values = load(400)
    jumped = stepped = FORECASTER.empty(1)
    for index in [*range(200), *range(230, 400)]:
        jumped = FORECASTER.update(jumped, values[index : index + 1], index)
    for index in range(400):
        stepped = FORECASTER.update(
            stepped, values[index : index + 1] if not 200 <= index < 230 else np.array([np.nan]), index
        )
    np.testing.assert_allclose(FORECASTER.forecast(jumped), FORECASTER.forecast(stepped), rtol=0.02)


def test_time_never_goes_back() -> None:
    state = FORECASTER.update(FORECASTER.empty(1), np.array([1.0]), 7)
    with pytest.raises(ValueError, match="bin 7 does not come after bin 7"):
        FORECASTER.update(state, np.array([1.0]), 7)


def test_a_year_of_silence_and_then_traffic() -> None:
    state = FORECASTER.empty(1)
    for index in range(150):
        state = FORECASTER.update(state, np.array([100.0]), index)
    state = FORECASTER.update(state, np.array([0.0]), 150)
    for index in range(52_560, 52_600):
        state = FORECASTER.update(state, np.array([40.0]), index)
        rates = FORECASTER.forecast(state)
        assert np.isfinite(rates).all()
        assert rates.max() <= 3.0 * 100.0
    assert FORECASTER.forecast(state)[0, 0, 0] == pytest.approx(40.0, rel=0.15)


def test_all_zero_is_forecast_as_zero() -> None:
    assert said(np.zeros(300))[-1].max() == pytest.approx(0.0, abs=1e-6)


def test_minutes_of_history_give_a_wide_band_about_what_was_seen() -> None:
    first = said(np.array([20.0, 21.0, 19.0]))[-1]
    assert np.isfinite(first).all()
    assert first[0, 0] == pytest.approx(19.5, rel=0.2)
    assert first[0, 3] > 1.2 * first[0, 0]
    assert (np.diff(first, axis=-1) >= 0).all()


def test_a_bin_seen_in_part_beside_a_gap_is_not_a_level() -> None:
    values = np.full(200, 100.0)
    values[150], values[151:155], values[155] = 20.0, np.nan, 30.0
    rates = said(values)
    assert rates[152, 0, 0] > 80.0
    assert rates[155, 0, 0] > 80.0
    values[155:] = 30.0
    assert said(values)[165, 0, 0] < 45.0, "a level that stays is believed"


def test_a_breach_of_coverage_is_seen() -> None:
    calm = said(np.full(300, 100.0))
    assert calm[-1, 0, 3] < 130.0
    state = FORECASTER.empty(1)
    for index, value in enumerate(np.concatenate([np.full(300, 100.0), 100.0 * 1.4 ** np.arange(40)])):
        state = FORECASTER.update(state, np.array([value]), index)
    assert state["covered"][0, 0, 2] < 0.85


def test_quantiles_of_the_histogram_are_those_of_what_went_in() -> None:
    drawn = np.random.default_rng(3).normal(0.05, 0.1, 4000)
    levels = np.array([0.1, 0.5, 0.9, 0.99])
    held = bands.prior(np.full((2, 2), 0.1), 1e-6)  # two rows, two memories
    for row in np.stack([drawn, -drawn], axis=1):
        bands.learn(held, row[:, None], np.array([1.0, 0.01]))
    np.testing.assert_allclose(bands.quantiles(held, levels)[0, 0], np.quantile(drawn, levels), atol=0.012)
    np.testing.assert_allclose(bands.quantiles(held, levels)[1, 0], np.quantile(-drawn, levels), atol=0.012)
    assert bands.quantiles(held, np.array([0.5]))[0, 1, 0] == pytest.approx(drawn[-1], abs=0.012)


def test_scores_are_what_their_definitions_say() -> None:
    real, flat = np.array([10.0, 20.0, np.nan]), np.array([[12.0], [16.0], [1.0]])
    assert weighted_quantile_loss(real, flat, (0.9,))[0] == pytest.approx(2 * (0.1 * 2 + 0.9 * 4) / 30)
    assert coverage(real, flat)[0] == 0.5
    assert price_of_lead(real[:2], flat[:2, 0]) == pytest.approx((low := (20.0 - 0.3) / 16.0) * 28.0 / 30.0), (
        "one percent of 30 may be unmet"
    )
    assert low * 12.0 > 10.0
    ratio, under, above = ratio_interval(load(300), load(300)[:, None] * 1.1, load(300)[:, None] * 1.2, (0.5,), 10)
    assert under <= ratio <= above
    assert ratio == pytest.approx(0.5)


def test_the_reference_is_the_last_value_and_its_errors_of_three_days() -> None:
    values = np.array([10.0] * 8 + [20.0] * 8)
    band = last_value(values, 1, 1, 4, (0.5, 1.0))
    assert band[6].tolist() == [10.0, 10.0]
    assert band[9, 1] == 30.0, "the step, seen within three days of four rows, may come again"
    assert window_maximum(values, 1, 2)[6] == 20.0
    assert np.isnan(window_maximum(values, 1, 2)[15])


def test_a_backtest_scores_every_lead() -> None:
    values = load(600)
    made, leading = predict(values, with_points(FORECASTER), np.ones(600, dtype=np.bool_))
    short, long = cells(values, made, FORECASTER)
    assert (short.n, long.n) == (296, 294)
    assert short.wql_mean < short.challengers["last_value"]
    assert short.wql_mean < long.challengers["last_value"]
    assert short.ratio[1] <= short.ratio[0] <= short.ratio[2]
    assert long.provisioned < long.provisioned_last_value
    assert len(leading) == 4


COST = """
import json, resource, time
import numpy as np
from forecasting.model import Forecaster
rss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
forecaster = Forecaster(600.0, (600.0, 1800.0, 3600.0), 1800.0)
rng, before, spent = np.random.default_rng(0), rss(), []
state = forecaster.empty(1000)
for index in range(12):
    rates = rng.gamma(10.0, 10.0, 1000)
    start = time.process_time()
    state = forecaster.update(state, rates, index)
    forecaster.forecast(state)
    spent.append(time.process_time() - start)
print(json.dumps([sorted(spent)[6], rss() - before]))
"""


def test_a_thousand_services_at_three_leads_cost_less_than_a_second_and_200_mib() -> None:
    out = subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True, timeout=120)
    seconds, mib = json.loads(out.stdout)
    assert seconds < 1.0
    assert mib < 200.0
