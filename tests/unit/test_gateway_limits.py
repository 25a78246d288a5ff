"""Bounds: slow callers, silent engines, endless answers, full queues, several gateways over the same replicas."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_apps.gateway import app as gateway_app
from serve_apps.gateway import core, link
from serve_apps.gateway.core import Gateway
from serve_apps.gateway.link import linked
from serve_apps.gateway.service import Service, ShedError, Surroundings
from serve_apps.wire import encode
from tests.gateway_fakes import (
    TEXT,
    Caller,
    FakeBoard,
    FakeEngines,
    Rig,
    one_app,
    plan,
    routed,
    two_apps,
    until,
    variant,
)


@pytest.fixture(autouse=True)
def _no_pause_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(core, "STRANDED_CHECK_S", 0.005)


# ---- time -----------------------------------------------------------------------------------------------------------
async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_app, "BODY_MAX_S", 0.01)
    rig = one_app()

    async def dripping() -> Any:
        yield b'{"model": '
        await asyncio.sleep(5.0)

    answer = await rig.request("POST", TEXT, content=dripping())
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "body_too_slow")


async def test_an_engine_that_falls_silent_is_an_error_and_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "SILENT_MAX_S", 0.02)
    rig = one_app()
    rig.engines.all()[0].hold_after = 2
    caller = await rig.stream().done()
    assert caller.text == "w0 w1 "
    error = json.loads(caller.events[-1])["error"]
    assert (error["code"], error["message"]) == ("engine_failed", "The engine failed: nothing came for 0.02 s")
    assert rig.nothing_is_left()
    assert rig.counters().failed == 1


async def test_an_engine_that_never_begins_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "SILENT_MAX_S", 0.02)
    rig = two_apps()
    rig.engines.apps["a"][0].hold_after = 0
    assert (await rig.stream().done()).text == "w0 w1 w2 w3 "
    assert rig.engines.calls == ["a", "b"]
    assert rig.nothing_is_left()


async def test_waiting_in_the_queue_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "SILENT_MAX_S", 0.02)
    rig = one_app(slots=0, replicas=1)
    caller = rig.stream()
    await until(lambda: rig.counters().queued == 1)
    await asyncio.sleep(0.06)
    rig.gateway.apply(plan(routed("u/s", variant("a")), seq=2))
    assert (await caller.done()).text == "w0 w1 w2 w3 "


async def test_a_caller_who_does_not_read_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server stops taking what is sent once the caller's buffers are full."""
    monkeypatch.setattr(core, "SILENT_MAX_S", 0.02)
    rig = one_app()
    caller = Caller(rig.app, TEXT, {"model": "u/s", "prompt": "a", "stream": True, "max_tokens": 9}, reads=3)
    await caller.done()
    assert len(caller.messages) == 3
    assert rig.nothing_is_left()


async def test_an_answer_that_takes_too_long_as_a_whole_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_app, "CALL_MAX_S", 0.02)
    rig = one_app()
    rig.engines.all()[0].hold_after = 1
    caller = await rig.stream().done()
    assert caller.events[-1] != "[DONE]"
    assert rig.nothing_is_left()


async def test_bodies_held_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "HELD_MAX_BYTES", 150)
    rig = one_app()
    rig.engines.all()[0].hold_after = 0
    first = rig.stream()
    await until(lambda: rig.counters().running == 1)
    refused = await rig.stream().done()
    assert (refused.status, refused.headers["retry-after"]) == (429, "2")
    assert json.loads(refused.body)["error"]["code"] == "gateway_full"
    rig.engines.all()[0].released.set()
    await first.done()
    assert (await rig.stream().done()).status == 200


# ---- the queue ------------------------------------------------------------------------------------------------------
async def test_a_full_queue_turns_its_least_important_away_for_a_more_important_one() -> None:
    rig = one_app(slots=1, max_queued=2)
    replica = rig.engines.all()[0]
    replica.hold_after = 0
    callers = {"running": rig.stream(prompt="running")}
    for name, priority in (("low", 9), ("middle", 0)):
        callers[name] = rig.stream(prompt=name, priority=priority)
        await until(lambda: rig.counters().queued == len(callers) - 1)
    callers["top"] = rig.stream(prompt="top", priority=-9)
    assert (await callers["low"].done()).status == 429
    assert int(callers["low"].headers["retry-after"]) >= 1
    assert (await rig.stream(priority=9).done()).status == 429, "nobody is less important"
    replica.released.set()
    for name in ("running", "top", "middle"):
        assert (await callers[name].done()).status == 200
    assert [request["prompt"] for request in replica.started] == ["running", "top", "middle"]
    row = rig.counters()
    assert (row.arrivals, row.completed, row.shed) == (5, 3, 2)


