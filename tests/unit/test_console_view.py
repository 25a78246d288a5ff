"""What the console's page says of a shortage that is played out, and of one that ends."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from autoscaler.console.view import View
from autoscaler.core.events import Ordered
from policies.model import PolicySet
from tests.scene import CHAT, Scene, crowd, offering, service, unit

BATCH = "support/batch"


def shortage() -> Scene:
    """Three replicas are wanted, one instance can be had."""
    made = Scene(
        units=[unit(service("chat", min_replicas=3), budget_usd_per_h=50.0)],
        offerings=[offering("dry", price=1.0, count=0), offering("small", price=2.0, count=1)],
    )
    made.load(CHAT, 0.1)
    made.run(200.0)
    return made


def viewed(made: Scene) -> View:
    view = View()
    for record in made.journal.read():
        view.take(record)
    return view


def row(page: dict[str, Any], part: str, key: str, name: str) -> Any:
    return next(one for one in page[part] if one[key] == name)


def test_before_any_record_the_page_is_whole_and_says_that_nothing_is_known() -> None:
    page = View().page()
    assert page["headline"] == {"state": "unseen", "text": "No policy is in force yet."}
    assert page["services"] == page["log"] == page["pools"] == []


def test_a_shortage_is_the_headline_and_the_service_says_how_much_is_missing() -> None:
    page = viewed(shortage()).page()
    chat = row(page, "services", "service", CHAT)
    assert page["headline"] == {"state": "short", "text": f"1 short of capacity, of 1. First: {CHAT}."}
    assert (chat["state"], chat["ready"], chat["short"]) == ("short", 1, 2)
    assert chat["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1, "fraction": 0.95}


def test_pools_tell_odds_what_is_held_and_how_long_they_rest() -> None:
    page = viewed(shortage()).page()
    dry, small = row(page, "pools", "offering", "dry"), row(page, "pools", "offering", "small")
    assert (dry["held"], small["held"]) == (0, 1)
    assert dry["odds"] < 0.5
    assert dry["cool_until_s"] > page["at_s"]
    assert dry["last_refusal"]


def test_what_an_instance_costs_is_its_services_and_its_units() -> None:
    page = viewed(shortage()).page()
    support = row(page, "units", "unit", "support")
    assert row(page, "services", "service", CHAT)["usd_per_h"] == support["usd_per_h"] == 2.0
    assert support["budget_usd_per_h"] == 50.0
    assert row(page, "units", "unit", "")["usd_per_h"] == 0.0


def test_the_log_has_the_shortage_with_its_reason_and_the_refusal_newest_first() -> None:
    log = viewed(shortage()).page()["log"]
    assert [line["seq"] for line in log] == sorted((line["seq"] for line in log), reverse=True)
    kinds = {line["kind"] for line in log}
    assert {"refused", "granted", "short", "launch", "plan"} <= kinds
    assert row({"log": log}, "log", "kind", "short")["why"]


def test_a_shortage_is_told_once_while_it_lasts_and_its_end_once() -> None:
    made = shortage()
    shorts = [line for line in viewed(made).log if line["kind"] in ("short", "recovered")]
    assert [line["text"] for line in shorts] == [f"{CHAT}: short of 2"]
    made.source.set(PolicySet(units=(unit(service("chat", min_replicas=1)),)))
    made.run(60.0)
    view = viewed(made)
    assert [line["kind"] for line in view.log if line["kind"] in ("short", "recovered")] == ["short", "recovered"]
    assert view.page()["headline"]["state"] == "served"


def test_one_service_has_its_history_supply_by_rung_and_the_ladder_of_its_last_launch() -> None:
    one = viewed(shortage()).service(CHAT)
    assert one is not None
    assert one["history"][-1]["rps"] == pytest.approx(0.1, rel=0.5)
    assert one["history"][-1]["supply_rps"]["on_demand"] > 1.0
    assert [rung["offering"] for rung in one["ladder"]] or one["ladder_why"]
    assert viewed(shortage()).service("support/none") is None


def test_the_page_is_json_and_small_at_200_services_and_60_pools() -> None:
    made = crowd()
    view = viewed(made)
    before_s = time.process_time()
    text = json.dumps(view.page(), allow_nan=False)
    spent_s = time.process_time() - before_s
    assert len(view.page()["services"]) == 200
    assert len(view.page()["pools"]) == 60
    assert spent_s < 0.1
    assert len(text) < 350_000


def test_what_kept_its_limits_and_what_is_left_of_the_budget_is_told() -> None:
    made = Scene(units=[unit(service("chat"))], offerings=[offering("pool")])
    made.load(CHAT, 1.0, met=0.9)
    made.run(600.0)
    chat = row(viewed(made).page(), "services", "service", CHAT)
    assert (chat["kept"], chat["budget_left"]) == pytest.approx((0.9, -1.0))
    made.load(CHAT, 1.0)
    made.run(3700.0)
    chat = row(viewed(made).page(), "services", "service", CHAT)
    assert (chat["kept"], chat["budget_left"]) == pytest.approx((1.0, 1.0)), "an hour later it is forgotten"


def test_an_order_is_in_the_log_and_named_while_it_stands() -> None:
    made = Scene(units=[unit(service("chat"))], offerings=[offering("pool")])
    made.run(200.0)
    now_s = made.clock.at_s
    order = Ordered(at_s=now_s, who="ann", why="test", verb="freeze", subject=CHAT, until_s=now_s + 300.0)
    made.controller.ledger.record(order)
    view = viewed(made)
    assert view.page()["orders"] == [f"freeze {CHAT} until 01-12 13:55 UTC, by ann: test"]
    assert view.log[-1]["kind"] == "ordered"
    assert len((view.service(CHAT) or {})["instances"]) == 1
    made.run(600.0)
    assert viewed(made).page()["orders"] == []


def test_a_service_says_why_requests_missed_their_limits() -> None:
    made = Scene(units=[unit(service("chat", max_replicas=1))], offerings=[offering("pool")])
    made.load(CHAT, 1.0)
    made.run(600.0)
    made.load(CHAT, 9.0, met=0.3, queued=60.0)
    made.run(300.0)
    causes = (viewed(made).service(CHAT) or {})["causes"]
    assert causes[0]["cause"] == "policy_limit"
    assert sum(each["share"] for each in causes) == pytest.approx(1.0)
    assert "max_replicas" in causes[0]["evidence"]
