"""Serve's policy: the plan while it is fresh, the local rule without it, and never an exception."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from serve_apps import plan_reader, serve_policy
from serve_apps.local_rule import Held, Load, choose, follow
from serve_apps.plan_reader import PlanReader, SeenPlan
from serve_apps.wire import LLM_DEPLOYMENT, LocalRule, PlanMessage, encode

APP = "ops.chat.l4"
RULE = LocalRule(target_ongoing_per_replica=4, min_replicas=1, max_replicas=6, downscale_hold_s=30)


def plan(targets: dict[str, int], rules: dict[str, LocalRule] | None = None) -> PlanMessage:
    return PlanMessage(
        run_id="r", seq=1, published_at_s=0, stale_after_s=10, targets=targets, local_rules=rules or {}, services=()
    )


def replicas(requests: float, *, running: int = 1, target: int = 1, rule: LocalRule = RULE) -> int:
    return follow(rule, Load(running, target, requests), None, 0.0).replicas


# ---- choose --------------------------------------------------------------------------------------------------------
def test_a_fresh_plan_is_obeyed_whatever_the_queue_says() -> None:
    assert choose(APP, plan({APP: 3}), 10.0, RULE, Load(1, 1, 100), None, 0.0) == (3, None)


def test_a_fresh_plan_leaves_an_application_that_it_does_not_name() -> None:
    assert choose(APP, plan({"other.app.x": 3}), 0.0, RULE, Load(1, 1, 100), None, 0.0) == (None, None)


def test_a_stale_plan_is_not_obeyed_but_its_local_rule_is() -> None:
    newer = RULE.model_copy(update={"max_replicas": 2})
    assert choose(APP, plan({APP: 5}, {APP: newer}), 10.1, RULE, Load(1, 1, 100), None, 0.0)[0] == 2


def test_without_any_plan_the_configured_rule_decides() -> None:
    assert choose(APP, None, 0.0, RULE, Load(1, 1, 9), None, 0.0)[0] == 3


def test_a_fresh_plan_forgets_what_the_local_rule_held() -> None:
    assert choose(APP, plan({APP: 1}), 0.0, RULE, Load(6, 6, 0), Held(6, 0.0, 0), 1.0) == (1, None)


# ---- the local rule ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("requests", "wanted"), [(0, 1), (4, 1), (4.1, 2), (9, 3), (24, 6), (1000, 6)])
def test_enough_replicas_for_the_requests_within_the_bounds(requests: float, wanted: int) -> None:
    assert replicas(requests) == wanted


def test_an_idle_application_may_go_to_zero_when_its_minimum_is_zero() -> None:
    rule = RULE.model_copy(update={"min_replicas": 0, "downscale_hold_s": 0})
    assert replicas(0, rule=rule) == 0


def test_at_the_moment_the_plan_dies_nothing_running_or_starting_is_given_up() -> None:
    assert replicas(0, running=2, target=5) == 5
    assert replicas(0, running=5, target=2) == 5


def test_it_goes_down_after_the_hold_to_the_most_that_was_wanted_in_it() -> None:
    held = follow(RULE, Load(6, 6, 0), None, 0.0)
    for now_s, requests in ((10.0, 12.0), (20.0, 1.0), (29.9, 1.0)):
        held = follow(RULE, Load(6, 6, requests), held, now_s)
        assert held.replicas == 6
    held = follow(RULE, Load(6, 6, 1), held, 30.0)
    assert held.replicas == 3
    held = follow(RULE, Load(3, 3, 1), held, 59.9)
    assert held.replicas == 3
    assert follow(RULE, Load(3, 3, 1), held, 60.0).replicas == 1


def test_a_new_rise_starts_the_hold_again() -> None:
    held = follow(RULE, Load(6, 6, 0), None, 0.0)
    held = follow(RULE, Load(6, 6, 24), held, 25.0)
    assert follow(RULE, Load(6, 6, 0), held, 54.9).replicas == 6
    assert follow(RULE, Load(6, 6, 0), held, 55.0).replicas == 1


# ---- the class inside Serve's own wrapper --------------------------------------------------------------------------
def context(running: int, target: int, requests: float, name: str = LLM_DEPLOYMENT) -> AutoscalingContext:
    config = AutoscalingConfig(
        min_replicas=0, max_replicas=9, upscale_delay_s=0, downscale_delay_s=0, downscale_to_zero_delay_s=0
    )
    return AutoscalingContext(
        deployment_id=DeploymentID(name=name, app_name=APP),
        deployment_name=name,
        app_name=APP,
        current_num_replicas=running,
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=lambda: requests,
        total_queued_requests=lambda: requests,
        aggregated_metrics=None,
        raw_metrics=None,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=config,
    )


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Decide what the reader has seen: a plan published `age_s` ago, or nothing."""

    def seen(message: PlanMessage | None, age_s: float = 0.0) -> None:
        fixed = PlanReader(lambda: None if message is None else (age_s, encode(message)))
        fixed.read_once()
        monkeypatch.setattr(plan_reader, "latest", lambda: fixed.seen)

    return seen


