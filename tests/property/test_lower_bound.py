"""LB1 against everything that can be tried in small worlds, and against what the simulated world charges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.bounds.lower import best, bounds, counted, prove
from chaos.bounds.problem import problem_of
from chaos.bounds.program import Prices
from chaos.bounds.work import Limits
from chaos.peers import PEERS
from chaos.scenario import Scenario, scenario_of
from chaos.world import simulate
from serve_apps.timing import Timing
from tests.bound_scene import Pool, Small

FAST = Timing(a_s=0.2, b_s_per_seq=0.02, c_s_per_ktoken=0.0, prefill_tps=500.0, max_num_seqs=3)
ROWS = st.lists(
    st.tuples(st.floats(0.0, 60.0).map(lambda at: round(at, 1)), st.integers(100, 2000), st.integers(2, 30)),
    min_size=2,
    max_size=5,
)
POOLS = st.lists(
    st.builds(
        Pool, count=st.integers(1, 2), usd_per_s=st.sampled_from([1.0, 2.0]), lead_s=st.sampled_from([5.0, 20.0])
    ),
    min_size=1,
    max_size=2,
)


def small(rows: list[tuple[float, int, int]], pools: list[Pool], limits: Limits) -> Small:
    """Two minutes, instances start every ten seconds."""
    return Small(timing=FAST, limits=limits, rows=rows, pools=pools, duration_s=120.0, grid_s=10.0)


@given(
    rows=ROWS, pools=POOLS, ttft_s=st.sampled_from([4.0, 15.0, 60.0]), tpot_s=st.sampled_from([0.25, 0.5, np.inf]),
    periods=st.sampled_from([1, 4, 12]),
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_nothing_that_can_be_tried_is_cheaper(
    rows: list[tuple[float, int, int]], pools: list[Pool], ttft_s: float, tpot_s: float, periods: int
) -> None:
    world = small(rows, pools, Limits(ttft_s=ttft_s, tpot_s=tpot_s))
    problem = world.problem(periods)
    for wanted, usd in world.cheapest().items():
        met = {"u/s": wanted}
        assert best(bounds(problem, met, (1.0, 0.5)), met) <= usd * (1 + 1e-9)


@given(
    rows=ROWS,
    pools=POOLS,
    drawn=st.lists(st.floats(0.0, 10.0), min_size=30, max_size=30),
)
@settings(deadline=None, max_examples=25)
def test_whatever_prices_the_solver_might_give_the_bound_stays_below(
    rows: list[tuple[float, int, int]], pools: list[Pool], drawn: list[float]
) -> None:
    world = small(rows, pools, Limits(ttft_s=20.0))
    problem = world.problem(4)
    shape = (len(pools), problem.periods)
    values = np.resize(np.array(drawn), (2, *shape))
    wild = Prices(gpu_s=values[0], start=values[1] * 10.0, quota={}, overflow={"u/s": np.zeros(problem.periods)})
    for wanted, usd in world.cheapest().items():
        met = {"u/s": wanted}
        assert prove(problem, wild, met).usd(met) <= usd * (1 + 1e-9)


def test_the_bound_of_a_busy_hour_is_near_the_best_plan() -> None:
    rows = [(20.0 + 2.0 * n, 800, 20) for n in range(6)]
    world = small(rows, [Pool(count=2, usd_per_s=1.0, lead_s=20.0)], Limits(ttft_s=30.0, tpot_s=1.0))
    met = {"u/s": len(rows)}
    usd = world.cheapest()[len(rows)]
    assert 0.6 * usd < best(bounds(world.problem(3), met), met) <= usd


def test_a_bound_by_hand() -> None:
    """One request of 500 tokens in, 11 out, alone: 1 s of prefill, ten steps of 0.22 s; 5 s of lead; 1 USD a second."""
    world = small([(30.0, 500, 11)], [Pool(count=1, usd_per_s=1.0, lead_s=5.0)], Limits(ttft_s=2.0, tpot_s=1.0))
    found = best(bounds(world.problem(1), {"u/s": 1}, (1.0,)), {"u/s": 1})
    busy_s = 1.0 + 10 * (0.2 + 0.02)
    # Instances may be fractions: 120 s of one period times the part of one that is busy, and as much of its start.
    assert found == pytest.approx(busy_s + 5.0 * busy_s / 120.0, rel=1e-6)


def test_dear_pools_fill_only_when_cheap_ones_are_full() -> None:
    rows = [(30.0 + 0.25 * n, 500, 11) for n in range(60)]
    limits = Limits(ttft_s=30.0, tpot_s=0.5)
    cheap, dear = Pool(count=1, usd_per_s=1.0, lead_s=5.0), Pool(count=4, usd_per_s=9.0, lead_s=5.0)

    def found(pools: list[Pool]) -> float:
        met = {"u/s": len(rows)}
        return best(bounds(small(rows, pools, limits).problem(4), met), met)

    plenty = found([Pool(count=9, usd_per_s=1.0, lead_s=5.0)])
    assert plenty < found([cheap, dear]) < found([dear]) <= 9.0 * plenty * (1 + 1e-6)


# ---- against the world ----------------------------------------------------------------------------------------------
def scenario(**changes: object) -> Scenario:
    """A quarter of an hour of chat on two pools."""
    start = {"dist": "lognormal", "mean": 60.0, "cv": 0.3, "min": 30.0, "max": 200.0}
    service = {
        "name": "chat", "model": "meta-llama/Meta-Llama-3.1-8B", "goal": "latency", "priority": 900,
        "slo": {"ttft_s": 2.0, "tpot_s": 0.08, "fraction": 0.9}, "min_replicas": 1, "max_replicas": 8,
        "variants": [{"id": "l40s", "instance_type": "g6e.2xlarge"}],
    }  # fmt: skip
    data = {
        "name": "small", "seed": 1, "duration_s": 900.0, "tick_s": 10.0,
        "policies": [{"unit": "u", "owner": "o@example.com", "services": [service]}],
        "demand": [{"service": "u/chat", "synthetic": {"kind": "constant", "rps": 10.0}}],
        "supply": [
            {"id": "a-od", "instance_type": "g6e.2xlarge", "zone": "a", "market": "on_demand", "count": 8,
             "boot_s": start, "load_s": start},
            {"id": "b-spot", "instance_type": "g6e.2xlarge", "zone": "b", "market": "spot", "count": 3,
             "boot_s": start, "load_s": start},
        ],
    }  # fmt: skip
    return scenario_of({**data, **changes})


def three(told: dict[str, Any]) -> Any:
    """A static plan of three replicas."""
    return PEERS["static"]({**told, "peer": {"replicas": 3}})


@pytest.mark.parametrize("controller", ["ours", three, "hpa"])
@pytest.mark.parametrize("fault", [None, "price", "capacity"])
def test_no_run_of_the_world_costs_less_than_its_bound(controller: Any, fault: str | None) -> None:
    faults = [{"at_s": 300.0, "for_s": 300.0, "kind": fault, "target": "*", "value": 0.5}] if fault else []
    world = scenario(faults=faults)
    report = simulate(world, controller, 3)
    problem = problem_of(world, 3)
    (load,) = problem.loads
    assert len(load) == report.requests
    met = {"u/chat": counted(load, report.services["u/chat"].slo_attainment or 0.0)}
    assert 0.0 < best(bounds(problem, met), met) <= report.cost_usd


def test_in_the_world_the_bound_is_not_far_below_a_plan_that_just_suffices() -> None:
    world = scenario(duration_s=3600.0, demand=[{"service": "u/chat", "synthetic": {"kind": "constant", "rps": 12.0}}])
    report = simulate(world, three, 3)
    problem = problem_of(world, 3)
    met = {"u/chat": counted(problem.loads[0], report.services["u/chat"].slo_attainment or 0.0)}
    assert best(bounds(problem, met), met) > 0.4 * report.cost_usd


def test_reservations_are_paid_whatever_is_met() -> None:
    world = scenario(
        supply=[
            {"id": "r", "instance_type": "g6e.2xlarge", "zone": "a", "market": "odcr", "reservation": "cr", "count": 3,
             "price_usd_per_h": 2.0}
        ]
    )  # fmt: skip
    problem = problem_of(world, 1)
    assert problem.sunk_usd == pytest.approx(3 * 2.0 * 900.0 / 3600.0)
    assert best(bounds(problem, {"u/chat": 0}), {"u/chat": 0}) == pytest.approx(problem.sunk_usd)


def test_later_calls_of_a_task_are_counted_and_may_come_at_any_time_after() -> None:
    world = scenario(demand=[{"service": "u/chat", "synthetic": {"kind": "agents", "rps": 0.5, "calls": [3, 3]}}])
    problem = problem_of(world, 1)
    (load,) = problem.loads
    assert len(load) % 3 == 0
    assert np.sum(load.last == problem.periods - 1) >= 2 * len(load) / 3
