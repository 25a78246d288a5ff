"""The shipped scenarios: each runs under the unchanged controller, and the pools it declares can serve its peak."""

from __future__ import annotations

import numpy as np
import pytest

from autoscaler.core.capacity import Mix, capacity
from chaos.demand import Floats
from chaos.pools import available
from chaos.scenario import Scenario, load_scenario, public_scenarios
from chaos.streams import arrivals
from chaos.world import simulate

STEP_S = 600.0
SUITE = sorted(set(public_scenarios()) - {"week_full"})  # the same as week, and three times as long
FIRST_S = 1200


@pytest.mark.parametrize("name", SUITE)
def test_a_shipped_scenario_runs_under_our_controller(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QM_DATA", raising=False)
    scenario = load_scenario(name, [f"duration_s={FIRST_S}", "faults=[]"])
    report = simulate(scenario, "ours", 1)
    assert report.violations == ()
    assert (report.requests > 0, report.launches.granted > 0) == (name != "idle",) * 2  # its first burst comes later


@pytest.mark.parametrize("name", SUITE)
def test_all_pools_together_can_serve_the_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QM_DATA", raising=False)
    assert need(load_scenario(name)).max() < 1.0


@pytest.mark.data
@pytest.mark.parametrize("name", ["drought", "reasoning", "three_units"])
def test_all_pools_together_can_serve_the_recorded_peak(name: str, qm_data: object) -> None:
    scenario = load_scenario(name)
    assert scenario.stand_ins() == ()
    assert need(scenario).max() < 1.0


def need(scenario: Scenario) -> Floats:
    """What each service needs of what all its pools hold, summed over services, for each step of the run; no faults.

    A pool counts for a service by what its best variant carries there, so services that compete are added up.
    """
    grid_s = np.arange(0.0, scenario.duration_s, STEP_S, dtype=np.float64)
    total = np.zeros(len(grid_s))
    for service, _, entry in scenario.policy_set.services():
        stream = arrivals(scenario, service, scenario.seed)
        batches = [stream.take(float(start_s) + STEP_S) for start_s in grid_s]
        rps = np.array([len(batch.at_s) / STEP_S for batch in batches])
        tokens = np.array(
            [(b.input_tokens.sum() - b.prefix_tokens.sum(), b.output_tokens.sum()) for b in batches], float
        )
        mean_in, mean_out = tokens.sum(axis=0) / (rps.sum() * STEP_S)
        overflow_rps = entry.overflow.rpm / 60.0 if entry.overflow is not None else 0.0
        carried = np.sum(_carried(scenario, service, Mix(input_tokens=mean_in, output_tokens=mean_out), grid_s), axis=0)
        total += np.maximum(rps - overflow_rps, 0.0) / np.maximum(carried, 1e-9)
    return total


def _carried(scenario: Scenario, service: str, mix: Mix, grid_s: Floats) -> list[Floats]:
    """Requests per second that each pool could carry of one service alone, at each instant of the grid."""
    entry = next(entry for key, _, entry in scenario.policy_set.services() if key == service)
    found = []
    for row in (row for row in scenario.supply if row.market in entry.markets):
        gpus = scenario.catalogue_set.instance_types[row.instance_type].gpus
        ways = [each for each in scenario.shapes if (each.service, each.instance_type) == (service, row.instance_type)]
        rates = [capacity(each.timing, mix, entry.slo, entry.goal).rps / each.gpus / each.nodes for each in ways]
        size = available(scenario, row.id, scenario.seed)
        held = size.count[np.searchsorted(size.at_s, grid_s, side="right") - 1]
        found.append(held * gpus * max(rates, default=0.0))
    return found
