"""Whatever the world does: plans pass their check, nothing is bought twice, the floor comes back, replays agree."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.core.events import EVENT, PLAN, CheckFailed, LaunchGranted, Observed, Ordered, Planned
from autoscaler.core.learn import EMPTY, fold, learn
from autoscaler.loop import judge
from autoscaler.ports import PortError, Throttled, Transient
from policies.model import Variant
from tests.scene import Scene, offering, service, unit

VARIANTS = (Variant(id="l4", instance_type="g6.2xlarge"), Variant(id="quad", instance_type="g6.12xlarge", tp=2))

steps = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.sampled_from(["a/x", "b/y"]), st.sampled_from([0.0, 0.3, 2.0, 9.0])),
        st.tuples(st.just("supply"), st.sampled_from(["one", "two", "quad"]), st.integers(0, 4)),
        st.tuples(st.just("reclaim"), st.integers(0, 9), st.sampled_from([30.0, 120.0])),
        st.tuples(st.just("blind"), st.sampled_from(["a/x", "b/y"])),
        st.tuples(st.just("fail"), st.sampled_from(["cloud", "serving", "metrics"]), st.booleans()),
        st.tuples(
            st.just("order"),
            st.sampled_from(["freeze", "unfreeze", "floor", "drain"]),
            st.sampled_from(["a/x", "b/y"]),
            st.integers(0, 8),
            st.sampled_from([5.0, 60.0, 300.0]),
        ),
        st.tuples(st.just("lose")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("wait"), st.integers(1, 30)),
    ),
    min_size=1,
    max_size=25,
)


def world(quota: int | None, budget: float | None) -> Scene:
    high = service("x", variants=VARIANTS, max_replicas=6)
    low = service("y", variants=VARIANTS, max_replicas=6, priority=10, goal="cost", min_replicas=0, scale_to_zero=True)
    pools = [
        offering("one", 1.0, count=2),
        offering("two", 1.5, count=2, market="spot"),
        offering("quad", 4.0, count=1, instance_type="g6.12xlarge", gpus=4),
    ]
    made = Scene([unit(high, name="a", quota_gpus=quota), unit(low, name="b", budget_usd_per_h=budget)], pools)
    made.load("a/x", 0.5)
    made.load("b/y", 0.0)
    return made


def apply(scene: Scene, step: tuple[Any, ...]) -> None:
    kind, *args = step
    if kind == "load":
        scene.load(args[0], args[1])
    elif kind == "supply":
        scene.cloud.set_supply(args[0], args[1])
    elif kind == "reclaim":
        running = [m.instance_id for m in scene.cloud.supply.machines.values() if m.state == "running"]
        if running:
            scene.cloud.reclaim(running[args[0] % len(running)], args[1])
    elif kind == "blind":
        scene.metrics.set_missing(args[0])
    elif kind == "fail":
        error: PortError = Throttled("slow down") if args[1] else Transient("no answer")
        getattr(scene, args[0]).failures = [error]
    elif kind == "order":
        order(scene, *args)
    elif kind == "lose":
        scene.cloud.lose_replies = 1
    elif kind == "restart":
        scene.start()
    scene.run(10.0 * args[0] if kind == "wait" else 10.0)  # asserts that no plan broke its check


def order(scene: Scene, verb: Any, subject: str, number: int, for_s: float) -> None:
    """An operator's order, whether it makes sense or not; `number` is a floor, or which instance to drain."""
    if verb == "drain":
        held = sorted(scene.beliefs.instances) or ["i-none"]
        subject = held[number % len(held)]
    now_s = scene.clock.at_s
    given = {"verb": verb, "subject": subject, "replicas": number, "until_s": now_s + for_s}
    scene.controller.ledger.record(Ordered(at_s=now_s, who="w", why="w", **given))


@settings(deadline=None)
@given(steps, st.sampled_from([None, 2, 4]), st.sampled_from([None, 2.5]))
def test_promises_hold_in_any_world(script: list[tuple[Any, ...]], quota: int | None, budget: float | None) -> None:
    scene = world(quota, budget)
    for step in script:
        apply(scene, step)
    granted = [name for event in scene.events if isinstance(event, LaunchGranted) for name in event.instance_ids]
    assert len(granted) == len(set(granted)), "no instance is granted to two intents"
    _heal(scene)
    assert scene.ready("a/x") >= 1, "after healing the floor is served"
    owned = {m.instance_id for m in scene.cloud.supply.machines.values() if m.state in ("pending", "running")}
    assert owned <= set(scene.beliefs.instances), "nothing the cloud bills is unknown"
    assert not scene.plans[-1].launches, "and the plan is still"


def _heal(scene: Scene) -> None:
    for port in (scene.cloud, scene.serving, scene.metrics):
        port.failures = []
    scene.cloud.lose_replies = 0
    for name, count in (("one", 2), ("two", 2), ("quad", 1)):
        scene.cloud.set_supply(name, count)
    scene.load("a/x", 0.5)
    scene.load("b/y", 0.0)
    scene.run(2000)


@settings(deadline=None)
@given(steps)
def test_every_plan_is_remade_from_the_journal_byte_for_byte(script: list[tuple[Any, ...]]) -> None:
    scene = world(4, 2.5)
    for step in script:
        apply(scene, step)
    beliefs, observation = EMPTY, None
    for live in scene.events:
        event = EVENT.validate_json(EVENT.dump_json(live))
        if isinstance(event, Planned):
            assert observation is not None
            assert beliefs.policy is not None
            made = judge(observation, beliefs.policy, beliefs, event.at_s, event.plan.id)
            assert not isinstance(made, CheckFailed)
            assert PLAN.dump_json(made) == PLAN.dump_json(event.plan)
        if isinstance(event, Observed):
            observation = event.observation
        beliefs = learn(beliefs, event)
    assert beliefs == scene.beliefs
    assert fold(scene.events) == scene.beliefs
