"""What the engine does to requests, on cases worked out by hand: a prompt of 1,000 tokens takes 1 s, a step 10 ms."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np
import pytest

from chaos.engine import Engine, RequestBatch
from tests.engine_scene import PLAIN, Listed, engine, rows, same, spec, table


def one(**given: Any) -> Engine:
    """One request (1 s of prefill, then 10 steps of 10 ms) on one replica, run to its end."""
    made = engine(same(1), **given)
    made.add_replica(0, 0, PLAIN, slots=100)
    made.advance(10.0)
    return made


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    totals = one().totals(0)
    assert (totals.requests, totals.finished, totals.met, totals.in_flight) == (1, 1, 1, 0)
    assert (totals.input_tokens, totals.output_tokens) == (1000, 11)
    assert totals.ttft_s["p99"] == pytest.approx(1.0, rel=0.01)
    assert totals.tpot_s["p50"] == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(
    ("case", "limits", "missed"),
    [
        ("just in time", {"ttft_s": 1.001, "tpot_s": 0.01001, "e2e_s": 1.101, "deadline_s": 1.101}, (0, 0, 0)),
        ("first token late", {"ttft_s": 0.999}, (1, 0, 0)),
        ("tokens slow", {"tpot_s": 0.00999}, (0, 1, 0)),
        ("whole late", {"e2e_s": 1.099}, (0, 0, 1)),
        ("deadline missed", {"deadline_s": 1.099}, (0, 0, 1)),
        ("several at once are one miss", {"ttft_s": 0.9, "tpot_s": 0.001}, (1, 1, 0)),
    ],
)
def test_limits(case: str, limits: dict[str, float], missed: tuple[int, int, int]) -> None:
    totals = one(**limits).totals(0)
    assert (totals.missed_ttft, totals.missed_tpot, totals.missed_e2e) == missed, case
    assert totals.met == (0 if any(missed) else 1), case


def test_the_time_between_tokens_is_not_tested_below_two_tokens() -> None:
    made = engine(same(1, outputs=1), tpot_s=0.0)
    made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(5.0)
    assert made.totals(0).met == 1
    assert np.isnan(made.totals(0).tpot_s["p50"])


def test_first_token_counts_from_the_gateway() -> None:
    """The second of two on a replica with one slot waits 1.1 s before its second of prefill."""
    made = engine(same(2), ttft_s=2.05)
    made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(1.05)
    assert made.window(0).queued == 1
    made.advance(10.0)
    assert (made.totals(0).finished, made.totals(0).missed_ttft) == (2, 1)


def test_a_slow_node_multiplies_every_step() -> None:
    made = engine(same(1), ttft_s=1.49, tpot_s=0.0149)
    made.add_replica(0, 0, PLAIN, slowdown=1.5, slots=1)
    made.advance(1.64)
    assert made.totals(0).finished == 0
    made.advance(1.66)
    assert (made.totals(0).missed_ttft, made.totals(0).missed_tpot) == (1, 1)


def test_a_cached_prefix_is_not_prefilled() -> None:
    made = engine(rows([0.0], [1000], [1], prefix=900))
    made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(0.11)
    assert made.totals(0).ttft_s["p50"] == pytest.approx(0.1, rel=0.01)


def test_a_prompt_that_can_never_fit_fails_and_holds_nothing() -> None:
    made = engine(rows([0.0, 0.0], [60_000, 10], [5, 5]))
    replica = made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(5.0)
    totals = made.totals(0)
    assert (totals.failed, totals.finished, made.in_flight(replica)) == (1, 1, 0)


def test_the_context_bounds_the_answer() -> None:
    made = engine(rows([0.0], [1000], [500]))
    made.add_replica(0, 0, replace(PLAIN, max_model_len=1020), slots=1)
    made.advance(60.0)
    assert (made.totals(0).finished, made.totals(0).output_tokens) == (1, 20)


def test_the_calls_of_a_task_follow_each_other_with_growing_context() -> None:
    """1,000 + 10 out + 90 grown = 1,100, then 1,200; each ends 1.09, 1.19, 1.29 s after it began, with 2 s between."""
    made = engine(rows([0.0], [1000], [10], tasks=[1]), table((1, 9.0, 9), (3, 2.0, 90)))
    made.add_replica(0, 0, PLAIN, slots=1)
    seen = []
    for until_s in (1.0, 3.0, 3.1, 4.27, 4.29, 6.27, 6.29, 7.56, 7.58, 99.0):
        made.advance(until_s)
        window = made.window(0)
        seen.append((window.arrived, window.input_tokens, window.finished))
    assert seen == [
        (1, 1000, 0), (0, 0, 1), (1, 1100, 0), (0, 0, 0), (0, 0, 1),
        (0, 0, 0), (1, 1200, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0),
    ]  # fmt: skip
    assert made.totals(0).requests == 3


def test_a_lost_call_loses_the_calls_that_would_have_followed() -> None:
    made = engine(rows([0.0, 0.0], [1000] * 2, [10] * 2, tasks=[0, 0]), table((4, 1.0, 0)), max_queued=0)
    made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(99.0)
    totals = made.totals(0)
    assert (totals.requests, totals.finished, totals.shed) == (8, 4, 4)
    assert made.window(0).arrived == 5


def test_windows_of_a_replica_tell_what_its_engine_did() -> None:
    """Two prompts of 500 tokens share the first second; then two sequences decode, 0.4 s of which are seen."""
    made = engine(rows([0.0, 0.0], [500, 500], [101, 101]))
    replica = made.add_replica(0, 0, PLAIN, slots=5)
    made.advance(1.0)
    first = made.replica_windows([replica])[0]
    assert (first.running, first.waiting, first.samples, first.steps) == (2, 0, 2, 1)
    assert (first.prefill_s, first.input_tokens) == pytest.approx((1.0, 500.0))
    assert isnan(first.mean_batch)  # nothing was decoded yet
    made.advance(1.4051)
    second = made.replica_windows([replica])[0]
    assert (second.steps, second.samples) == (40, 0)
    assert second.kv_fraction == pytest.approx((1002 + 80) / 50_000)
    assert (second.tpot_s, second.mean_batch) == pytest.approx((0.01, 2.0))
    assert second.mean_kv_tokens == pytest.approx(1042.0, rel=0.001)
    assert made.window(0).output_tokens == 82
    made.advance(3.0)
    third = made.replica_windows([replica])[0]
    assert (third.running, third.steps, third.kv_fraction) == (0, 60, 0.0)
    assert third.mean_batch == pytest.approx(2.0)  # the silence after them does not count
    assert made.window(0).output_tokens == 120


def test_looking_changes_nothing() -> None:
    def final(stops: list[float]) -> object:
        made = engine(rows([0.1 * i for i in range(40)], [700] * 40, list(range(5, 205, 5))), ttft_s=1.5)
        replica = made.add_replica(0, 0, replace(PLAIN, c_s_per_ktoken=0.001), slots=20)
        for stop in stops:
            made.advance(stop)
            made.replica_windows([replica])[0]
            made.window(0)
        return made.totals(0)

    assert final([200.0]) == final([0.01 * i for i in range(5000)] + [200.0])


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (rows([5.0, 4.0], [1, 1], [1, 1]), "in order of time"),
        (rows([-1.0], [1], [1]), "in order of time"),
        (rows([1.0, float("nan"), 2.0], [1] * 3, [1] * 3), "in order of time"),
        (rows([11.0], [1], [1]), "in order of time"),
        (rows([1.0], [0], [1]), "tokens >= 1"),
        (rows([1.0], [1], [-3]), "tokens >= 1"),
        (rows([1.0], [1], [1], prefix=-1), "prefix tokens >= 0"),
        (rows([1.0], [1], [1], tasks=[2]), "task 2"),
    ],
)
def test_streams_that_make_no_sense_are_named(batch: RequestBatch, problem: str) -> None:
    class Careless(Listed):
        def take(self, until_s: float) -> RequestBatch:
            return batch

    with pytest.raises(ValueError, match=f"unit/service: .*{problem}"):
        engine(batch, arrivals=Careless(batch)).advance(10.0)


def test_time_never_goes_back() -> None:
    made = Engine([spec(same(0))], start_s=5.0)
    for until_s in (4.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="the engine is at 5"):
            made.advance(until_s)


@pytest.mark.parametrize(
    "broken",
    [{"a_s": 0.0}, {"prefill_tps": 0.0}, {"b_s_per_seq": -1e-6}, {"moe_w_s": float("nan")}, {"kv_capacity_tokens": 0},
     {"max_num_seqs": 0}],
)  # fmt: skip
def test_an_engine_whose_time_would_stand_still_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a replica"):
        engine(same(1)).add_replica(0, 0, replace(PLAIN, **broken), slots=1)


def test_what_is_not_there_is_named() -> None:
    made = engine(same(0))
    with pytest.raises(ValueError, match="no replica 0"):
        made.in_flight(0)
    with pytest.raises(ValueError, match="slots >= 1"):
        made.add_replica(0, 0, PLAIN, slots=0)
    with pytest.raises(ValueError, match="at least one call"):
        engine(same(0), table((0, 1.0, 1)))
