"""The plan as the cluster sees it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from autoscaler.core.beliefs import Spend
from autoscaler.core.capacity import Mix
from autoscaler.core.coldstart import quantile_s
from autoscaler.core.publish import slack_s, to_message
from autoscaler.core.spend import month_of
from policies.model import ApiKey, Overflow, PolicySet, Slo, Variant
from tests.scene import TIMING, Scene, offering, service, unit

CHAT = "support/chat"


def message_of(scene: Scene):  # type: ignore[no-untyped-def]
    return to_message(scene.plans[-1], scene.policy, scene.beliefs, "run", 7, scene.clock.at_s, 50.0)


def test_every_application_has_a_target_and_a_rule() -> None:
    variants = (Variant(id="l4", instance_type="g6.2xlarge"), Variant(id="a10", instance_type="g5.2xlarge"))
    scene = Scene([unit(service(variants=variants, min_replicas=2))], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.run(300)
    message = message_of(scene)
    assert message.targets == {"support.chat.l4": 2, "support.chat.a10": 0}
    assert (message.seq, message.run_id, message.stale_after_s) == (7, "run", 50.0)
    rules = message.local_rules
    assert rules["support.chat.l4"].min_replicas == 2
    assert rules["support.chat.a10"].min_replicas == 0, "the floor belongs to the first variant alone"
    assert rules["support.chat.l4"].max_replicas == 8
    assert rules["support.chat.l4"].target_ongoing_per_replica == 0.7 * 8


def test_admission_figures_follow_the_ready_replicas() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 4.0)
    scene.run(600)
    (route,) = message_of(scene).services
    (variant,) = route.variants
    assert (variant.ready_replicas, variant.target_replicas, variant.max_concurrency_per_replica) == (3, 3, 8)
    assert variant.max_replicas == 3, "what three owned instances hold, of the eight that are allowed"
    assert route.max_queued == 8 * 24
    assert route.priority == 500


def test_retry_after_is_when_the_plan_expects_capacity() -> None:
    scene = Scene([unit(service())], [offering("a", count=0)])
    scene.load(CHAT, 0.0)
    scene.run(10)
    (route,) = message_of(scene).services
    cool_s = scene.beliefs.offerings["a"].cool_until_s - scene.clock.at_s
    assert route.retry_after_s == 120.0, "cooldown and lead are past two minutes"
    assert cool_s + 120.0 > 120.0


def test_a_service_that_may_not_be_shed_waits() -> None:
    patient = service(sacrifice=("queue",), slo=Slo(ttft_s=1.0))
    scene = Scene([unit(patient, service("hasty", priority=1))], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.load("support/hasty", 0.0)
    scene.run(10)
    by_name = {route.service: route for route in message_of(scene).services}
    assert by_name[CHAT].queue_timeout_s == 900.0
    lead = 2 * quantile_s((), 60.0, 0.9)  # a boot and a load of a minute each
    assert by_name["support/hasty"].queue_timeout_s == pytest.approx(2.0 * lead), "twice the lead"
    assert (by_name[CHAT].max_queued, by_name["support/hasty"].max_queued) == (100_000, 32)


def test_a_deadline_of_hours_is_waited_for() -> None:
    nightly = service(sacrifice=("queue",), slo=Slo(deadline_s=21_600.0))
    scene = Scene([unit(nightly)], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.run(10)
    (route,) = message_of(scene).services
    assert route.queue_timeout_s == 21_600.0


def test_slack_is_what_the_tightest_limit_leaves_beside_the_work() -> None:
    mix = Mix(input_tokens=500.0, output_tokens=100.0)  # 50 ms of prefill, 28 ms a step of eight
    assert slack_s(Slo(ttft_s=2.0, tpot_s=0.1), TIMING, mix, 8) == pytest.approx(2.0 - 0.078)
    assert slack_s(Slo(ttft_s=9.0, e2e_s=4.0), TIMING, mix, 8) == pytest.approx(4.0 - 2.85)
    assert slack_s(Slo(deadline_s=1.0), TIMING, mix, 8) == 0.0
    assert slack_s(Slo(tpot_s=0.1), TIMING, mix, 8) == math.inf


def test_a_service_without_a_limit_on_waiting_is_never_late() -> None:
    scene = Scene([unit(service(slo=Slo(tpot_s=0.1)), service("strict", priority=1))], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.load("support/strict", 0.0)
    scene.run(10)
    by_name = {route.service: route.slack_s for route in message_of(scene).services}
    assert by_name[CHAT] is None
    strict = by_name["support/strict"]
    assert strict is not None
    assert 1.5 < strict < 2.0


def test_an_application_the_plan_does_not_name_is_stopped() -> None:
    scene = Scene([unit(service())], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.run(300)
    empty = scene.plans[-1]
    from dataclasses import replace

    message = to_message(
        replace(empty, targets=()), PolicySet(units=scene.policy.units), scene.beliefs, "r", 1, 0.0, 1.0
    )
    assert message.targets == {"support.chat.l4": 0}


def test_an_overflow_endpoint_is_published_while_the_months_budget_lasts() -> None:
    """And the keys of the units with it. What costs nothing goes on."""
    given: dict[str, Any] = {"url": "https://api.example.com/v1", "usd_per_1m_tokens": 2.0, "rpm": 60, "key_env": "KEY"}
    paid = service(sacrifice=("queue", "overflow"), overflow=Overflow(**given))
    free = service("free", sacrifice=("queue", "overflow"), overflow=Overflow(**given | {"usd_per_1m_tokens": 0.0}))
    unused = service("unused", overflow=Overflow(**given))
    key = ApiKey(tenant="web", sha256="a" * 64)
    scene = Scene([unit(paid, free, unused, budget_usd_per_month=100.0, api_keys=(key,))], [offering("a")])
    scene.load(CHAT, 0.0)
    scene.run(10)
    message = message_of(scene)
    by_name = {route.service: route.overflow for route in message.services}
    assert by_name[CHAT] is not None
    assert (by_name[CHAT].model, by_name[CHAT].key_env) == ("m", "KEY")
    assert by_name["support/unused"] is None
    assert [(one.unit, one.tenant, one.service) for one in message.keys] == [("support", "web", None)]
    month = month_of(scene.clock.at_s)
    spent = {"support": Spend(month=month, usd=100.0, usd_per_h=0.0, at_s=scene.clock.at_s)}
    spent_all = replace(scene.beliefs, spent=spent)
    message = to_message(scene.plans[-1], scene.policy, spent_all, "run", 8, scene.clock.at_s, 50.0)
    by_name = {route.service: route.overflow for route in message.services}
    assert by_name[CHAT] is None
    assert by_name["support/free"] is not None
