"""What holds in every simulated world, whatever is asked of it and whatever goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.adapters.journal import MemoryJournal
from chaos.faults import INSTANT, KINDS
from chaos.scenario import Scenario, scenario_of
from chaos.world.drivers import Driver, Loop, Stranger
from chaos.world.runs import facts
from chaos.world.world import World
from tests.worlds import BIG, TYPE, demand, row, service, unit

MARKETS = ("on_demand", "spot", "odcr", "block")
SERVICES = ("a/one", "b/two")
DURATION_S = 900.0


@st.composite
def rows(draw: st.DrawFn, number: int) -> dict[str, Any]:
    market = draw(st.sampled_from(MARKETS))
    steps = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    start_s = draw(st.sampled_from([0.0, 200.0]))
    end_s = draw(st.sampled_from([600.0, 3000.0] if market == "block" else [None, 600.0]))
    return row(
        f"o{number}",
        {"steps": [[250.0 * index, count] for index, count in enumerate(steps)]},
        market=market,
        instance_type=draw(st.sampled_from([TYPE, BIG])),
        zone=draw(st.sampled_from(["za", "zb"])),
        start_s=start_s,
        end_s=end_s,
        notice_s=draw(st.sampled_from([0.0, 30.0, 120.0])),
        price_usd_per_h=draw(st.sampled_from([1.0, 2.5])),
        boot_s={"dist": "lognormal", "mean": draw(st.sampled_from([20.0, 100.0])), "cv": 0.5},
        load_s={"dist": "uniform", "mean": 20.0, "cv": 0.3},
    )


@st.composite
def faults(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    targets = {"pools": ["*", "o0", "us-east-1"], "services": ["*", SERVICES[0]], "whole": ["*"]}[KINDS[kind].aim]
    made = {"kind": kind, "at_s": float(draw(st.integers(0, 800))), "target": draw(st.sampled_from(targets))}
    return made if kind in INSTANT else made | {"for_s": float(draw(st.integers(10, 400)))}


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    variants = [{"id": "small", "instance_type": TYPE}, {"id": "big", "instance_type": BIG, "tp": 2}]
    one = service("one", variants=variants[: draw(st.integers(1, 2))], priority=900)
    zero = draw(st.booleans())
    two = service("two", variants=[variants[1]], goal="throughput", scale_to_zero=zero, min_replicas=int(not zero))
    supply = [draw(rows(number)) for number in range(draw(st.integers(1, 4)))]
    return scenario_of(
        {
            "name": "any",
            "duration_s": DURATION_S,
            "policies": [unit(one, name="a"), unit(two, name="b")],
            "demand": [demand(draw(st.sampled_from([0.2, 3.0])), key) for key in SERVICES],
            "supply": supply,
            "quotas": draw(st.sampled_from([[], [{"family": "g6e", "market": "on_demand", "gpus": 9}]])),
            "faults": draw(st.lists(faults(), max_size=4)),
            "nodes_slow_fraction": 0.2,
            "describe_lag_s": draw(st.sampled_from([0.0, 15.0])),
        }
    )


class Fickle:
    """Asks for something else at every tick, drawn from a seed."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._rng = np.random.default_rng(7)
        self._offerings = [each["id"] for each in told["supply"]]
        self._apps = [(each["service"], each["variant"]) for each in told["shapes"]]

    def decide(self, now_s: float, view: dict[str, Any]) -> dict[str, Any]:
        return {
            "instances": {each: int(self._rng.integers(0, 5)) for each in self._offerings},
            "replicas": {(*app, each): int(self._rng.integers(0, 4)) for app in self._apps for each in self._offerings},
        }