def decide(policy: serve_policy.PlanPolicy, one: AutoscalingContext) -> int | None:
    decisions, _ = _apply_app_level_autoscaling_config(policy)({one.deployment_id: one})
    replicas: int | None = decisions.get(one.deployment_id)
    return replicas


def policy(**changes: Any) -> serve_policy.PlanPolicy:
    return serve_policy.PlanPolicy(**{"app": APP, "local_rule": RULE.model_dump(), **changes})


def test_zero_is_kept_with_requests_waiting_and_nothing_running(see: Any) -> None:
    see(plan({APP: 0}))
    assert decide(policy(), context(0, 0, requests=5)) == 0


def test_more_than_one_can_start_from_zero_with_requests_waiting(see: Any) -> None:
    see(plan({APP: 3}))
    assert decide(policy(), context(0, 0, requests=5)) == 3


def test_the_local_rule_still_sees_requests_that_wait_at_zero_replicas(see: Any) -> None:
    see(None)
    assert decide(policy(), context(0, 0, requests=9)) == 3


def test_another_deployment_of_the_application_is_left_alone(see: Any) -> None:
    see(plan({APP: 3}))
    assert decide(policy(), context(1, 1, 0, name="Other")) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"local_rule": None},
        {"local_rule": {"min_replicas": 1}},
        {"local_rule": RULE.model_dump() | {"max_replicas": "many"}},
        {"local_rule": RULE.model_dump() | {"target_ongoing_per_replica": 0}},
    ],
)
def test_wrong_kwargs_leave_the_application_alone_and_raise_nothing(see: Any, changes: dict[str, Any]) -> None:
    see(None)
    assert decide(policy(**changes), context(2, 2, 5)) is None


def test_no_kwargs_at_all_raise_nothing() -> None:
    assert serve_policy.PlanPolicy()({}) == ({}, {})


def test_a_context_of_an_unknown_shape_raises_nothing(see: Any) -> None:
    see(plan({APP: 3}))
    assert policy()({"x": object()}) == ({}, {})


# ---- the reader ----------------------------------------------------------------------------------------------------
def test_the_age_of_a_plan_counts_from_its_publication() -> None:
    reader = PlanReader(lambda: (7.0, encode(plan({APP: 2}))), lambda: 100.0)
    reader.read_once()
    assert reader.seen == SeenPlan(plan({APP: 2}), 93.0)


@pytest.mark.parametrize("answer", [None, (0.0, b"not json"), (0.0, b'{"version": 99}'), ConnectionError("gone")])
def test_a_lost_or_unreadable_board_leaves_the_known_plan_to_age(answer: Any) -> None:
    answers: list[Any] = [(0.0, encode(plan({APP: 2}))), answer]

    def fetch() -> tuple[float, bytes] | None:
        now: Any = answers.pop(0)
        if isinstance(now, Exception):
            raise now
        known: tuple[float, bytes] | None = now
        return known

    reader = PlanReader(fetch, lambda: 100.0)
    reader.read_once()
    reader.read_once()
    assert not answers
    assert reader.seen == SeenPlan(plan({APP: 2}), 100.0)


def test_outside_a_cluster_nothing_is_seen_and_no_cluster_is_started() -> None:
    import ray

    reader = PlanReader(plan_reader._from_board)
    reader.read_once()
    assert reader.seen is None
    assert not ray.is_initialized()
