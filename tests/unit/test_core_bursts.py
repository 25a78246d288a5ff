"""The dispersion of arrival counts, against streams of which it is known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from autoscaler.core.beliefs import EMPTY
from autoscaler.core.bursts import POISSON, STEP, Bursts, observe
from autoscaler.core.events import Observed
from autoscaler.core.learn import learn
from autoscaler.core.model import CloudView, Idle, Measured, Missing, Observation, ServiceLoad, Signal

TICK_S = 10.0


def counts(arrival_cv: float, due: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.int64]:
    """Arrivals per tick of a renewal stream with Gamma gaps of this variation, `due` arrivals a tick on average."""
    rng = np.random.default_rng(seed)
    shape = 1.0 / arrival_cv**2
    marks = np.cumsum(rng.gamma(shape, 1.0 / shape, int(2.0 * due.sum() + 1000)))
    ends = np.concatenate([[0.0], np.cumsum(due)])
    made: npt.NDArray[np.int64] = np.histogram(marks, ends)[0]
    return made


def followed(per_tick: npt.NDArray[np.int64]) -> list[Bursts]:
    """What was believed after each tick."""
    seen = [(n * TICK_S, count / TICK_S) for n, count in enumerate(per_tick)]
    known, made = POISSON, []
    for n, (at_s, rps) in enumerate(seen):
        known = observe(known, seen[max(0, n - 2) : n], at_s, rps)
        made.append(known)
    return made


@pytest.mark.parametrize("arrival_cv", [1.0, 2.0, 4.0])
def test_the_variation_of_a_steady_stream_is_found_within_an_hour(arrival_cv: float) -> None:
    found = [followed(counts(arrival_cv, np.full(360, 50.0), seed))[-1].arrival_cv for seed in range(8)]
    assert float(np.mean(found)) == pytest.approx(arrival_cv, rel=0.12)
    assert max(found) <= arrival_cv * STEP**0.5 * 1.3


def test_a_crowd_is_a_change_of_level_and_no_bursts() -> None:
    rise = np.concatenate([np.full(180, 50.0), np.linspace(50.0, 500.0, 6), np.full(90, 500.0), np.full(84, 50.0)])
    assert max(known.held for known in followed(counts(1.0, rise, 3))) <= STEP


def test_few_requests_are_little_evidence() -> None:
    assert followed(counts(4.0, np.full(12, 0.05), 1))[-1].held == 1.0


def test_what_decisions_use_stands_still_while_the_estimate_wanders() -> None:
    held = [known.held for known in followed(counts(2.0, np.full(1080, 50.0), 5))][360:]
    assert sum(a != b for a, b in pairwise(held)) <= 4


def test_silence_and_ticks_of_other_lengths_teach_nothing() -> None:
    known = Bursts(total=40.0, weight=20.0, held=2.25)
    assert observe(known, [(0.0, 0.0), (10.0, 0.0)], 20.0, 0.0) == known
    assert observe(known, [(0.0, 5.0), (10.0, 5.0)], 40.0, 0.0) == known
    assert observe(known, [(0.0, 5.0)], 10.0, 9.0) == known


def test_beliefs_follow_the_counts_that_were_observed() -> None:
    unseen: Signal = Missing(why="not asked")
    beliefs = EMPTY
    for n, count in enumerate(counts(4.0, np.full(180, 50.0), 2)):
        at_s = n * TICK_S
        rps = Measured(value=count / TICK_S, at_s=at_s) if count else Idle(at_s=at_s)
        load = ServiceLoad(
            service="a/b", arrival_rps=rps, prefill_tps=unseen, decode_tps=unseen, queued=unseen, running=unseen
        )
        seen = Observation(
            at_s=at_s,
            cloud=CloudView(at_s=at_s, offerings=(), instances=()),
            serving=Missing(why="none"),
            loads=(load,),
            engines=Missing(why="none"),
        )
        beliefs = learn(beliefs, Observed(at_s=at_s, observation=seen))
    assert beliefs.services["a/b"].bursts.arrival_cv == pytest.approx(4.0, rel=0.2)
