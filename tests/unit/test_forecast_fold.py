"""Series and forecasts inside the controller: a fold of the journal, who speaks when, and the mix of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autoscaler.core import series
from autoscaler.core.beliefs import EMPTY, Beliefs, Sample, ServiceBelief
from autoscaler.core.demand import LEAP, forecast, mix
from autoscaler.core.events import Configured, Forecast, Observed
from autoscaler.core.learn import fold, learn
from autoscaler.core.model import Idle, Measured, Missing, Observation, ServiceLoad
from autoscaler.core.series import Arrays, SeriesBelief, long_forecast, mix_ahead, observe
from autoscaler.core.snapshot import restore, save
from policies.model import PolicySet
from tests.scene import CHAT, service, shapes_of, unit

TICK_S = 20.0
START_S = 1_000_020.0
TESTED = 660  # ticks after which the long forecast has been tested on enough windows


def seen(at_s: float, rps: float | None, tokens: float = 500.0, name: str = CHAT) -> ServiceLoad:
    """Load of one service: None was not seen, 0 is idle."""
    if rps is None:
        gone = Missing(why="gone")
        return ServiceLoad(service=name, arrival_rps=gone, prefill_tps=gone, decode_tps=gone, queued=gone, running=gone)
    idle = Idle(at_s=at_s)

    def signal(value: float) -> Measured | Idle:
        return Measured(value=value, at_s=at_s) if value > 0 else idle

    return ServiceLoad(
        service=name,
        arrival_rps=signal(rps),
        prefill_tps=signal(rps * tokens),
        decode_tps=signal(rps * 100.0),
        queued=idle,
        running=signal(rps * 2.0),
    )


def played(
    rate: Callable[[int], float | None], ticks: int, tokens: Callable[[int], float] = lambda _: 500.0
) -> Beliefs:
    policy = PolicySet(units=(unit(service()),))
    beliefs = learn(EMPTY, Configured(at_s=START_S, policy=policy, shapes=shapes_of(policy), digest="d"))
    blind = Missing(why="not asked")
    for tick in range(ticks):
        at_s = START_S + tick * TICK_S
        loads = (seen(at_s, rate(tick), tokens(tick)),)
        observation = Observation(at_s=at_s, loads=loads, serving=blind, cloud=blind)
        beliefs = fold([Observed(at_s=at_s, observation=observation)], beliefs)
    return beliefs


def told(beliefs: Beliefs) -> Forecast:
    (row,) = forecast(beliefs, beliefs.at_s)
    return row


def test_bins_hold_the_means_of_what_was_seen_and_blind_ones_nothing() -> None:
    beliefs = played(lambda tick: None if 6 <= tick < 9 else float(tick), 13)
    recent = beliefs.series.arrays["recent"][0]
    np.testing.assert_allclose(recent[-4:, 0], [1.0, 4.0, np.nan, 10.0])
    np.testing.assert_allclose(recent[-4:, 1], [500.0, 2000.0, np.nan, 5000.0])
    np.testing.assert_allclose(recent[-4:, 3], [2.0, 8.0, np.nan, 20.0])


def test_a_slow_tick_speaks_for_the_time_since_the_one_before() -> None:
    known = SeriesBelief()
    for k in range(4):
        known = observe(known, (seen(150.0 * k, 3.0),), 150.0 * k)
    assert (~np.isnan(known.arrays["recent"][0, -7:, 0])).all()
    later = observe(known, (seen(2000.0, 3.0),), 2000.0)
    later = observe(later, (seen(2100.0, 3.0),), 2100.0)
    assert later.index == 35
    assert observe(later, (seen(2050.0, 9.0),), 2050.0) is later, "a clock that goes back teaches nothing"


def test_series_survive_a_snapshot_bit_for_bit() -> None:
    half = played(lambda tick: 4.0 + np.sin(tick), 90)
    again = restore(save(half))
    assert again == half
    assert save(again) == save(half)
    at_s = half.at_s + TICK_S
    blind = Missing(why="not asked")
    event = Observed(
        at_s=at_s, observation=Observation(at_s=at_s, loads=(seen(at_s, 5.0),), serving=blind, cloud=blind)
    )
    assert save(learn(again, event)) == save(learn(half, event))


@pytest.mark.parametrize("text", ["", "bm8=", 7])
def test_arrays_that_are_none_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"arrays|string"):
        Arrays.unpack(text)


def test_the_short_forecast_speaks_until_the_long_one_has_been_tested() -> None:
    young, old = played(lambda _: 4.0, 200), played(lambda _: 4.0, TESTED)
    assert (told(young).member, told(young).coverage, told(young).commitment_s) == ("level_trend", None, 0.0)
    row = told(old)
    assert row.member not in ("level_trend", "widest")
    assert row.commitment_s <= row.lead_s < 2 * row.commitment_s, "the window that the end of the lead lies in"
    assert row.commitment_s in series.LEADS_S
    assert row.coverage == pytest.approx(0.99, abs=0.05)
    rates = dict(row.quantiles)
    assert rates[0.5] == pytest.approx(4.0, rel=0.1)
    assert rates[0.5] <= rates[0.8] <= rates[0.95] < 6.0


def test_what_lies_above_the_band_is_followed_within_a_tick() -> None:
    rates = dict(told(played(lambda tick: 4.0 if tick < TESTED + 1 else 40.0, TESTED + 3)).quantiles)
    assert rates[0.95] > 20.0


def test_silence_sleeps_on_although_the_band_would_allow_more() -> None:
    row = told(played(lambda tick: 4.0 if tick < TESTED else 0.0, TESTED + 200))
    assert row.quantiles == ((0.5, 0.0), (0.8, 0.0), (0.95, 0.0))


def test_a_breach_of_coverage_widens_the_band_and_is_said() -> None:
    calm = played(lambda _: 4.0, TESTED)
    state = dict(calm.series.state)
    state["covered"] = np.full_like(state["covered"], 0.7)
    breached = replace(calm, series=replace(calm.series, state=Arrays(state)))
    row = told(breached)
    assert (row.member, row.breached, row.coverage) == ("widest", True, 0.7)
    long = long_forecast(breached.series, CHAT, row.lead_s)
    assert long is not None
    widest = min(long.rates[3], LEAP * dict(told(played(lambda _: 4.0, 60)).quantiles)[0.95])
    assert dict(row.quantiles)[0.95] == pytest.approx(widest)
    assert widest > 1.1 * dict(told(calm).quantiles)[0.95]


def test_longer_contexts_raise_the_mix_before_they_are_all_there() -> None:
    beliefs = played(lambda _: 4.0, 180, lambda tick: 500.0 * 1.01 ** max(0, tick - 90))
    inputs, outputs = mix_ahead(beliefs.series, CHAT, 300.0)
    now = 500.0 * 1.01**89
    assert now < inputs < 2.6 * now
    assert outputs == pytest.approx(100.0)
    ahead = replace(beliefs, forecasts={CHAT: told(beliefs)})
    assert mix(ahead, CHAT)[0] == pytest.approx(told(beliefs).input_tokens)
    assert mix(ahead, CHAT)[0] > beliefs.services[CHAT].input_tokens == mix(beliefs, CHAT)[0]


def test_a_service_that_nobody_has_seen_has_no_forecast() -> None:
    assert mix_ahead(SeriesBelief(), CHAT, 60.0) == (0.0, 0.0)
    assert long_forecast(SeriesBelief(), CHAT, 60.0) is None
    known = ServiceBelief(history=(Sample(at_s=5.0, arrival_rps=1.0, prefill_tps=0.0, decode_tps=0.0),))
    assert forecast(replace(EMPTY, services={CHAT: known}), 10.0) == ()


def test_a_state_of_another_version_begins_anew() -> None:
    old = played(lambda _: 4.0, 30)
    state = {key: value for key, value in old.series.state.items() if key != "member.noise"}
    known = replace(old.series, state=Arrays(state))
    later = observe(observe(known, (seen(known.seen_at_s + 60.0, 4.0),), known.seen_at_s + 60.0), (), 2e6)
    assert later.state.keys() == old.series.state.keys()
    assert later.state["windows"].sum() == 0.0
