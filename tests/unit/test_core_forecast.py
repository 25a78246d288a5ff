"""The short forecast: what it says of level, trend, noise, silence and gaps."""

from __future__ import annotations

from statistics import NormalDist

import pytest

from forecasting.baselines import bins, short_forecast

QS = (0.5, 0.95)


def series(values: list[float], step_s: float = 10.0) -> list[tuple[float, float]]:
    return [(step_s * (k + 1), value) for k, value in enumerate(values)]


def test_no_sample_gives_no_forecast() -> None:
    assert short_forecast([], 100.0, 60.0, QS) == ()
    assert short_forecast([(10.0, 5.0)], 10_000.0, 60.0, QS) == (), "old samples are a gap, not a level"


def test_a_level_is_its_own_median_and_its_spread_at_least_poisson() -> None:
    rows = dict(short_forecast(series([4.0] * 24), 240.0, 60.0, QS))
    assert rows[0.5] == pytest.approx(4.0)
    assert rows[0.95] == pytest.approx(4.0 + NormalDist().inv_cdf(0.95) * (4.0 / 60.0) ** 0.5)


def test_a_ramp_is_followed_to_now_and_for_half_of_the_lead() -> None:
    rows = dict(short_forecast(series([0.1 * k for k in range(1, 25)]), 240.0, 60.0, QS))
    level = sum(0.1 * k for k in range(19, 25)) / 6  # the last minute
    assert rows[0.5] == pytest.approx(level + 0.01 * (30.0 + 0.5 * 60.0))


def test_a_falling_trend_never_goes_below_zero() -> None:
    rows = dict(short_forecast(series([2.4 - 0.1 * k for k in range(24)]), 240.0, 3600.0, QS))
    assert rows[0.5] >= 0.0


def test_silence_is_never_amplified() -> None:
    assert short_forecast(series([9.0] * 18 + [0.0] * 6), 240.0, 600.0, QS) == ((0.5, 0.0), (0.95, 0.0))


def test_noise_widens_the_band() -> None:
    calm = dict(short_forecast(series([4.0] * 24), 240.0, 60.0, QS))
    wild = dict(short_forecast(series([1.0, 1.0, 7.0, 7.0] * 6), 240.0, 60.0, QS))
    assert wild[0.95] - wild[0.5] > 3 * (calm[0.95] - calm[0.5])


def test_empty_bins_are_left_out_and_not_zero() -> None:
    rates = bins([(5.0, 2.0), (95.0, 4.0)], 100.0)
    assert [(r.at_s, r.value) for r in rates] == [(10.0, 2.0), (90.0, 4.0)]
