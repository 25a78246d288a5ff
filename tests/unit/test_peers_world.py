"""The peers in the simulated world: Ray's policy decides as its class fed by hand, and every peer runs to the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from chaos.peers import KNOBS, PEERS, Controller, tuned
from chaos.scenario import scenario_of
from chaos.world import simulate
from tests.serve_by_hand import by_hand

BOOT = {"dist": "lognormal", "mean": 60.0, "cv": 0.3, "min": 30.0, "max": 300.0}
POLICY = {
    "unit": "support",
    "owner": "a@example.com",
    "services": [
        {
            "name": "chat",
            "model": "meta-llama/Meta-Llama-3.1-8B",
            "goal": "latency",
            "slo": {"ttft_s": 1.5, "tpot_s": 0.08, "fraction": 0.95},
            "min_replicas": 1,
            "max_replicas": 20,
            "markets": ["on_demand", "spot"],
            "variants": [{"id": "l40s", "instance_type": "g6e.2xlarge"}],
        }
    ],
}
DEMAND = {
    "service": "support/chat",
    "synthetic": {"kind": "flash", "rps": 8.0, "at_s": 900.0, "factor": 4.0, "hold_s": 300.0, "decay_s": 200.0},
    "input_tokens": 1000.0,
    "output_tokens": 200.0,
}


def place(name: str, market: str, count: Any) -> dict[str, Any]:
    common = {"instance_type": "g6e.2xlarge", "zone": f"us-east-1{name[-1]}", "boot_s": BOOT, "load_s": BOOT}
    return {"id": name, "market": market, "count": count, **common}


FLASH = scenario_of(
    {
        "name": "peers",
        "duration_s": 2400.0,
        "tick_s": 10.0,
        "policies": [POLICY],
        "demand": [DEMAND],
        "supply": [
            place("spot-a", "spot", {"steps": [[0.0, 6], [1200.0, 2]]}),
            place("spot-b", "spot", 0),
            place("od-c", "on_demand", 10),
        ],
    }
)


class Recorder:
    """A peer whose inputs and decisions are kept."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.rows: list[tuple[float, float, int, int]] = []  # instant, in flight, ready, decided

    def decide(self, now_s: float, view: Mapping[str, Any]) -> dict[str, dict[Any, int]]:
        answer = self._controller.decide(now_s, view)
        load = view["services"]["support/chat"]
        ready = sum(row["state"] == "ready" for row in view["replicas"])
        self.rows.append((now_s, load["queued"] + load["running"], ready, sum(answer["replicas"].values())))
        return answer


def recorded(name: str, knob: float = 1.0) -> tuple[Recorder, Any, Mapping[str, Any]]:
    kept: list[Recorder] = []
    told: list[Mapping[str, Any]] = []

    def factory(scenario: Mapping[str, Any]) -> Recorder:
        told.append(scenario)
        kept.append(Recorder(tuned(PEERS[name], knob)(scenario)))
        return kept[0]

    report = simulate(FLASH, factory, 1)
    return kept[0], report, told[0]


@pytest.mark.parametrize("knob", [1.0, 0.25])
def test_rays_policy_decides_in_the_world_as_its_class_fed_by_hand(
    knob: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chaos.peers.facts import facts_of

    recorder, _, told = recorded("ray_serve", knob)
    target = facts_of(told).services[0].unit.ongoing * knob
    config = AutoscalingConfig(min_replicas=1, max_replicas=20, target_ongoing_requests=target)
    serve = by_hand(config, monkeypatch)
    decided = [serve.step(now_s, ongoing, ready) for now_s, ongoing, ready, _ in recorder.rows]
    assert len(decided) >= 240
    assert decided == [row[3] for row in recorder.rows]
    assert len(set(decided)) > 2


@pytest.mark.parametrize("name", sorted(PEERS))
def test_every_peer_serves_the_crowd_without_a_violation(name: str) -> None:
    recorder, report, _ = recorded(name)
    assert report.violations == ()
    assert all(math.isfinite(row[1]) for row in recorder.rows)
    assert report.launches.granted > 0
    attainment = report.services["support/chat"].slo_attainment
    assert attainment > (0.3 if name not in ("static", "trivial", "keda") else 0.0)


def test_every_peer_but_the_last_has_a_knob() -> None:
    assert set(KNOBS) == set(PEERS) - {"trivial"}


def test_a_peer_repeats_itself() -> None:
    first, second = recorded("skyserve")[0].rows, recorded("skyserve")[0].rows
    assert first == second
