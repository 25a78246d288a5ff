"""What the controller learns of its engines and of starts changes what it does: through the whole loop on fakes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.core.calibrate import slow_instances, timing_width
from autoscaler.core.events import Acted
from autoscaler.core.learn import fold
from autoscaler.core.model import EngineLoad, Measured, Plan
from autoscaler.core.reasons import Reason, ReasonCode
from serve_apps.timing import Timing
from tests.calibration_rig import scaled
from tests.scene import CHAT, TIMING, Scene, codes, offering, service, unit


def telling(scene: Scene, timing: Timing, slow: str = "") -> list[EngineLoad]:
    """Windows of all ready replicas that keep to `timing` with two to eight sequences each; one instance takes 1.4
    times as long.
    """
    rows = []
    now_s = scene.clock.now_s()
    sequences = 2.0 + now_s // 10.0 % 7.0
    for replica in scene.serving.observe(now_s).replicas:
        step_s = (timing.a_s + sequences * timing.b_s_per_seq) * (1.4 if replica.instance_id == slow else 1.0)
        figures = (step_s, sequences, 550.0 * sequences, 0.0)
        tpot, batch, kv, none = (Measured(value=value, at_s=now_s) for value in figures)
        rows.append(
            EngineLoad(
                replica_id=replica.replica_id,
                running=batch,
                waiting=none,
                kv_fraction=none,
                tpot_s=tpot,
                batch=batch,
                kv_tokens=kv,
                steps=100.0,
            )
        )
    return rows


def run(scene: Scene, for_s: float, timing: Timing, slow: str = "") -> Plan:
    """Ticks in which every engine tells its windows."""
    for _ in range(round(for_s / 10.0)):
        scene.metrics.engine_loads = telling(scene, timing, slow)
        scene.run(10.0)
    return scene.plans[-1]


def reason(plan: Plan, code: ReasonCode) -> Reason:
    """The one reason of the service's target with this code."""
    (found,) = [row for target in plan.targets if target.service == CHAT for row in target.reasons if row.code is code]
    return found


def test_engines_slower_than_the_catalogue_get_less_and_so_more_are_had() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 4.0)
    scene.run(600)
    before = scene.wanted(CHAT)
    full = dict(reason(scene.plans[-1], ReasonCode.CAPACITY_PER_REPLICA).numbers)["rps"]
    truth = scaled(TIMING, decode_base=1.6, batch_slope=1.6)
    plan = run(scene, 900, truth)
    assert scene.ready(CHAT) == scene.wanted(CHAT) > before
    learnt = dict(reason(plan, ReasonCode.CALIBRATED).numbers)
    assert learnt["decode_base"] == pytest.approx(1.6, rel=0.05)
    assert learnt["width"] == timing_width(scene.beliefs, scene.beliefs.shapes[0]) < 0.05
    now = dict(reason(plan, ReasonCode.CAPACITY_PER_REPLICA).numbers)["rps"]
    assert plan.routes[0].capacity_rps_per_replica == now < 0.85 * full


def test_engines_that_say_nothing_leave_the_catalogues_figures_and_no_reason() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 4.0)
    plan = scene.run(600)
    assert ReasonCode.CALIBRATED not in codes(plan)


def test_a_slow_node_counts_for_what_it_carries() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 5.0)
    run(scene, 600, TIMING)
    before = scene.wanted(CHAT)
    slow = scene.serving.observe(scene.clock.now_s()).replicas[0].instance_id
    plan = run(scene, 300, TIMING, slow)
    named = reason(plan, ReasonCode.SLOW_NODE)
    assert named.subject == slow
    ratio = dict(named.numbers)["ratio"]
    assert ratio == slow_instances(scene.beliefs)[slow] == pytest.approx(1.4, rel=0.05)
    full = dict(reason(plan, ReasonCode.CAPACITY_PER_REPLICA).numbers)["rps"]
    assert dict(named.numbers)["rps"] == pytest.approx(full / ratio)
    assert scene.wanted(CHAT) >= before


def test_a_drift_of_all_engines_is_in_the_reasons() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 4.0)
    run(scene, 900, TIMING)
    plan = run(scene, 300, scaled(TIMING, decode_base=1.4))
    moved = reason(plan, ReasonCode.DRIFTED)
    assert moved.subject == "decode_base"
    assert dict(moved.numbers)["ratio"] == pytest.approx(1.4, rel=0.1)


def given_up(scene: Scene) -> list[Reason]:
    """Why instances were ended that took too long to start, in order."""
    acts = [act for plan in scene.plans for act in plan.terminates]
    return [row for act in acts for row in act.reasons if row.code is ReasonCode.STARTING_EXPIRED]


# ---- starts ---------------------------------------------------------------------------------------------------------
def test_a_model_that_loads_for_longer_than_anybody_waits_is_ready_in_the_end() -> None:
    """sie#293, kserve#1641: scaled to zero in mid-load, and begun again with the next request."""
    lazy = service(goal="cost", min_replicas=0, scale_to_zero=True)
    scene = Scene([unit(lazy)], [offering("a")], load_s=900.0)
    scene.load(CHAT, 0.5)
    scene.run(60)
    scene.load(CHAT, 0.0)
    scene.run(400)
    plan = scene.plans[-1]
    assert any(row.code is ReasonCode.LOADING_PROTECTED for row in plan.demands[0].reasons)
    assert not [event for event in scene.events if isinstance(event, Acted) and event.verb == "drain"]
    scene.run(700)
    assert list(scene.beliefs.load_s.values()) == [(900.0,)]
    scene.run(1800)
    assert scene.running() == [], "once it was ready, the lull counts"


def test_a_type_that_boots_for_longer_than_the_table_says_is_had_after_a_few_tries() -> None:
    """kserve#3795: killed at five minutes, for ever."""
    scene = Scene([unit(service())], [offering("a", boot_s=700.0)])
    scene.load(CHAT, 0.5)
    scene.run(3600)
    assert scene.ready(CHAT) == 1
    before = given_up(scene)
    assert [dict(row.numbers) for row in before] == [
        {"age_s": 310.0, "limit_s": 300.0},
        {"age_s": 610.0, "limit_s": 600.0},
    ]
    scene.load(CHAT, 4.0)
    scene.run(1800)
    assert scene.ready(CHAT) > 1
    assert given_up(scene) == before, "none of the next ones is"


def test_a_replica_that_never_gets_ready_gives_up_its_place() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 0.5)
    scene.run(600)
    (stays,) = scene.running()
    assert stays == "a"
    scene.serving.load_s = 1e9
    scene.load(CHAT, 4.0)
    scene.run(600)
    before = {key for key, row in scene.beliefs.instances.items() if row.joined}
    scene.run(1200)
    late = [
        row for plan in scene.plans for row in plan.drains for why in row.reasons if why.code.value == "load_expired"
    ]
    assert {row.instance_id for row in late} <= before
    assert late
    (first,) = {why for row in late[:1] for why in row.reasons}
    assert dict(first.numbers)["limit_s"] == 1200.0 < dict(first.numbers)["age_s"]


def test_the_whole_of_it_replays() -> None:
    """Beliefs with calibrations are a fold of the journal, exactly."""
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 5.0)
    run(scene, 300, scaled(TIMING, decode_base=1.3))
    assert scene.beliefs.calibrations
    assert fold(scene.events) == scene.beliefs
    assert replace(fold(scene.events), calibrations={}) != scene.beliefs