def watched(made: World) -> None:
    """Laws of every instant."""
    pools, cluster = made.pools, made.cluster
    for row_ in pools.rows.values():
        assert sum(machine.stays for machine in row_.machines) <= max(0, pools.count(row_)), row_.id
    for quota in made.scenario.quotas:
        held = [r for r in pools.rows.values() if r.supply.market == quota.market and quota.family in r.families]
        assert sum(r.gpus * len(r.machines) for r in held) <= quota.gpus
    for node in cluster.nodes.values():
        used = sum(replica.deployment.app.shape.gpus for replica in node.replicas)
        assert node.free_gpus == node.machine.row.gpus - used >= 0
        assert node.alive or not node.replicas
    for number in made.numbers.values():
        totals = made.engine.totals(number)
        ended = totals.finished + totals.shed + totals.failed + totals.overflowed
        assert totals.requests == ended + totals.in_flight


def run(made: World, driver: Driver) -> list[tuple[float, float, int, str]]:
    """(launched, stopped, GPUs, market) of every instance that ever was."""
    lives: dict[str, Any] = {}
    for step in range(int(DURATION_S / made.scenario.tick_s)):
        made.run_until(step * made.scenario.tick_s)
        made.metrics.sample()
        driver.tick()
        made.scores.tick()
        lives.update(made.pools.machines)
        watched(made)
    made.run_until(DURATION_S)
    lives.update(made.pools.machines)
    made.finish()
    return [(m.launched_at_s, min(m.stopped_at_s, DURATION_S), m.row.gpus, m.row.supply.market) for m in lives.values()]


@pytest.mark.parametrize("who", ["loop", "fickle"])
@settings(max_examples=15, deadline=None)
@given(scenario=scenarios(), seed=st.integers(0, 2**31))
def test_requests_end_once_and_gpu_hours_billed_are_those_held(who: str, scenario: Scenario, seed: int) -> None:
    made = World(scenario, seed)
    driver: Driver = Loop(made, MemoryJournal()) if who == "loop" else Stranger(made, Fickle, facts(scenario, seed))
    lives = run(made, driver)
    held: dict[str, float] = {}
    for launched_s, stopped_s, gpus, market in lives:
        held[market] = held.get(market, 0.0) + gpus * (stopped_s - launched_s)
    assert dict(made.tally.gpu_s) == pytest.approx({key: value for key, value in held.items() if value})
    by = made.tally.cost_by()
    assert sum(by.unit.values()) == pytest.approx(sum(by.market.values()))
    assert all(value > -1e-9 for value in by.unit.values())
    assert made.tally.idle_reservation_s >= -1e-6
    assert {violation.kind for violation in made.violations} <= {"tick_failed"}


# ---- the same bytes -------------------------------------------------------------------------------------------------
PROGRAM = """
import hashlib, sys
from pathlib import Path
from chaos.world import simulate
from tests.worlds import demand, fault, row, scenario, service, unit
spot = row("spot", {"steps": [[0, 4], [500, 1]]}, market="spot")
rows = [row("od", 3, boot_s={"dist": "lognormal", "mean": 60, "cv": 0.5}), spot]
units = [unit(service("chat"), service("code", priority=10), name=name) for name in ("support", "research")]
loads = [demand(rps, f"{unit}/{name}") for rps, unit, name in ((3, "support", "chat"), (2, "research", "code"))]
made = scenario(*rows, policies=units, demand=loads, constants_sigma=0.15, nodes_slow_fraction=0.2,
                faults=[fault("dry", 100, 200, target="od"), fault("replica_crash", 700, value=0.5)])
for name in ("ours", "ray_serve"):
    folder = Path(sys.argv[1]) / name
    report = simulate(made, name, 5, journal=folder if name == "ours" else None)
    print(report.model_dump_json())
    print([hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.jsonl"))])
"""


def test_two_processes_give_equal_reports_and_journals_byte_for_byte(tmp_path: Path) -> None:
    said = []
    for hash_seed in ("0", "12345"):
        folder = tmp_path / hash_seed
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout)
    assert said[0] == said[1]
    assert json.loads(said[0].splitlines()[0])["requests"] > 1000
