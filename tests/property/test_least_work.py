"""The least replica time of a request is never more than the reference engine takes, whatever is thrown at it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, target
from hypothesis import strategies as st

from chaos.bounds.work import Limits, least_work
from serve_apps.timing import Timing
from tests.bound_scene import met, requests_at, serve

TIMINGS = st.builds(
    Timing,
    a_s=st.floats(0.001, 0.03),
    b_s_per_seq=st.floats(0.0, 0.002),
    c_s_per_ktoken=st.floats(0.0, 0.01),
    prefill_tps=st.floats(2_000, 50_000),
    prefill_fixed_s=st.sampled_from([0.0, 0.01]),
    moe_w_s=st.sampled_from([0.0, 0.01]),
    moe_active_fraction=st.just(0.25),
    max_num_seqs=st.integers(1, 16),
    kv_capacity_tokens=st.integers(3_000, 40_000),
)
ROWS = st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(1, 2500), st.integers(1, 40)), min_size=1, max_size=24)
LIMITS = st.builds(
    Limits,
    ttft_s=st.sampled_from([0.3, 1.0, 5.0, np.inf]),
    tpot_s=st.floats(0.005, 0.1) | st.just(np.inf),
    whole_s=st.sampled_from([1.0, 4.0, np.inf, np.inf]),
)


@given(timing=TIMINGS, rows=ROWS, limits=LIMITS, delays=st.lists(st.floats(0.0, 2.0), min_size=24, max_size=24))
@settings(deadline=None)
def test_a_replica_is_busy_for_at_least_the_work_of_the_requests_it_met(
    timing: Timing, rows: list[tuple[float, int, int]], limits: Limits, delays: list[float]
) -> None:
    sent_s = [at_s + wait_s for (at_s, _, _), wait_s in zip(rows, delays, strict=False)]
    served = serve(timing, rows, sent_s, list(range(len(rows))))
    kept = met(rows, served, limits)
    work_s = least_work(timing, limits, requests_at(rows, limits), np.ones(len(rows), bool))
    if kept:
        target(float(work_s[kept].sum() / served.busy_s))
    assert work_s[kept].sum() <= served.busy_s * (1 + 1e-9)


@given(
    timing=TIMINGS,
    rows=ROWS,
    limits=LIMITS,
    prices=st.lists(st.floats(0.0, 5.0), min_size=4, max_size=4),
    length_s=st.floats(0.5, 4.0),
)
@settings(deadline=None)
def test_where_prices_change_each_request_pays_at_least_the_least_price_of_its_life(
    timing: Timing, rows: list[tuple[float, int, int]], limits: Limits, prices: list[float], length_s: float
) -> None:
    served = serve(timing, rows, [at_s for at_s, _, _ in rows], list(range(len(rows))))
    kept = met(rows, served, limits)
    requests = requests_at(rows, limits)

    def period(at_s: float) -> int:
        return int(min(at_s / length_s, len(prices) - 1))

    first = np.array([period(at_s) for at_s in requests.at_s])
    last = np.array([period(at_s) for at_s in requests.latest_s])
    work_s = least_work(timing, limits, requests, first == last)
    paid = sum(min(prices[first[i] : last[i] + 1]) * work_s[i] for i in kept)
    edges = [0.0, *(length_s * (n + 1) for n in range(len(prices) - 1)), np.inf]
    cost = sum(
        price * max(0.0, min(end, edges[n + 1]) - max(start, edges[n]))
        for start, end in served.steps
        for n, price in enumerate(prices)
    )
    assert paid <= cost * (1 + 1e-9) + 1e-12


def test_a_full_replica_is_nearly_as_busy_as_the_bound_says() -> None:
    timing = Timing(a_s=0.02, b_s_per_seq=0.0002, c_s_per_ktoken=0.0002, prefill_tps=15_000, max_num_seqs=32)
    rows = [(0.05 * n, 1000, 100) for n in range(400)]
    limits = Limits(ttft_s=2.0, tpot_s=np.inf)
    served = serve(timing, rows, [at_s for at_s, _, _ in rows], list(range(len(rows))))
    work_s = least_work(timing, limits, requests_at(rows, limits), np.ones(len(rows), bool))
    assert 0.85 * served.busy_s < work_s.sum() <= served.busy_s


def test_a_tighter_limit_takes_more_time_a_request() -> None:
    timing = Timing(a_s=0.02, b_s_per_seq=0.0002, c_s_per_ktoken=0.0002, prefill_tps=15_000, max_num_seqs=256)
    rows = [(0.02 * n, 1000, 200) for n in range(2000)]
    inside = np.ones(len(rows), bool)
    means = []
    for tpot_s in (np.inf, 0.08, 0.05, 0.03, 0.021):
        limits = Limits(ttft_s=2.0, tpot_s=tpot_s)
        means.append(least_work(timing, limits, requests_at(rows, limits), inside).mean())
    assert means == sorted(means)
    assert means[-2] > 1.5 * means[0]


def test_what_cannot_be_met_is_infinite() -> None:
    timing = Timing(a_s=0.02, b_s_per_seq=0.0, c_s_per_ktoken=0.0, prefill_tps=1000, max_model_len=4000)
    rows = [(0.0, 100, 10), (0.0, 3000, 10), (0.0, 5000, 10)]
    limits = Limits(ttft_s=2.0, tpot_s=0.05)
    work_s = least_work(timing, limits, requests_at(rows, limits), np.ones(3, bool))
    assert np.isfinite(work_s).tolist() == [True, False, False]
    slow = least_work(timing, Limits(tpot_s=0.01), requests_at(rows, Limits(tpot_s=0.01)), np.ones(3, bool))
    assert not np.isfinite(slow).any()
