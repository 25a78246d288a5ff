"""Each invariant of a plan is broken on purpose, and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.core.check import check
from autoscaler.core.events import Observed
from autoscaler.core.model import Drain, Launch, Missing, Observation, Plan, Terminate
from autoscaler.core.reasons import ReasonCode, why
from tests.scene import Scene, offering, service, unit

CHAT = "support/chat"
REASON = (why(ReasonCode.EMPTY),)


@pytest.fixture
def scene() -> Scene:
    """Three replicas ready, one pool dry and cooling."""
    made = Scene([unit(service(), quota_gpus=4)], [offering("dry", 0.5, count=0), offering("a")])
    made.load(CHAT, 4.0)
    made.run(300)
    return made


def last_observation(scene: Scene) -> Observation:
    return [event.observation for event in scene.events if isinstance(event, Observed)][-1]


def broken(scene: Scene, plan: Plan) -> tuple[str, ...]:
    return check(plan, last_observation(scene), scene.policy, beliefs=scene.beliefs)


def test_the_plan_as_made_breaks_nothing(scene: Scene) -> None:
    assert scene.ready(CHAT) == 3
    assert broken(scene, scene.plans[-1]) == ()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (9, ("9 replicas wanted, max_replicas is 8", "9 GPUs wanted, quota_gpus is 4")),
        (5, ("5 GPUs wanted, quota_gpus is 4",)),
        (-1, ("negative target",)),
    ],
)
def test_bounds_and_quota(scene: Scene, wanted: int, words: tuple[str, ...]) -> None:
    plan = scene.plans[-1]
    (target,) = plan.targets
    found = broken(scene, replace(plan, targets=(replace(target, wanted=wanted),)))
    assert len(found) == len(words)
    for line, word in zip(found, words, strict=True):
        assert word in line


def test_a_target_for_nobody(scene: Scene) -> None:
    plan = scene.plans[-1]
    stranger = replace(plan.targets[0], service="x/y")
    assert broken(scene, replace(plan, targets=(*plan.targets, stranger))) == ("target for x/y, which no policy names",)


@pytest.mark.parametrize(
    ("alternates", "count", "words"),
    [
        (("a", "a"), 1, "named twice"),
        (("nowhere",), 1, "unknown offering nowhere"),
        ((), 1, "launches nothing"),
        (("a",), 0, "launches nothing"),
    ],
)
def test_launches(scene: Scene, alternates: tuple[str, ...], count: int, words: str) -> None:
    launch = Launch(id="x", service=CHAT, variant="l4", count=count, alternates=alternates, reasons=REASON)
    (line,) = broken(scene, replace(scene.plans[-1], launches=(launch,)))
    assert words in line


def test_a_launch_at_an_offering_that_cools_down() -> None:
    scene = Scene([unit(service())], [offering("dry", 0.5, count=0), offering("a")])
    scene.load(CHAT, 0.0)
    plan = scene.run(10)
    launch = Launch(id="x", service=CHAT, variant="l4", count=1, alternates=("dry",), reasons=REASON)
    (line,) = broken(scene, replace(plan, launches=(launch,)))
    assert line == "x: dry is cooling down"


def test_two_actions_with_one_id(scene: Scene) -> None:
    launch = Launch(id="x", service=CHAT, variant="l4", count=1, alternates=("a",), reasons=REASON)
    assert broken(scene, replace(scene.plans[-1], launches=(launch, launch))) == ("two actions share an id",)


def test_nothing_is_terminated_before_it_was_drained(scene: Scene) -> None:
    mine = next(iter(scene.cloud.supply.machines))
    for name, words in ((mine, "before it was drained"), ("i-stranger", "not ours")):
        act = Terminate(id="x", instance_id=name, reasons=REASON)
        (line,) = broken(scene, replace(scene.plans[-1], terminates=(act,)))
        assert words in line


def test_a_drained_instance_with_replicas_is_left_until_its_deadline(scene: Scene) -> None:
    mine = next(iter(scene.cloud.supply.machines))
    scene.cloud.reclaim(mine, 600.0)
    scene.run(20)
    act = Terminate(id="x", instance_id=mine, reasons=REASON)
    plan = replace(scene.plans[-1], terminates=(act,))
    (line,) = broken(scene, plan)
    assert "with replicas before its deadline" in line
    late = replace(plan, at_s=scene.clock.at_s + 601.0)
    assert broken(scene, late) == ()


def test_a_drain_of_what_is_not_in_the_cluster(scene: Scene) -> None:
    drain = Drain(id="x", instance_id="i-stranger", deadline_at_s=0.0, reasons=REASON)
    (line,) = broken(scene, replace(scene.plans[-1], drains=(drain,)))
    assert "not in the cluster" in line


def test_no_act_without_a_view(scene: Scene) -> None:
    launch = Launch(id="x", service=CHAT, variant="l4", count=1, alternates=("a",), reasons=REASON)
    plan = replace(scene.plans[-1], launches=(launch,))
    seen = last_observation(scene)
    for dark in (replace(seen, serving=Missing(why="w")), replace(seen, cloud=Missing(why="w"))):
        found = check(plan, dark, scene.policy, beliefs=scene.beliefs)
        assert found == ("acts without a view of the cluster and the cloud",)


def test_no_reduction_while_blind(scene: Scene) -> None:
    scene.metrics.set_missing(CHAT, "gateway gone")
    scene.run(10)
    plan = scene.plans[-1]
    fewer = replace(plan, targets=tuple(replace(t, wanted=2) for t in plan.targets))
    assert broken(scene, fewer) == (f"{CHAT}: reduced from 3 to 2 while blind (gateway gone)",)


def test_no_quantity_without_a_reason(scene: Scene) -> None:
    plan = scene.plans[-1]
    bare = replace(
        plan,
        targets=tuple(replace(t, reasons=()) for t in plan.targets),
        demands=tuple(replace(d, reasons=()) for d in plan.demands),
    )
    assert broken(scene, bare) == (f"demand of {CHAT} has no reason", f"target of {CHAT}/l4 has no reason")
