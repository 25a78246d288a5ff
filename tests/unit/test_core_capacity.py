"""What a replica carries, against hand-worked figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoscaler.core.capacity import MOST_LOAD, SAFETY, Mix, capacity, capacity_at, mix_or_prior
from autoscaler.core.reasons import ReasonCode
from policies.model import Slo
from serve_apps.timing import Timing, decode_step_s, prefill_s

DENSE = Timing(a_s=0.02, b_s_per_seq=0.001, c_s_per_ktoken=0.0, prefill_tps=10_000.0, max_num_seqs=8)
H100 = Timing(a_s=0.0063, b_s_per_seq=0.000011, c_s_per_ktoken=0.000043, prefill_tps=47_000.0)
MIX = Mix(input_tokens=500.0, output_tokens=100.0)


def test_step_time_is_the_published_law() -> None:
    # 8B on H100: 6.3 ms + .011 ms a sequence + .043 ms per thousand tokens, at 64 sequences of 2,000 tokens.
    assert decode_step_s(H100, 64, 128_000) == pytest.approx(0.0063 + 0.000704 + 0.005504)
    assert prefill_s(H100, 4700) == pytest.approx(0.1)


def test_experts_are_covered_as_the_batch_grows() -> None:
    moe = Timing(
        a_s=0.0038,
        b_s_per_seq=0.0,
        c_s_per_ktoken=0.0,
        prefill_tps=1.0,
        moe_w_s=0.0152,
        moe_active_fraction=8 / 128,
    )
    assert decode_step_s(moe, 1, 0) == pytest.approx(0.0038 + 0.0152 / 16)
    assert decode_step_s(moe, 256, 0) == pytest.approx(0.019, rel=1e-4)


def test_without_limits_a_replica_carries_nearly_what_a_full_batch_delivers() -> None:
    made = capacity(DENSE, MIX, Slo(), "latency")
    assert made.batch == 8
    assert made.rps == pytest.approx(SAFETY * MOST_LOAD * 8 / (100 * 0.028 + 8 * 0.05), rel=0.03)
    figures = dict(made.reasons[0].numbers)
    assert figures["batch"] == pytest.approx(8.0)
    assert (figures["rps"], figures["slots"], figures["pool"]) == (made.rps, 8.0, 1.0)


def test_the_steady_load_spends_its_share_of_the_misses_and_no_more() -> None:
    strict, loose = (capacity(H100, MIX, Slo(tpot_s=0.012, fraction=f), "latency") for f in (0.99, 0.9))
    eager = capacity(H100, MIX, Slo(tpot_s=0.012, fraction=0.9), "cost")
    assert 0.0 < strict.rps < loose.rps < eager.rps
    assert strict.batch <= loose.batch == eager.batch, "what may run at a time does not depend on the goal"


def test_a_pool_levels_what_one_replica_alone_cannot() -> None:
    figures = [capacity(H100, MIX, Slo(tpot_s=0.012), "latency", pool) for pool in (1, 2, 4, 16, 99)]
    rates = [made.rps for made in figures]
    assert rates[:4] == sorted(rates[:4])
    assert rates[0] < 0.97 * rates[3]
    assert rates[4] == rates[3]
    assert [dict(made.reasons[0].numbers)["pool"] for made in figures] == [1.0, 2.0, 4.0, 16.0, 16.0]


@pytest.mark.parametrize("arrival_cv", [1.0, 2.0])
def test_the_pool_is_as_large_as_what_shares_the_load(arrival_cv: float) -> None:
    mix = Mix(input_tokens=500.0, output_tokens=100.0, arrival_cv=arrival_cv)
    for rps in (0.0, 1.0, 5.0, 12.0, 1000.0):
        made = capacity_at(DENSE, mix, Slo(tpot_s=0.04), "latency", rps)
        pool = int(dict(made.reasons[0].numbers)["pool"])
        assert made == capacity(DENSE, mix, Slo(tpot_s=0.04), "latency", pool)
        assert pool in {min(16, max(1, math.ceil(rps / made.rps) + more)) for more in (0, 1)}, rps


def test_bursts_carry_less_and_a_pool_shares_them_out() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.012)

    def rps(arrival_cv: float, pool: int) -> float:
        mix = Mix(input_tokens=500.0, output_tokens=100.0, arrival_cv=arrival_cv)
        return capacity(H100, mix, slo, "latency", pool).rps

    alone, shared = ([rps(cv, pool) for cv in (1.0, 2.0, 4.0)] for pool in (1, 8))
    assert alone == sorted(alone, reverse=True)
    assert shared == sorted(shared, reverse=True)
    assert alone[1] / alone[0] < shared[1] / shared[0] < 1.0


def test_what_may_run_at_a_time_is_no_matter_of_when_it_comes() -> None:
    made = [
        capacity(H100, Mix(input_tokens=500.0, output_tokens=100.0, arrival_cv=cv), Slo(tpot_s=0.012), "latency").batch
        for cv in (1.0, 4.0)
    ]
    assert made[0] == made[1]


def test_company_too_large_for_the_limits_whatever_the_load_is_reported_with_what_is_met() -> None:
    # A prompt takes 55 ms, and half of the requests come right after seven others: .3 s hold five prompts.
    mix = Mix(input_tokens=500.0, output_tokens=100.0, arrival_cv=4.0)
    slo = Slo(ttft_s=0.3, fraction=0.99)
    alone = capacity(DENSE, mix, slo, "latency")
    reason = alone.reasons[-1]
    assert (reason.code, reason.subject) == (ReasonCode.UNREACHABLE_SLO, "bursts")
    assert 0.5 < dict(reason.numbers)["floor"] < 0.99
    assert alone.rps > 0.0
    shared = capacity_at(DENSE, mix, slo, "latency", 1.0)
    assert dict(shared.reasons[0].numbers)["pool"] > 1.0, "a larger pool shares the company out"
    assert all(reason.subject != "bursts" for reason in shared.reasons)


def test_one_slot_is_an_erlang_queue() -> None:
    # 4 s of work a request, no prefill to speak of: a wait beyond w s has probability ρ·exp(−(1 − ρ)·w/4).
    one = Timing(a_s=0.04, b_s_per_seq=0.0, c_s_per_ktoken=0.0, prefill_tps=1e9, max_num_seqs=1)
    slo = Slo(ttft_s=8.04, fraction=0.9)
    made = capacity(one, Mix(input_tokens=1.0, output_tokens=100.0), slo, "latency")
    used = made.rps / SAFETY * 4.0
    assert used * math.exp(-(1.0 - used) * 2.0) == pytest.approx(0.05, rel=0.03)


def test_a_tighter_token_limit_never_carries_more() -> None:
    made = [capacity(H100, MIX, Slo(tpot_s=limit), "latency") for limit in (0.008, 0.01, 0.012, 0.02, 0.05)]
    assert [one.rps for one in made] == sorted(one.rps for one in made)
    assert [one.batch for one in made] == sorted(one.batch for one in made)


def test_limits_on_the_first_and_the_last_token_bound_the_load() -> None:
    free = capacity(H100, MIX, Slo(), "latency").rps
    assert capacity(H100, MIX, Slo(ttft_s=0.04), "latency").rps < 0.9 * free
    assert capacity(H100, MIX, Slo(e2e_s=4.0), "latency").rps < 0.9 * free


def test_resident_tokens_bound_the_batch() -> None:
    small = Timing(
        a_s=0.02, b_s_per_seq=0.001, c_s_per_ktoken=0.0, prefill_tps=10_000.0, max_num_seqs=8, kv_capacity_tokens=3_040
    )
    assert capacity(small, MIX, Slo(), "latency").batch == 4  # .8 × 3,040 / (500 + 100 × (1 + .74²) / 2)


def test_what_a_prefix_cache_holds_takes_room_but_no_time() -> None:
    slo = Slo(ttft_s=0.2)
    whole, half, short = (
        capacity(DENSE, Mix(input_tokens=inputs, output_tokens=20.0, prefix_share=share), slo, "latency")
        for inputs, share in ((1000.0, 0.0), (1000.0, 0.5), (500.0, 0.0))
    )
    assert half.rps > 1.3 * whole.rps
    assert half.rps == pytest.approx(short.rps, rel=0.03)  # whose memory does not bind here
    tight = replace(DENSE, kv_capacity_tokens=5_000)
    assert capacity(tight, Mix(input_tokens=1000.0, output_tokens=20.0, prefix_share=0.5), slo, "latency").batch == 3


def test_lengths_that_vary_more_carry_less() -> None:
    slo = Slo(tpot_s=0.012, e2e_s=4.0)
    even = capacity(H100, Mix(input_tokens=500.0, output_tokens=100.0, input_cv=0.2, output_cv=0.2), slo, "latency")
    assert capacity(H100, MIX, slo, "latency").rps < even.rps


def test_an_objective_that_long_prompts_miss_whatever_the_load_is_named_and_planned_for_all_the_same() -> None:
    # Ten thousand tokens a second: 119 ms beside a step of 21 ms hold 1,190 tokens, which 6 % of the prompts exceed.
    made = capacity(DENSE, MIX, Slo(ttft_s=0.14, fraction=0.99), "latency")
    reason = made.reasons[-1]
    assert (reason.code, reason.subject) == (ReasonCode.UNREACHABLE_SLO, "fraction")
    figures = dict(reason.numbers)
    assert figures["limit"] == 0.99
    assert 0.8 < figures["floor"] < 0.99
    assert made.rps > 0.5


def test_a_long_context_carries_less_than_a_short_one() -> None:
    timing = Timing(a_s=0.006, b_s_per_seq=0.00001, c_s_per_ktoken=0.00004, prefill_tps=47_000.0)
    chat = capacity(timing, Mix(input_tokens=200, output_tokens=100), Slo(tpot_s=0.03), "latency")
    agent = capacity(timing, Mix(input_tokens=60_000, output_tokens=100), Slo(tpot_s=0.03), "latency")
    assert chat.rps > 50 * agent.rps


@pytest.mark.parametrize(
    ("slo", "subject", "floor", "limit"),
    [
        (Slo(ttft_s=0.01), "ttft_s", 0.05, 0.01),
        (Slo(tpot_s=0.01), "tpot_s", 0.021, 0.01),
        (Slo(e2e_s=1.0), "e2e_s", 2.2, 1.0),
        (Slo(deadline_s=1.5), "deadline_s", 2.2, 1.5),
    ],
)
def test_an_unreachable_limit_is_named_with_its_floor(slo: Slo, subject: str, floor: float, limit: float) -> None:
    made = capacity(DENSE, MIX, slo, "latency")
    reason = made.reasons[-1]
    assert made.batch == 1
    assert (reason.code, reason.subject) == (ReasonCode.UNREACHABLE_SLO, subject)
    assert dict(reason.numbers) == pytest.approx({"floor_s": floor, "limit_s": limit}, rel=0.02)


def test_a_service_nobody_called_has_the_prior_mix_bounded_by_its_context() -> None:
    assert mix_or_prior(0.0, 0.0, DENSE) == Mix(input_tokens=1150.0, output_tokens=210.0)
    tiny = Timing(a_s=1, b_s_per_seq=0, c_s_per_ktoken=0, prefill_tps=1, max_model_len=1024)
    assert mix_or_prior(0.0, 0.0, tiny) == Mix(input_tokens=256.0, output_tokens=210.0)
    assert mix_or_prior(30.0, 7.0, tiny) == Mix(input_tokens=30.0, output_tokens=7.0)
