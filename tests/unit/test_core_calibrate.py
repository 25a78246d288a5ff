"""The iteration law is learnt from engines' own windows, its drifts are named, and a slow node is told from a fleet."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from autoscaler.core import calibrate
from autoscaler.core.beliefs import EMPTY
from autoscaler.core.calibrate import (
    CONSTANTS,
    MARGIN_WIDTH_MAX,
    QUANTILE_Z,
    reasons_for,
    slow_instances,
    slower,
    timing_for,
    timing_width,
)
from autoscaler.core.model import Idle, Measured, Missing
from autoscaler.core.reasons import ReasonCode
from autoscaler.core.snapshot import restore, save
from serve_apps.timing import Timing, decode_step_s, prefill_s
from tests.calibration_rig import APP, TRUE, Rig, owned, placed, scaled, shape, tpot_error, window

LOADS = (0.25, 0.5, 0.75)


# ---- the law --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [LOADS, LOADS[::-1]])
@pytest.mark.parametrize(
    "wrong",
    [
        dict.fromkeys(CONSTANTS, 1.5),
        dict.fromkeys(CONSTANTS, 0.5),
        {"decode_base": 1.5, "batch_slope": 0.5, "kv_slope": 0.5, "prefill_rate": 0.5},
        {"decode_base": 0.5, "batch_slope": 1.5, "kv_slope": 1.5, "prefill_rate": 1.5},
        {"decode_base": 0.5, "kv_slope": 1.5, "prefill_rate": 0.5},
    ],
)
def test_constants_that_are_half_wrong_are_right_after_ten_minutes(
    wrong: dict[str, float], order: tuple[float, ...]
) -> None:
    rig = Rig(prior=scaled(TRUE, **wrong))
    for load in order:
        rig.run(200.0, load)
    for load in LOADS:
        assert abs(tpot_error(rig.timing(), load)) < 0.08
    assert prefill_s(rig.timing(), 600.0) == pytest.approx(prefill_s(TRUE, 600.0), rel=0.08)


def test_the_expert_term_of_a_mixture_stays_as_the_catalogue_has_it() -> None:
    experts = replace(TRUE, a_s=0.01, moe_w_s=0.04, moe_active_fraction=1 / 16)
    rig = Rig(true=experts, prior=scaled(experts, decode_base=1.5, kv_slope=0.5))
    rig.run(600.0, 0.5)
    assert rig.timing().moe_w_s == experts.moe_w_s
    assert abs(tpot_error(rig.timing(), 0.5, experts)) < 0.08


def test_what_was_learnt_at_other_loads_is_kept_through_hours_at_one() -> None:
    rig = Rig(prior=scaled(TRUE, decode_base=1.5, kv_slope=1.5))
    for load in LOADS:
        rig.run(200.0, load)
    steady = window(tpot_s=0.0489)
    for tick in range(720):
        rig.beliefs = calibrate.observe(rig.beliefs, (steady,), rig.ready, 600.0 + 10.0 * tick)
    assert abs(tpot_error(rig.timing(), 0.25)) < 0.08


@pytest.mark.parametrize(
    "nothing",
    [
        {"steps": 0.0},
        {"tpot_s": Idle(at_s=0.0)},
        {"tpot_s": Missing(why="not exported")},
        {"batch": Missing(why="not exported")},
        {"kv_tokens": Missing(why="not exported")},
        {"steps": 9.0},
        {"waiting": Measured(value=12.0, at_s=0.0)},
        {"kv_fraction": Measured(value=0.97, at_s=0.0)},
        {"tpot_s": Measured(value=float("inf"), at_s=0.0)},
    ],
)
def test_idle_and_saturated_engines_teach_nothing(nothing: dict[str, Any]) -> None:
    rig = Rig()
    rig.run(100.0)
    known = rig.beliefs
    for at_s in range(0, 100_000, 1000):
        told = window(**{"tpot_s": 0.2} | nothing)
        assert calibrate.observe(known, (told,), rig.ready, float(at_s)) is known


def test_an_idle_service_between_busy_ones_is_not_touched() -> None:
    rig = Rig(count=2)
    other = replace(shape(TRUE), service="u/t")
    rig.beliefs = replace(rig.beliefs, shapes=(*rig.beliefs.shapes, other))
    rig.ready["r1"] = placed("r1", service="u/t")
    rig.run(100.0)
    before = rig.beliefs.calibrations["u.t.v"]
    for at_s in range(50):
        rig.beliefs = calibrate.observe(rig.beliefs, (window("r0"), window("r1", steps=0.0)), rig.ready, at_s)
    assert rig.beliefs.calibrations["u.t.v"] is before
    assert rig.learnt.ticks == 60


def test_engines_that_warm_up_are_left_out() -> None:
    rig = Rig()
    rig.beliefs = replace(rig.beliefs, fresh={"r0": 0.0})
    assert calibrate.observe(rig.beliefs, (window(tpot_s=0.5),), rig.ready, 10.0) is rig.beliefs


def test_a_few_queued_behind_many_running_are_no_saturation() -> None:
    rig = Rig()
    told = window(waiting=Measured(value=2.0, at_s=0.0), running=Measured(value=40.0, at_s=0.0))
    assert calibrate.observe(rig.beliefs, (told,), rig.ready, 10.0).calibrations


def test_one_wild_reading_hardly_moves_the_law() -> None:
    rig = Rig(count=3)
    rig.run(300.0)
    before = decode_step_s(rig.timing(), 10, 7000)
    readings = (window("r0"), window("r1", tpot_s=0.5), window("r2"))
    rig.beliefs = calibrate.observe(rig.beliefs, readings, rig.ready, rig.now_s + 10.0)
    assert decode_step_s(rig.timing(), 10, 7000) == pytest.approx(before, rel=0.02)


def test_a_hundred_engines_are_not_a_hundred_witnesses() -> None:
    def width(count: int) -> float:
        rig = Rig()
        rig.ready = {f"r{n}": placed(f"r{n}") for n in range(count)}
        told = tuple(window(f"r{n}", batch=2.0 + 18.0 * n / (count - 1)) for n in range(count))
        for tick in range(20):
            rig.beliefs = calibrate.observe(rig.beliefs, told, rig.ready, 10.0 * tick)
        return rig.learnt.width

    assert width(100) > 0.6 * width(10)
    assert width(10) < width(2)


# ---- what decisions get ---------------------------------------------------------------------------------------------
def test_a_step_is_planned_at_a_pessimistic_quantile_that_narrows_with_evidence() -> None:
    rig = Rig()
    (one,) = rig.beliefs.shapes
    assert timing_width(rig.beliefs, one) == 0.12
    before = timing_for(rig.beliefs, one)
    assert decode_step_s(before, 10, 7000) == pytest.approx(decode_step_s(TRUE, 10, 7000) * (1 + QUANTILE_Z * 0.12))
    assert prefill_s(before, 600) == pytest.approx(prefill_s(TRUE, 600) * (1 + QUANTILE_Z * 0.12))
    rig.run(600.0)
    width = timing_width(rig.beliefs, one)
    assert 0.0 < width < 0.05
    planned, mean = timing_for(rig.beliefs, one), timing_for(rig.beliefs, one, z=0.0)
    assert decode_step_s(planned, 10, 7000) == pytest.approx(decode_step_s(mean, 10, 7000) * (1 + QUANTILE_Z * width))
    margin = 1 + QUANTILE_Z * rig.learnt.prefill_width
    assert prefill_s(planned, 600) == pytest.approx(prefill_s(mean, 600) * margin)


def test_doubt_is_planned_for_up_to_a_limit() -> None:
    (one,) = Rig().beliefs.shapes
    vague = replace(one, uncertainty=0.5)
    assert timing_for(EMPTY, vague) == slower(TRUE, 1 + QUANTILE_Z * MARGIN_WIDTH_MAX)
    assert timing_for(EMPTY, replace(one, uncertainty=0.0)) is one.timing


def test_slower_stretches_every_term() -> None:
    experts = replace(TRUE, moe_w_s=0.02, moe_active_fraction=0.1)
    late = slower(experts, 1.5, 2.0)
    assert decode_step_s(late, 7, 5000) == pytest.approx(1.5 * decode_step_s(experts, 7, 5000))
    assert prefill_s(late, 900) == pytest.approx(2.0 * prefill_s(experts, 900))


def test_the_reason_carries_what_was_learnt() -> None:
    rig = Rig(prior=scaled(TRUE, decode_base=0.5))
    assert reasons_for(rig.beliefs, rig.beliefs.shapes[0]) == ()
    rig.run(230.0)
    (reason,) = reasons_for(rig.beliefs, rig.beliefs.shapes[0])
    figures = dict(reason.numbers)
    assert reason.code is ReasonCode.CALIBRATED
    assert figures["decode_base"] == pytest.approx(2.0, rel=0.1)
    used = rig.timing()
    assert figures["decode_base"] == used.a_s / rig.prior.a_s
    assert figures["batch_slope"] == used.b_s_per_seq / rig.prior.b_s_per_seq
    assert figures["kv_slope"] == used.c_s_per_ktoken / rig.prior.c_s_per_ktoken
    assert figures["prefill_fixed"] == used.prefill_fixed_s / rig.prior.prefill_fixed_s
    assert figures["prefill_rate"] == pytest.approx(rig.prior.prefill_tps / used.prefill_tps, rel=1e-12)
    assert (figures["width"], figures["ticks"]) == (rig.learnt.width, 23.0)


def test_decisions_see_the_law_move_in_steps_and_stand_still_between_them() -> None:
    rig = Rig(prior=scaled(TRUE, decode_base=1.5))
    rig.run(300.0, 0.5)
    seen = set()
    for _ in range(120):
        rig.run(10.0, 0.5)
        seen.add((rig.timing(), rig.learnt.width))
        learnt = TRUE.a_s * 1.5 * rig.learnt.factors[0]
        assert rig.timing().a_s == pytest.approx(learnt, rel=0.15)
    assert len(seen) <= 6
    assert abs(tpot_error(rig.timing(), 0.5)) < 0.05


def test_another_catalogue_begins_anew() -> None:
    rig = Rig(prior=scaled(TRUE, decode_base=0.5))
    rig.run(200.0)
    changed = replace(rig.beliefs.shapes[0], timing=TRUE)
    beliefs = replace(rig.beliefs, shapes=(changed,))
    assert timing_for(beliefs, changed, z=0.0) == TRUE
    assert reasons_for(beliefs, changed) == ()
    anew = calibrate.observe(beliefs, (window(),), rig.ready, rig.now_s + 10.0).calibrations[APP]
    assert (anew.prior, anew.ticks) == (TRUE, 1)


def test_what_was_learnt_survives_a_snapshot_exactly() -> None:
    rig = Rig(count=3, slow=(1,))
    rig.run(300.0)
    assert slow_instances(rig.beliefs)
    assert restore(save(rig.beliefs)) == rig.beliefs
    assert json.loads(save(rig.beliefs))["calibrations"][APP]["ticks"] == rig.learnt.ticks


# ---- drifts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("constant", "factor", "true"),
    [
        ("decode_base", 1.3, TRUE),
        ("decode_base", 0.75, TRUE),
        ("batch_slope", 1.6, replace(TRUE, b_s_per_seq=0.003, c_s_per_ktoken=0.0002)),
        ("kv_slope", 1.6, replace(TRUE, c_s_per_ktoken=0.003)),
        ("prefill_rate", 1.6, TRUE),
    ],
)
def test_a_drift_of_the_whole_fleet_is_named_by_its_constant(constant: str, factor: float, true: Timing) -> None:
    rig = Rig(count=2, true=true, prior=true)
    rig.run(300.0, 0.4)
    before = rig.learnt.drift
    assert before is None
    for one in rig.engines:
        one.batch.timing = one.timing = scaled(true, **{constant: factor})
    took_s = rig.run(600.0, 0.4, until=lambda beliefs: beliefs.calibrations[APP].drift)
    drift = rig.learnt.drift
    assert drift is not None
    assert (drift.constant, drift.at_s) == (constant, rig.now_s)
    assert drift.ratio == pytest.approx(factor, rel=0.15)
    assert took_s <= 300.0
    assert slow_instances(rig.beliefs) == {}
    (_, moved) = reasons_for(rig.beliefs, rig.beliefs.shapes[0])
    assert (moved.code, moved.subject) == (ReasonCode.DRIFTED, constant)
    assert moved.numbers == (("ratio", drift.ratio), ("at_s", drift.at_s))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_nothing_is_named_where_nothing_changes(count: int) -> None:
    rig = Rig(count=count)
    rig.run(1800.0 if count < 5 else 900.0)
    assert rig.learnt.drift is None
    assert slow_instances(rig.beliefs) == {}


# ---- slow nodes -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrong", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("count", "load"), [(2, 0.2), (3, 0.5), (6, 0.7)])
def test_a_node_one_and_a_half_times_slow_is_named_within_five_minutes(count: int, load: float, wrong: float) -> None:
    rig = Rig(count=count, slow=(1,), prior=scaled(TRUE, decode_base=wrong, kv_slope=wrong))
    took_s = rig.run(300.0, load, until=slow_instances)
    assert set(slow_instances(rig.beliefs)) == {"i-r1"}
    assert took_s < 300.0
    rig.run(200.0, load)
    assert slow_instances(rig.beliefs) == {"i-r1": pytest.approx(1.5, rel=0.07)}
    assert rig.learnt.drift is None
    assert abs(tpot_error(rig.timing(), load)) < 0.08, "the slow one has no say in the law of the others"


def test_a_node_that_recovers_is_slow_no_more() -> None:
    rig = Rig(count=3, slow=(1,))
    rig.run(200.0)
    assert slow_instances(rig.beliefs)
    rig.engines[1].slowdown = 1.0
    rig.run(300.0)
    assert slow_instances(rig.beliefs) == {}
    assert rig.beliefs.paces == {}


def test_a_slow_node_is_seen_by_all_that_it_serves_and_one_alone_is_never_slow() -> None:
    rig = Rig(count=4)
    rig.ready = {key: placed(key, instance_id) for key, instance_id in zip(rig.ready, "AABB", strict=True)}
    rig.beliefs = replace(rig.beliefs, instances={key: owned(key) for key in "AB"})
    for tick in range(10):
        told = tuple(
            window(key, tpot_s=0.0489 * (1.5 if tick >= 5 and key in ("r0", "r1") else 1)) for key in rig.ready
        )
        rig.beliefs = calibrate.observe(rig.beliefs, told, rig.ready, 10.0 * tick)
    assert set(slow_instances(rig.beliefs)) == {"A"}
    alone = {key: row for key, row in rig.ready.items() if row.instance_id == "A"}
    beliefs = replace(rig.beliefs, paces={})
    for tick in range(10):
        beliefs = calibrate.observe(beliefs, told, alone, 10.0 * tick)
    assert beliefs.paces == {}


def test_the_pace_of_an_instance_that_is_gone_is_forgotten() -> None:
    rig = Rig(count=3, slow=(1,))
    rig.run(100.0)
    rig.beliefs = replace(rig.beliefs, instances={key: owned(key) for key in ("i-r0", "i-r2")})
    rig.run(10.0)
    assert rig.beliefs.paces == {}


def test_a_large_fleet_is_read_in_turns() -> None:
    rig = Rig()
    rig.ready = {f"r{n:04d}": placed(f"r{n:04d}") for n in range(2000)}
    instances = {row.instance_id: owned(row.instance_id) for row in rig.ready.values()}
    rig.beliefs = replace(rig.beliefs, instances=instances)
    told = tuple(window(key, tpot_s=0.0489 * (1.5 if key == "r1234" else 1.0)) for key in rig.ready)
    for tick in range(15):
        rig.beliefs = calibrate.observe(rig.beliefs, told, rig.ready, 10.0 * tick)
    assert rig.beliefs.turn == 15
    assert set(slow_instances(rig.beliefs)) == {"i-r1234"}
