"""`qm bench decide`: the same seed decides the same, every tick has something to do, and the figures are there."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
from typer.testing import CliRunner

from autoscaler.cli import app
from autoscaler.core.model import Offering
from chaos.bench_bound import least_usd_per_h
from chaos.bench_decide import Problem, Size
from policies.model import PolicySet

SMALL = Size(services=4, offerings=8, periods=3)


def _played(seed: int) -> list[str]:
    problem = Problem(SMALL, np.random.default_rng([seed, 0]))
    plans = []
    for _ in range(6):
        problem.tick()
        plans.append(repr(problem.plan))
    return plans


def test_the_same_seed_decides_the_same_and_no_tick_stands_still() -> None:
    first = _played(1)
    assert first == _played(1)
    assert first != _played(2)
    assert len(set(first)) == len(first)


def test_the_fleet_that_is_decided_on_grows_from_nothing() -> None:
    problem = Problem(SMALL, np.random.default_rng([1, 0]))
    problem.tick()
    assert problem.plan is not None
    assert problem.plan.launches
    for _ in range(4):
        problem.tick()
    assert problem.replicas
    assert problem.instances


def test_no_fleet_is_cheaper_than_the_bound_and_a_dearer_one_is_further_from_it() -> None:
    problem = Problem(SMALL, np.random.default_rng([1, 0]))
    for _ in range(4):
        problem.tick()
        fleet = problem.fleet()
        least = least_usd_per_h(fleet)
        assert 0.0 < least <= fleet.usd_per_h * (1.0 + 1e-6)
    dearest = max(fleet.open, key=lambda name: next(o.price_usd_per_h for o in fleet.offerings if o.offering == name))
    wasteful = replace(fleet, instances={**fleet.instances, dearest: fleet.instances.get(dearest, 0) + 1})
    assert wasteful.usd_per_h > fleet.usd_per_h
    assert least_usd_per_h(wasteful) <= least * (1.0 + 1e-6), "an instance more is no more service"


def test_the_bound_is_the_cheapest_fleet_where_that_can_be_seen_by_hand() -> None:
    def offer(name: str, gpus: int, usd_per_h: float) -> Offering:
        return Offering(
            offering=name,
            pool=name,
            instance_type="t000",
            zone="z",
            market="on_demand",
            gpus=gpus,
            price_usd_per_h=usd_per_h,
            region="r",
        )

    problem = Problem(Size(services=1, offerings=2, periods=1), np.random.default_rng([1, 0]))
    problem.tick()
    fleet = problem.fleet()
    (route, *_), shapes = fleet.plan.routes, [row for row in fleet.shapes if row.instance_type == "t000"]
    served = 5.0 * route.capacity_rps_per_replica
    plan = replace(
        fleet.plan,
        demands=(replace(fleet.plan.demands[0], arrival_rps=served),),
        routes=(replace(route, variant=shapes[0].variant),),
        targets=(replace(fleet.plan.targets[0], variant=shapes[0].variant, wanted=5),),
    )
    one, four = offer("one", 1, 1.0), offer("four", 4, 3.0)
    free = PolicySet(units=tuple(row.model_copy(update={"quota_gpus": None}) for row in fleet.policy.units))
    given = replace(fleet, plan=plan, policy=free, shapes=shapes[:1], offerings=(one, four), instances={"one": 5})
    given = replace(given, open=frozenset({"one", "four"}))
    assert (given.usd_per_h, round(least_usd_per_h(given), 6)) == (5.0, 4.0)
    assert round(least_usd_per_h(replace(given, open=frozenset({"one"}))), 6) == 5.0


def test_the_gap_is_told_when_it_is_asked_for() -> None:
    words = ["bench", "decide", "--services=4", "--offerings=8", "--problems=2", "--periods=2", "--bound", "--json=-"]
    figures = json.loads(CliRunner().invoke(app, words).stdout)
    assert 0.0 <= figures["gap_to_bound"] <= figures["gap_p90"] < 1.0
    assert 0.0 <= figures["gap_first"] < 1.0


def test_the_command_tells_its_figures() -> None:
    done = CliRunner().invoke(
        app, ["bench", "decide", "--services=4", "--offerings=8", "--problems=2", "--periods=3", "--json=-"]
    )
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["decisions"] == 6.0
    assert 0.0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert figures["rss_mib"] > 0.0
