"""`qm bench decide`: the same seed decides the same, every tick has something to do, and the figures are there."""

from __future__ import annotations

import json

import numpy as np
from typer.testing import CliRunner

from autoscaler.cli import app
from chaos.bench_decide import Problem, Size

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


def test_the_command_tells_its_figures() -> None:
    done = CliRunner().invoke(
        app, ["bench", "decide", "--services=4", "--offerings=8", "--problems=2", "--periods=3", "--json=-"]
    )
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["decisions"] == 6.0
    assert 0.0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert figures["rss_mib"] > 0.0
