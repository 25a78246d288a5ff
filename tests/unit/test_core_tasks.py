"""Calls per task: what gateways count, what is learnt of it, and a burst planned for before its calls come."""

from __future__ import annotations

import pytest

from autoscaler.core.reasons import ReasonCode
from autoscaler.core.tasks import MOST, NO_TASKS, SPAN_S, Tasks, observe
from tests.engine_scene import PLAIN, engine, rows, table
from tests.gateway_fakes import Rig, one_app
from tests.scene import CHAT, Scene, offering, service, unit
from tests.unit.test_metrics_rates import Board, value

TEXT = "/v1/completions"
ASK = {"model": "u/s", "prompt": "a"}


def after(for_s: float, rps: float, begun_rps: float, known: Tasks = NO_TASKS) -> Tasks:
    for _ in range(round(for_s / 10.0)):
        known = observe(known, 10.0, rps, begun_rps)
    return known


def test_calls_are_what_came_over_an_hour_rounded_down() -> None:
    assert after(7200.0, 7.6, 1.0).calls == 7.5
    assert after(60.0, 7.5, 1.0).calls == 5.25  # 60 tasks beside 30 that are taken to be one call each
    assert after(7200.0, 1.0, 1.0).calls == 1.0
    assert NO_TASKS.calls == 1.0


def test_a_burst_of_tasks_is_worth_all_their_calls_within_a_minute() -> None:
    """Ten times as many tasks begin; of their 7.5 calls only the first one shows."""
    known = after(7200.0, 7.5, 1.0)
    burst = after(60.0, 7.5 + 9.0, 10.0, known)
    assert known.ahead_rps == pytest.approx(7.5, rel=0.05)
    assert 0.55 * 75.0 < burst.ahead_rps < 75.0
    assert after(180.0, 16.5, 10.0, known).ahead_rps == pytest.approx(0.95 * 10.0 * 5.75, rel=0.1)
    assert after(300.0, 7.5, 0.0, burst).ahead_rps < 1.0  # none begin any more: what is there is a matter of the rate


def test_without_tasks_nothing_is_ahead() -> None:
    assert after(7200.0, 50.0, 50.0).ahead_rps == 0.0


def test_one_id_for_everything_is_bounded_and_a_long_gap_speaks_for_minutes() -> None:
    assert after(7200.0, 50.0, 0.0).calls == MOST
    assert observe(NO_TASKS, 86_400.0, 1.0, 1.0).requests == SPAN_S


async def test_a_task_begins_with_its_first_call_and_with_every_call_without_an_id() -> None:
    rig: Rig = one_app()
    for task in ("a", "b", "a", "", "", "b", "c" * 500, "c" * 400):
        headers = {"X-Task-Id": task} if task else {}
        assert (await rig.request("POST", TEXT, json=ASK | {"max_tokens": 1}, headers=headers)).status_code == 200
    assert (rig.counters().arrivals, rig.counters().tasks) == (8, 5)


def test_the_gateway_remembers_so_many_ids_and_forgets_the_longest_unused() -> None:
    from serve_apps.gateway.service import MAX_TASKS

    of = one_app().gateway.services["u/s"]
    of.arrive("kept")
    for n in range(MAX_TASKS - 1):
        of.arrive(f"t{n}")
    of.arrive("kept")
    of.arrive("one more")  # t0 goes
    assert of.tally.tasks == MAX_TASKS + 1
    of.arrive("kept")
    of.arrive("t0")
    assert of.tally.tasks == MAX_TASKS + 2


def test_gateways_reports_become_a_rate() -> None:
    board = Board()
    board.report("g1", 1, arrivals=100, tasks=20, input_tokens=1)
    board.report("g2", 1, arrivals=10, tasks=10)
    board.chat()
    board.now_s += 10
    board.report("g1", 2, arrivals=160, tasks=28, input_tokens=1)
    board.report("g2", 2, arrivals=20, tasks=20)
    seen = board.chat()
    assert (value(seen.arrival_rps), value(seen.tasks_rps)) == (7.0, 1.8)


def test_the_world_counts_the_tasks_of_its_agents() -> None:
    """Three tasks: of one call, and twice of three, whose later calls are arrivals and begin nothing."""
    made = engine(rows([0.0, 1.0, 60.0], [100] * 3, [10] * 3, tasks=[0, 1, 1]), table((1, 9.0, 9), (3, 2.0, 90)))
    made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(30.0)
    first = made.window(0)
    made.advance(100.0)
    second = made.window(0)
    assert [(seen.arrived, seen.tasks) for seen in (first, second)] == [(4, 2), (3, 1)]


def test_a_plan_says_that_calls_of_tasks_are_still_to_come() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.metrics.set(CHAT, 1.5, input_tokens=500, output_tokens=100, tasks_rps=0.2)
    before = scene.run(3600)
    scene.metrics.set(CHAT, 3.3, input_tokens=500, output_tokens=100, tasks_rps=2.0)
    burst = scene.run(60)
    assert ReasonCode.TASKS_BEGUN not in {reason.code for reason in before.demands[0].reasons}
    assert ReasonCode.TASKS_BEGUN in {reason.code for reason in burst.demands[0].reasons}
    assert burst.demands[0].arrival_rps > 2.0 * 3.3
