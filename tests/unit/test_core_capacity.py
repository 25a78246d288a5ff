"""What a replica carries, against hand-worked figures."""

from __future__ import annotations

import pytest

from autoscaler.core.capacity import Mix, capacity, mix_or_prior
from autoscaler.core.reasons import ReasonCode
from policies.model import Slo
from serve_apps.timing import Timing, decode_step_s, prefill_s

DENSE = Timing(a_s=0.02, b_s_per_seq=0.001, c_s_per_ktoken=0.0, prefill_tps=10_000.0, max_num_seqs=8)
MIX = Mix(input_tokens=500.0, output_tokens=100.0)


def test_step_time_is_the_published_law() -> None:
    # 8B on H100: 6.3 ms + .011 ms a sequence + .043 ms per thousand tokens, at 64 sequences of 2,000 tokens.
    h100 = Timing(a_s=0.0063, b_s_per_seq=0.000011, c_s_per_ktoken=0.000043, prefill_tps=47_000.0)
    assert decode_step_s(h100, 64, 128_000) == pytest.approx(0.0063 + 0.000704 + 0.005504)
    assert prefill_s(h100, 4700) == pytest.approx(0.1)


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


def test_capacity_is_batch_over_work_times_utilisation() -> None:
    made = capacity(DENSE, MIX, Slo(ttft_s=2.0, tpot_s=0.1), "latency")
    assert made.batch == 8
    assert made.rps == pytest.approx(0.7 * 8 / (100 * 0.028 + 8 * 0.05))
    assert dict(made.reasons[0].numbers) == {"rps": made.rps, "batch": 8.0, "utilisation": 0.7}


@pytest.mark.parametrize(("goal", "share"), [("latency", 0.7), ("throughput", 0.85), ("cost", 0.9)])
def test_goals_plan_for_different_utilisation(goal: str, share: float) -> None:
    made = capacity(DENSE, MIX, Slo(), goal)  # type: ignore[arg-type]
    assert made.rps == pytest.approx(share * 8 / 3.2)


def test_a_token_limit_bounds_the_batch() -> None:
    # Token time at batch B is 20 ms + B ms + B × .5 ms: 26.1 ms allow B = 4.
    assert capacity(DENSE, MIX, Slo(tpot_s=0.0261), "latency").batch == 4
    assert capacity(DENSE, MIX, Slo(tpot_s=0.0259), "latency").batch == 3


def test_an_end_to_end_limit_bounds_the_batch() -> None:
    # 50 ms + 100 × (20 + 1.5 B) ms ≤ 2.5 s: B = 3.
    assert capacity(DENSE, MIX, Slo(e2e_s=2.5), "latency").batch == 3


def test_resident_tokens_bound_the_batch() -> None:
    small = Timing(
        a_s=0.02, b_s_per_seq=0.001, c_s_per_ktoken=0.0, prefill_tps=10_000.0, max_num_seqs=8, kv_capacity_tokens=3_000
    )
    assert capacity(small, MIX, Slo(), "latency").batch == 4  # .8 × 3,000 / 600


def test_a_long_context_carries_less_than_a_short_one() -> None:
    timing = Timing(a_s=0.006, b_s_per_seq=0.00001, c_s_per_ktoken=0.00004, prefill_tps=47_000.0)
    chat = capacity(timing, Mix(input_tokens=200, output_tokens=100), Slo(tpot_s=0.03), "latency")
    agent = capacity(timing, Mix(input_tokens=60_000, output_tokens=100), Slo(tpot_s=0.03), "latency")
    assert chat.rps > 50 * agent.rps


@pytest.mark.parametrize(
    ("slo", "subject", "floor", "limit"),
    [
        (Slo(ttft_s=0.01), "ttft_s", 0.05, 0.01),
        (Slo(tpot_s=0.01), "tpot_s", 0.0215, 0.01),
        (Slo(e2e_s=1.0), "e2e_s", 2.2, 1.0),
        (Slo(deadline_s=1.5), "deadline_s", 2.2, 1.5),
    ],
)
def test_an_unreachable_limit_is_named_with_its_floor(slo: Slo, subject: str, floor: float, limit: float) -> None:
    made = capacity(DENSE, MIX, slo, "latency")
    reason = made.reasons[-1]
    assert made.batch == 1
    assert (reason.code, reason.subject) == (ReasonCode.UNREACHABLE_SLO, subject)
    assert dict(reason.numbers) == pytest.approx({"floor_s": floor, "limit_s": limit})


def test_a_service_nobody_called_has_the_prior_mix_bounded_by_its_context() -> None:
    assert mix_or_prior(0.0, 0.0, DENSE) == Mix(input_tokens=1150.0, output_tokens=210.0)
    tiny = Timing(a_s=1, b_s_per_seq=0, c_s_per_ktoken=0, prefill_tps=1, max_model_len=1024)
    assert mix_or_prior(0.0, 0.0, tiny) == Mix(input_tokens=256.0, output_tokens=210.0)
    assert mix_or_prior(30.0, 7.0, tiny) == Mix(input_tokens=30.0, output_tokens=7.0)
