"""Constants it was never told, learnt on the compiled engine through the whole loop in the simulated world."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.adapters.journal import read_all
from autoscaler.core.beliefs import Beliefs
from autoscaler.core.calibrate import reasons_for, slow_instances, timing_for
from autoscaler.core.learn import fold
from autoscaler.core.reasons import ReasonCode
from chaos.scenario import Scenario
from chaos.world import simulate
from chaos.world.truth import true_timing
from serve_apps.timing import decode_step_s, prefill_s
from tests.worlds import demand, fault, row, scenario


def believed(made: Scenario, seed: int, folder: Path) -> Beliefs:
    """What ours believes at the end of a run."""
    report = simulate(made, "ours", seed, journal=folder)
    assert not report.violations
    return fold(record.event for record in read_all(folder))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_constants_as_the_world_draws_them_are_learnt_in_ten_minutes_of_load(seed: int, tmp_path: Path) -> None:
    """The catalogue's step is wrong by +16 %, -22 % and +127 % for these seeds."""
    made = scenario(duration_s=800.0, demand=[demand(6.0)], constants_sigma=0.5)
    beliefs = believed(made, seed, tmp_path / "journal")
    (shape,) = beliefs.shapes
    true, learnt = true_timing(made, seed)[(shape.service, shape.variant)], timing_for(beliefs, shape, z=0.0)
    wrong = [decode_step_s(shape.timing, n, 550.0 * n) / decode_step_s(true, n, 550.0 * n) - 1.0 for n in (5, 15)]
    assert min(abs(error) for error in wrong) > 0.1
    for sequences in (5, 15):
        resident = 550.0 * sequences
        assert decode_step_s(learnt, sequences, resident) == pytest.approx(
            decode_step_s(true, sequences, resident), rel=0.04
        )
    assert prefill_s(learnt, 500.0) == pytest.approx(prefill_s(true, 500.0), rel=0.12)
    (reason,) = reasons_for(beliefs, shape)
    assert reason.code is ReasonCode.CALIBRATED


def test_the_slow_nodes_of_a_pool_are_named_and_no_others(tmp_path: Path) -> None:
    rows = (row("good", 4), row("bad", 2, price_usd_per_h=1.0))
    slow = fault("node_slow", 0.0, 1000.0, target="bad", value=1.5)
    made = scenario(*rows, duration_s=600.0, demand=[demand(40.0)], faults=[slow], constants_sigma=0.15)
    beliefs = believed(made, 5, tmp_path / "journal")
    bad = {key for key, instance in beliefs.instances.items() if instance.offering == "bad"}
    assert len(beliefs.instances) - len(bad) >= 2
    assert set(slow_instances(beliefs)) == bad != set()
    assert all(ratio == pytest.approx(1.5, rel=0.07) for ratio in slow_instances(beliefs).values())
    (known,) = beliefs.calibrations.values()
    assert known.drift is None
