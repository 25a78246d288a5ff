"""Why the last launch went where it went, in a shortage that is played out."""

from __future__ import annotations

from autoscaler.core.reasons import ReasonCode, why
from autoscaler.explain import Explanation, explain, words
from tests.scene import Scene, offering, service, unit

CHAT, BATCH = "support/chat", "support/batch"


def shortage() -> Scene:
    """`dry` and `small` are cheapest: one has nothing, the other one instance; three are needed."""
    made = Scene(
        units=[unit(service("chat", min_replicas=3), service("batch", priority=1, min_replicas=1))],
        offerings=[
            offering("dry", price=1.0, count=0),
            offering("small", price=2.0, count=1),
            offering("large", price=3.0),
            offering("spare", price=4.0),
        ],
    )
    made.load(CHAT, 0.1)
    made.load(BATCH, 0.1)
    return made


def told(made: Scene, service: str | None = CHAT, at_s: float | None = None) -> Explanation:
    found = explain(made.journal.read(), service, at_s)
    assert found is not None
    return found


def test_the_ladder_tells_price_answer_and_what_came_of_it() -> None:
    made = shortage()
    made.run(10.0)
    rows = [(r.offering, r.price_usd_per_h, r.asked, r.granted, r.outcome, r.code) for r in told(made).rungs]
    assert rows == [
        ("dry", 1.0, 3, 0, "refused", "InsufficientInstanceCapacity"),
        ("small", 2.0, 3, 1, "granted", ""),
        ("large", 3.0, 2, 2, "granted", ""),
        ("spare", 4.0, 0, 0, "not tried", ""),
    ]
    assert (told(made).granted, told(made).count) == (3, 3)


def test_it_says_why_capacity_was_needed_and_why_in_this_order() -> None:
    made = shortage()
    made.run(10.0)
    found = told(made)
    assert any(line.startswith("min_replicas: floor 3") for line in found.demand)
    assert found.reasons[0].startswith("cheapest dry: usd_per_h 3")


def test_it_says_what_would_have_changed_it() -> None:
    made = shortage()
    made.run(10.0)
    remedies = told(made).remedies
    assert "dry would have been taken, had it not answered InsufficientInstanceCapacity" in remedies
    assert any(line.startswith("spare would be next") for line in remedies)


def test_an_offering_that_rests_is_shown_with_its_refusals() -> None:
    made = shortage()
    made.run(10.0)
    made.cloud.set_supply("large", 2)
    made.load(CHAT, 40.0)
    made.run(10.0)
    found = told(made)
    rests = {r.offering: r for r in found.rungs if r.outcome == "cooling down"}
    assert rests["dry"].refusals_in_row == 1
    assert rests["dry"].cool_until_s > found.at_s
    assert any(line.startswith("dry is left out after 1 refusals") for line in found.remedies)


def test_the_service_and_the_time_choose_the_launch() -> None:
    made = shortage()
    made.run(10.0)
    first_s = made.plans[0].at_s
    made.load(CHAT, 8.0)
    made.run(100.0)
    assert told(made).at_s > first_s
    assert told(made, at_s=first_s + 5.0).at_s == first_s
    assert told(made, BATCH).service == BATCH
    assert explain(made.journal.read(), CHAT, first_s - 1.0) is None
    assert explain(made.journal.read(), "support/none") is None


def test_an_unanswered_call_is_told_as_ambiguous() -> None:
    made = shortage()
    made.cloud.set_supply("dry", 9)
    made.cloud.lose_replies = 9
    made.run(10.0)
    found = told(made)
    assert found.rungs[0].outcome == "ambiguous"
    assert any("unanswered call" in line for line in found.remedies)


def test_what_stays_missing_is_said_with_the_remedy() -> None:
    made = shortage()
    for name, count in (("small", 0), ("large", 1), ("spare", 0)):
        made.cloud.set_supply(name, count)
    made.run(10.0)
    assert "2 of 3 stay missing" in told(made).remedies[-1]


def test_reasons_are_words_and_numbers() -> None:
    assert words(why(ReasonCode.CHEAPEST, "a", usd_per_h=1.23456789, offerings=2)) == (
        "cheapest a: usd_per_h 1.23457, offerings 2"
    )
    assert words(why(ReasonCode.SURPLUS)) == "surplus"
    assert words(why(ReasonCode.COOLING_DOWN, "a", until_s=1_796_076_940.0)) == "cooling_down a: until_s 22:15:40 UTC"


def test_the_limits_of_the_policy_that_bind_are_named_with_the_word_that_sets_them() -> None:
    made = Scene([unit(service(), quota_gpus=2, budget_usd_per_h=1.5)], [offering("a", 1.0)])
    made.load(CHAT, 9.0)
    made.run(60)
    limits = [line for line in told(made).remedies if "binds" in line]
    assert len(limits) == 1
    assert limits[0].startswith("the hourly budget of unit support binds: raise budget_usd_per_h")
    assert "budget_usd_per_h 1.5, planned_usd_per_h 2" in limits[0]