async def test_each_client_turned_away_is_given_a_turn_of_its_own() -> None:
    now_s = 0.0
    rules = routed("u/s", variant("a", slots=1, rps=0.5), max_queued=0)
    queue = Service(rules, Surroundings(fresh=True), lambda: now_s)
    await queue.acquire(0)
    told = []
    for _ in range(4):
        with pytest.raises(ShedError) as caught:
            await queue.acquire(0)
        told.append(caught.value.shed.retry_after_s)
    assert told == [3.0, 5.0, 7.0, 9.0], "one place in two seconds"
    now_s = 100.0
    with pytest.raises(ShedError) as caught:
        await queue.acquire(0)
    assert caught.value.shed.retry_after_s == 3.0


# ---- several gateways -----------------------------------------------------------------------------------------------
async def test_three_gateways_share_slots_and_queue_and_one_that_dies_leaves_its_part_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten slots and seven places to wait: never one more of either, however unevenly callers come."""
    monkeypatch.setattr(link, "REPORT_PERIOD_S", 0.005)
    monkeypatch.setattr(link, "PLAN_PERIOD_S", 0.005)
    board, engines = FakeBoard(), FakeEngines(a=1)
    board.aged = (0.0, encode(plan(routed("u/s", variant("a", slots=10), max_queued=7))))
    engines.all()[0].hold_after = 0
    gateways = sorted((Gateway(engines) for _ in range(3)), key=lambda one: one.id)  # in order of rank
    stack = [linked(gateway, board) for gateway in gateways]
    for context in stack:
        await context.__aenter__()
    await until(lambda: all(g.gateways == 3 and g.models() for g in gateways))
    apps = [gateway_app.make_app(gateway) for gateway in gateways]
    body = {"model": "u/s", "prompt": "a", "max_tokens": 2, "stream": True}
    callers = [Caller(apps[n % 2], TEXT, body) for n in range(20)]  # the third has no callers
    await until(lambda: sum(s.status == 429 for s in callers) == 20 - 7 - 5)
    rows = [gateway.services["u/s"].counters() for gateway in gateways]
    assert [(row.running, row.queued) for row in rows] == [(4, 3), (3, 2), (0, 0)]
    await stack[2].__aexit__(None, None, None)
    del board.reports[gateways[2].id]
    await until(lambda: sum(g.services["u/s"].counters().running for g in gateways) == 10)
    engines.all()[0].released.set()
    for caller in callers:
        await caller.done()
    for context in stack[:2]:
        await context.__aexit__(None, None, None)


async def test_a_replica_that_drains_gets_no_new_work() -> None:
    """A plan counts it as ready no longer: what it runs ends there, what is new goes elsewhere."""
    rig = Rig(FakeEngines(a=1, b=1), routed("u/s", variant("a", rps=10.0), variant("b")))
    leaving = rig.engines.apps["a"][0]
    leaving.hold_after = 1
    old = rig.stream()
    await until(lambda: old.text == "w0 ")
    rig.gateway.apply(plan(routed("u/s", variant("a", ready=0, rps=10.0), variant("b")), seq=2))
    assert (await rig.stream().done()).status == 200
    assert rig.engines.calls == ["a", "b"]
    leaving.released.set()
    assert (await old.done()).text == "w0 w1 w2 w3 "
    assert rig.nothing_is_left()


async def test_new_routes_take_effect_at_once_and_nothing_in_flight_notices() -> None:
    """A hundred reloads under load: every answer is whole, every request is decided by one set of routes."""
    rig = Rig(FakeEngines(a=1, b=1), routed("u/s", variant("a", slots=50), max_queued=500))
    for seq in range(100):
        app = "ab"[seq % 2]
        callers = [rig.stream(tokens=6) for _ in range(3)]
        rig.gateway.apply(plan(routed("u/s", variant(app, slots=50), max_queued=500), seq=seq + 2))
        await asyncio.sleep(0)
        for caller in callers:
            assert (await caller.done()).events[-1] == "[DONE]"
    assert set(rig.engines.calls) == {"a", "b"}
    assert rig.counters().completed == 300
