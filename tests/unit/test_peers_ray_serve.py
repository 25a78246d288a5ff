"""The Ray Serve peer decides as Serve's own `DeploymentAutoscalingState` fed by hand, under a clock that is ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chaos.peers.facts import Seen, Service, facts_of
from chaos.peers.ray_serve import RayServe
from tests.peer_scene import scenario, service
from tests.serve_by_hand import by_hand


def peer(**keys: Any) -> RayServe:
    return RayServe(one(**keys), 1.0)


def one(**keys: Any) -> Service:
    return facts_of(scenario(services=[service(**keys)])).services[0]


def walk(kind: str, ticks: int) -> list[float]:
    """Requests in flight, a tick each: a ramp with noise, bursts after silence, or a slow tide."""
    rng = np.random.default_rng([7, len(kind)])
    if kind == "ramp":
        return [float(max(0.0, 3 * tick + rng.normal(0, 10))) for tick in range(ticks)]
    if kind == "bursts":
        return [float(rng.integers(100, 200)) if tick % 90 < 15 else 0.0 for tick in range(ticks)]
    return [float(150 - 140 * np.cos(tick / 40)) for tick in range(ticks)]


CASES = [
    ("ramp", {"min_replicas": 1, "max_replicas": 20}, 10.0),
    ("bursts", {"min_replicas": 0, "scale_to_zero": True}, 10.0),
    ("tide", {"min_replicas": 2, "max_replicas": 100}, 10.0),
    ("tide", {"min_replicas": 1, "max_replicas": 9}, 7.0),
]


@pytest.mark.parametrize(("kind", "keys", "tick_s"), CASES)
def test_three_hundred_decisions_are_serves_own(
    kind: str, keys: dict[str, Any], tick_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = peer(**keys)
    theirs = by_hand(ours.config, monkeypatch)
    ready, decided = 0, []
    for tick, ongoing in enumerate(walk(kind, 300)):
        now_s = tick * tick_s
        seen = Seen(None, None, None, ongoing / 3, ongoing - ongoing / 3, ready=ready)
        pair = ours.want(now_s, seen), theirs.step(now_s, ongoing, ready)
        decided.append(pair)
        ready += (pair[0] > ready) - (pair[0] < ready) if tick % 3 == 0 else 0  # a replica starts or ends every 3 ticks
    assert [ours for ours, _ in decided] == [theirs for _, theirs in decided]
    assert len({ours for ours, _ in decided}) > 3  # the walk makes it move


def test_scaling_up_waits_thirty_seconds_of_world_time_and_down_ten_minutes() -> None:
    ours = peer()
    for now_s in range(0, 30, 10):
        assert ours.want(now_s, Seen(None, None, None, 0.0, 70.0, ready=1)) == 1
    assert ours.want(30, Seen(None, None, None, 0.0, 70.0, ready=1)) == 7  # 70 / 10
    answers = [ours.want(now_s, Seen(None, None, None, 0.0, 0.0, ready=7)) for now_s in range(40, 700, 10)]
    assert answers.index(1) == 61  # from 50 s on the mean over 30 s, 46.7, asks for five


def test_a_missing_metric_keeps_the_last_samples() -> None:
    ours = peer()
    for now_s in range(0, 100, 10):
        ours.want(now_s, Seen(None, None, None, 0.0, 70.0, ready=7))
    blind = [ours.want(now_s, Seen(None, None, None, None, None, ready=7)) for now_s in range(100, 1000, 10)]
    assert set(blind) == {7}


def test_the_knob_multiplies_the_target() -> None:
    assert peer().config.target_ongoing_requests == pytest.approx(10.0)
    assert RayServe(one(), 4.0).config.target_ongoing_requests == pytest.approx(40.0)
