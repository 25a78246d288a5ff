"""The share of prompts that prefix caches hold, from what gateways and engines count."""

from __future__ import annotations

import pytest

from autoscaler.core.beliefs import EMPTY
from autoscaler.core.events import Observed
from autoscaler.core.learn import learn
from autoscaler.core.model import EngineLoad, Measured, Missing, Observation, Replica, ServiceLoad, ServingView, Signal
from autoscaler.core.prompts import KEPT_S, NONE, Prompts, Sums, observe

UNSEEN = Missing(why="not asked")
QUIET = (0.0, 0.0)


def test_the_share_is_what_engines_do_not_compute_in_steps_rounded_down() -> None:
    assert Prompts(Sums(10_000.0, 10_000 * 1000.0, 10_000.0, 10_000 * 630.0)).prefix_share == pytest.approx(0.35)
    assert Prompts(Sums(10_000.0, 10_000 * 1000.0, 10_000.0, 10_000 * 1.0)).prefix_share == 0.95
    assert Prompts(Sums(10_000.0, 10_000 * 1000.0, 10_000.0, 10_000 * 1010.0)).prefix_share == 0.0


def test_few_requests_say_little_and_engines_that_count_nothing_say_nothing() -> None:
    assert NONE.prefix_share == 0.0
    assert Prompts(Sums(50.0, 50_000.0, 50.0, 5_000.0)).prefix_share == pytest.approx(0.3)  # .9 × 50 / 150
    assert Prompts(Sums(50.0, 50_000.0, 0.0, 0.0)).prefix_share == 0.0


def test_a_backlog_delays_prefills_and_does_not_look_like_a_cache() -> None:
    known = NONE
    for tick in range(360):  # arrivals at ten a second, of which half are prefilled; then the rest
        arrives = tick < 180
        known = observe(known, 10.0, 10.0 * arrives, 10_000.0 * arrives, (50.0, 50_000.0))
        assert known.prefix_share == 0.0


def test_arrivals_of_unknown_length_are_not_empty_prompts() -> None:
    known = observe(observe(NONE, 600.0, 10.0, 0.0, QUIET), 10.0, 10.0, 10_000.0, (100.0, 100_000.0))
    assert (known.slow.arrived, known.slow.prefilled) == (known.quick.arrived, known.quick.prefilled) == (100.0, 100.0)


def test_what_was_long_ago_fades() -> None:
    known = observe(NONE, 10.0, 100.0, 100_000.0, (1000.0, 400_000.0))
    later = observe(known, KEPT_S, 100.0, 100_000.0, (360_000.0, 360_000 * 1000.0))
    assert known.prefix_share == pytest.approx(0.5)
    assert later.prefix_share == 0.0


def shares(met: list[float], rps: float = 10.0) -> list[float]:
    """What is believed after each tick of ten seconds in which caches held this part of prompts of 1,000 tokens."""
    known, said = NONE, []
    for part in met:
        computed = rps * 10.0 * 1000.0 * (1.0 - part)
        known = observe(known, 10.0, rps, rps * 1000.0, (rps * 10.0, computed))
        said.append(known.prefix_share)
    return said


def test_a_cache_that_is_met_no_more_is_load_within_minutes_and_one_that_is_met_is_believed_within_the_hour() -> None:
    said = shares([0.8] * 720 + [0.0] * 30)
    assert said[719] == pytest.approx(0.75), "a hundred requests spoke for none"
    assert said[720 + 11] <= 0.55, "two minutes after"
    assert said[-1] < 0.31, "five minutes after; the hour's mean is above .7 still"
    said = shares([0.0] * 720 + [0.8] * 360)
    assert said[720 + 29] <= 0.05, "five minutes of luck are none"
    assert said[-1] >= 0.45


def test_one_odd_minute_of_a_quiet_service_moves_nothing_much() -> None:
    said = shares([0.8] * 720 + [0.0] * 6, rps=0.1)
    assert said[719] - said[-1] < 0.051


def seen(at_s: float, engine_tokens: Signal) -> Observed:
    rates = [Measured(value=value, at_s=at_s) for value in (10.0, 20_000.0, 500.0, 0.0, 3.0)]
    load = ServiceLoad(
        service="u/s",
        arrival_rps=rates[0],
        prefill_tps=rates[1],
        decode_tps=rates[2],
        queued=rates[3],
        running=rates[4],
    )
    replica = Replica(replica_id="r", service="u/s", variant="v", instance_id="i", state="ready", since_s=0.0)
    engine = EngineLoad(
        replica_id="r",
        running=rates[4],
        waiting=rates[3],
        kv_fraction=UNSEEN,
        input_tokens=engine_tokens,
        samples=100.0,
    )
    serving = ServingView(at_s=at_s, replicas=(replica,), nodes=(), targets=())
    cloud = Missing(why="not asked")
    return Observed(
        at_s=at_s, observation=Observation(at_s=at_s, loads=(load,), serving=serving, cloud=cloud, engines=(engine,))
    )


def test_beliefs_compare_prompts_that_arrive_with_those_that_engines_prefill() -> None:
    beliefs = EMPTY
    for tick in range(100):
        beliefs = learn(beliefs, seen(10.0 * tick, Measured(value=900.0, at_s=10.0 * tick)))
    assert beliefs.services["u/s"].prompts.prefix_share == pytest.approx(0.5)
    blind = EMPTY
    for tick in range(100):
        blind = learn(blind, seen(10.0 * tick, UNSEEN))
    assert blind.services["u/s"].prompts.prefix_share == 0.0
