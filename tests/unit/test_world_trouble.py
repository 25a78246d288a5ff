"""The controller's own troubles in the world: each does what its row in chaos.faults says, and is over when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoscaler.adapters.journal import FileJournal, MemoryJournal
from autoscaler.core.events import Configured, LaunchGranted, LaunchTried, Opened, PolicyRefused
from autoscaler.core.model import CloudView
from chaos.world import simulate
from chaos.world.drivers import Loop
from chaos.world.world import World
from tests.worlds import CHAT, fault, row, scenario, world


def run(made: World, until_s: float = 600.0) -> list[Any]:
    """The events of a run under the loop."""
    journal = MemoryJournal()
    loop = Loop(made, journal)
    for step in range(int(until_s / 10.0)):
        made.run_until(10.0 * step)
        made.metrics.sample()
        loop.tick()
    return [record.event for record in loop._journal.kept.read()]


def of(events: list[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_clock_that_drifts_is_right_again_afterwards() -> None:
    made = world(faults=[fault("clock_drift", 100.0, 100.0, value=0.5)])
    made.run_until(180.0)
    assert made.clock.now_s() - made.scenario.start_at_s == pytest.approx(220.0)
    made.run_until(300.0)
    assert made.clock.now_s() - made.scenario.start_at_s == pytest.approx(300.0)


def test_a_pool_without_a_price_is_not_offered_and_its_instances_are_kept() -> None:
    made = world(faults=[fault("price_gone", 200.0, 100.0)])
    run(made, 260.0)
    view: CloudView = made.cloud.describe(0.0)
    assert not view.offerings
    assert [each.state for each in view.instances] == ["running"]


def test_what_is_ended_by_hand_is_replaced() -> None:
    made = world(faults=[fault("manual_end", 200.0)])
    granted = of(run(made), LaunchGranted)
    assert len(granted) == 2


def test_targets_set_by_hand_hold_until_the_next_plan() -> None:
    made = world(faults=[fault("manual_targets", 305.0, target=CHAT, value=0)])
    run(made, 301.0)
    made.run_until(306.0)
    assert set(made.serving.targets.values()) == {0}
    run(made, 400.0)
    assert set(made.serving.targets.values()) == {1}


def test_a_policy_is_changed_broken_and_restored() -> None:
    faults = [fault("policy_change", 100.0, 100.0, value=0.1), fault("policy_bad", 300.0, 100.0)]
    events = run(world(faults=faults))
    most = [event.policy.units[0].services[0].max_replicas for event in of(events, Configured)]
    assert most == [20, 2, 20, 20]  # what is whole again after a refusal is taken once more
    assert len(of(events, PolicyRefused)) == 1


@pytest.mark.parametrize("left", [step / 2 for step in range(16)])
def test_after_a_crash_at_any_step_of_a_tick_no_intent_is_sent_twice(left: float) -> None:
    made = world(faults=[fault("controller_crash", 0.0, value=left)])
    events = run(made, 300.0)
    tokens = [event.token for event in of(events, LaunchTried)]
    assert len(tokens) == len(set(tokens))
    assert len(of(events, Opened)) == (2 if left >= 0.5 else 1)
    assert sum(machine.stays for machine in made.pools.machines.values()) == 1


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_power_cut_loses_what_was_not_synced_and_nothing_else(on_disk: bool, tmp_path: Path) -> None:
    made = world(faults=[fault("journal_torn", 205.0)])
    kept = FileJournal(tmp_path, sync=False) if on_disk else MemoryJournal()
    loop = Loop(made, kept)
    for step in range(40):
        made.run_until(10.0 * step)
        made.metrics.sample()
        loop.tick()
    records = list(loop._journal.kept.read())
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert len(of([record.event for record in records], Opened)) == 2
    assert not made.violations
    loop.close()


def test_a_full_disk_stops_every_act_and_says_so() -> None:
    report = simulate(scenario(row("od"), faults=[fault("journal_full", 0.0, 300.0)]), "ours", 1)
    assert {each.kind for each in report.violations} == {"tick_failed"}
    assert report.launches.attempted > 0


def test_a_second_controller_is_survived() -> None:
    made = world(faults=[fault("second_controller", 100.0, 200.0)])
    run(made, 1200.0)
    assert sum(machine.stays for machine in made.pools.machines.values()) == 1


def test_an_engine_that_is_no_more_teaches_nothing() -> None:
    quiet, haunted = (
        simulate(scenario(row("od"), rps=3.0, faults=faults), "ours", 1)
        for faults in ([], [fault("metrics_ghost", 300.0, 500.0)])
    )
    assert quiet == haunted
