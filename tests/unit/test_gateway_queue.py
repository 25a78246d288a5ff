"""The gateway against fake engines: queue and slots, replicas that die, callers who leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from serve_apps.gateway import core
from serve_apps.gateway.service import Service, Slot, Surroundings
from tests.gateway_fakes import CHAT, TEXT, Caller, FakeEngines, Rig, one_app, plan, routed, two_apps, until, variant


@pytest.fixture(autouse=True)
def _no_pause_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "RETRY_PAUSE_S", 0.0)


async def held(service: Service) -> Slot:
    """A slot of the service's own replicas."""
    slot = await service.acquire(0)
    assert slot is not None
    return slot


# ---- queue and slots ------------------------------------------------------------------------------------------------
async def test_no_more_requests_run_than_there_are_slots_and_the_rest_wait() -> None:
    rig = one_app(slots=2)
    replica = rig.engines.all()[0]
    replica.hold_after = 1
    callers = [rig.stream() for _ in range(5)]
    await until(lambda: rig.counters().queued == 3)
    assert (rig.counters().running, len(replica.running)) == (2, 2)
    replica.released.set()
    for caller in callers:
        assert (await caller.done()).text == "w0 w1 w2 w3 "
    row = rig.counters()
    assert (row.arrivals, row.completed, row.cold_start_waits) == (5, 5, 0)
    assert rig.nothing_is_left()


async def test_the_queue_is_served_by_priority_then_arrival() -> None:
    rig = one_app(slots=1)
    replica = rig.engines.all()[0]
    replica.hold_after = 0
    callers = [rig.stream(prompt="first")]
    await until(lambda: rig.counters().running == 1)
    for name, priority in (("late", 5), ("a", 0), ("b", 0), ("urgent", -5)):
        callers.append(rig.stream(prompt=name, priority=priority))
        await until(lambda: rig.counters().queued == len(callers) - 1)
    replica.released.set()
    for caller in callers:
        await caller.done()
    assert [request["prompt"] for request in replica.started] == ["first", "urgent", "a", "b", "late"]


async def test_a_free_slot_goes_to_the_first_who_can_still_meet_the_limits() -> None:
    now_s = [0.0]
    row = variant("a", ready=1, slots=1)
    rules = routed(CHAT, row).model_copy(update={"slack_s": 2.0, "queue_timeout_s": 60.0, "max_queued": 9})
    queue = Service(rules, Surroundings(fresh=True), lambda: now_s[0])
    slot = await held(queue)
    started: list[str] = []

    async def call(name: str) -> None:
        slot = await held(queue)
        started.append(name)
        queue.release(slot)

    callers = []
    for name, at_s in (("late", 0.0), ("later", 1.0), ("in time", 3.0), ("too", 4.0)):
        now_s[0] = at_s
        callers.append(asyncio.create_task(call(name)))
        await until(lambda: queue.queued == len(callers))
    queue.release(slot)
    await asyncio.gather(*callers)
    assert started == ["in time", "too", "late", "later"]


async def test_a_full_queue_sheds_with_retry_after() -> None:
    rig = one_app(slots=1, max_queued=1)
    rig.engines.all()[0].hold_after = 0
    waiting = [rig.stream(), rig.stream()]
    await until(lambda: rig.counters().queued == 1)
    refused = await rig.stream().done()
    assert (refused.status, refused.headers["retry-after"]) == (429, "2")
    error = json.loads(refused.body)["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert (rig.counters().arrivals, rig.counters().shed) == (3, 1)
    rig.engines.all()[0].released.set()
    assert [(await caller.done()).status for caller in waiting] == [200, 200]


async def test_waiting_too_long_sheds() -> None:
    rig = one_app(slots=1, timeout_s=0.05)
    rig.engines.all()[0].hold_after = 0
    running = rig.stream()
    await until(lambda: rig.counters().running == 1)
    refused = await rig.stream().done()
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (429, "queue_timeout")
    assert (rig.counters().shed, rig.counters().queued) == (1, 0)
    rig.engines.all()[0].released.set()
    assert (await running.done()).status == 200


async def test_a_cold_start_waits_for_the_plan_that_says_ready() -> None:
    rig = Rig(FakeEngines(a=1), routed("u/s", variant("a", ready=0, target=1)))
    caller = rig.stream()
    await until(lambda: rig.counters().queued == 1)
    assert rig.counters().cold_start_waits == 1
    assert not rig.engines.calls
    rig.gateway.apply(plan(routed("u/s", variant("a", ready=1))))
    assert (await caller.done()).status == 200


async def test_requests_spread_over_variants_by_capacity() -> None:
    rig = Rig(FakeEngines(a=1, b=1), routed("u/s", variant("a", rps=1.0), variant("b", rps=3.0)))
    for replica in rig.engines.all():
        replica.hold_after = 0
    callers = [rig.stream() for _ in range(5)]
    await until(lambda: len(rig.engines.calls) == 5)
    assert sorted(rig.engines.calls) == ["a", "b", "b", "b", "b"]
    for replica in rig.engines.all():
        replica.released.set()
    for caller in callers:
        await caller.done()


async def test_several_gateways_share_the_slots() -> None:
    rig = one_app(slots=4)
    rig.engines.all()[0].hold_after = 0
    rig.gateway.refresh(gateways=2)
    callers = [rig.stream() for _ in range(4)]
    await until(lambda: rig.counters().queued == 2)
    assert rig.counters().running == 2
    rig.gateway.refresh(gateways=1)
    await until(lambda: rig.counters().running == 4)
    rig.engines.all()[0].released.set()
    for caller in callers:
        await caller.done()


# ---- failures -------------------------------------------------------------------------------------------------------
async def test_a_death_before_the_first_token_moves_to_another_variant() -> None:
    rig = two_apps()
    rig.engines.apps["a"][0].dies_after = 0
    caller = await rig.stream().done()
    assert (caller.status, caller.text) == (200, "w0 w1 w2 w3 ")
    assert rig.engines.calls == ["a", "b"]
    row = rig.counters()
    assert (row.completed, row.failed, row.input_tokens, row.output_tokens) == (1, 0, 3, 4)
    assert rig.nothing_is_left()


async def test_a_death_with_one_variant_moves_to_its_next_replica() -> None:
    rig = one_app(replicas=3)
    rig.engines.apps["a"][0].dies_after = 0
    rig.engines.apps["a"][1].dies_after = 0
    assert (await rig.stream().done()).text == "w0 w1 w2 w3 "
    assert rig.engines.calls == ["a", "a", "a"]


async def test_a_request_whose_application_lost_its_replicas_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "STRANDED_CHECK_S", 0.001)
    rig = two_apps()
    stuck = rig.engines.apps["a"][0]
    stuck.hold_after = 0
    caller = rig.stream()
    await until(lambda: stuck.running)
    rig.gateway.apply(plan(routed("u/s", variant("a", ready=0), variant("b")), seq=3))
    assert (await caller.done()).text == "w0 w1 w2 w3 "
    assert (rig.engines.calls, len(stuck.stopped)) == (["a", "b"], 1)
    assert rig.nothing_is_left()


async def test_a_request_stays_where_it_is_while_there_is_nowhere_better() -> None:
    rig = two_apps()
    service = rig.gateway.services["u/s"]
    slot = await held(service)
    assert not service.stranded(slot)
    rig.gateway.apply(plan(routed("u/s", variant("a", ready=0), variant("b", ready=0))))
    assert not service.stranded(slot)
    rig.gateway.apply(plan(routed("u/s", variant("a", ready=0), variant("b"))))
    assert service.stranded(slot)


async def test_three_retries_and_then_503() -> None:
    rig = two_apps()
    for replica in rig.engines.all():
        replica.alive = False
    answer = await rig.post(CHAT, {"model": "u/s", "messages": [{"role": "user", "content": "a"}]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert len(rig.engines.calls) == 4
    assert rig.counters().failed == 1
    assert rig.nothing_is_left()


async def test_a_death_after_the_first_token_is_an_error_event_and_never_a_retry() -> None:
    rig = two_apps()
    rig.engines.apps["a"][0].dies_after = 2
    caller = await rig.stream().done()
    assert (caller.status, rig.engines.calls) == (200, ["a"])
    assert caller.text == "w0 w1 "
    assert json.loads(caller.events[-1])["error"]["code"] == "engine_failed"
    row = rig.counters()
    assert (row.completed, row.failed, row.output_tokens) == (0, 1, 2)
    assert rig.nothing_is_left()


async def test_a_death_after_the_last_token_is_no_failure() -> None:
    rig = one_app()
    rig.engines.all()[0].dies_after = 4
    caller = await rig.stream().done()
    assert caller.events[-1] == "[DONE]"
    assert (rig.counters().completed, rig.counters().failed) == (1, 0)


async def test_an_answer_that_ends_without_a_reason_is_broken() -> None:
    rig = one_app()
    rig.engines.all()[0].silent_after = 2
    caller = await rig.stream().done()
    assert (caller.text, json.loads(caller.events[-1])["error"]["code"]) == ("w0 w1 ", "engine_failed")
    assert (rig.counters().failed, len(rig.engines.calls)) == (1, 1)


# ---- callers who leave ----------------------------------------------------------------------------------------------
async def test_leaving_in_mid_answer_stops_the_engine_and_frees_the_slot() -> None:
    rig = one_app(slots=1)
    replica = rig.engines.all()[0]
    replica.hold_after = 2
    caller = rig.stream()
    await until(lambda: caller.text == "w0 w1 ")
    await caller.leave()
    assert len(replica.stopped) == 1
    row = rig.counters()
    assert (row.arrivals, row.completed, row.failed) == (1, 0, 0)
    assert rig.nothing_is_left()


async def test_leaving_a_call_without_streaming_stops_the_engine_too() -> None:
    rig = one_app()
    rig.engines.all()[0].hold_after = 1
    caller = Caller(rig.app, TEXT, {"model": "u/s", "prompt": "a"})
    await until(lambda: rig.counters().running == 1)
    await caller.leave()
    assert len(rig.engines.all()[0].stopped) == 1
    assert not caller.messages
    assert rig.nothing_is_left()


async def test_leaving_the_queue_takes_no_slot() -> None:
    rig = one_app(slots=1)
    replica = rig.engines.all()[0]
    replica.hold_after = 0
    first, second, third = rig.stream(), rig.stream(prompt="second"), rig.stream(prompt="third")
    await until(lambda: rig.counters().queued == 2)
    await second.leave()
    assert rig.counters().queued == 1
    replica.released.set()
    await first.done()
    await third.done()
    assert [request["prompt"] for request in replica.started] == ["one two three", "third"]
    assert rig.nothing_is_left()


@pytest.mark.parametrize("first", ["the slot is given", "the caller leaves"])
async def test_leaving_in_the_moment_of_getting_a_slot_gives_it_back(first: str) -> None:
    service = one_app(slots=1).gateway.services["u/s"]
    slot = await held(service)
    waiting = asyncio.ensure_future(held(service))
    await until(lambda: service.queued == 1)
    if first == "the slot is given":
        service.release(slot)
        waiting.cancel()
    else:
        waiting.cancel()
        service.release(slot)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (service.queued, service.running) == (0, 0)


async def test_a_slot_is_never_given_back_twice() -> None:
    service = one_app().gateway.services["u/s"]
    slot = await held(service)
    service.release(slot)
    with pytest.raises(RuntimeError, match="released twice"):
        service.release(slot)


async def test_requests_that_begin_alike_get_a_session_once_engines_report_hits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And none any more after a while without hits."""
    rig = one_app()
    cached = 0

    async def generate(app: str, request: dict[str, object]) -> AsyncGenerator[dict[str, object], None]:
        asked.append(request.get("session"))
        yield {"text": "a", "output_tokens": 1, "input_tokens": 100, "finish_reason": "stop", "cached_tokens": cached}

    asked: list[object] = []
    monkeypatch.setattr(rig.engines, "generate", generate)
    system = {"role": "system", "content": "be brief"}

    async def ask(first: str, *more: str) -> object:
        turns = [{"role": "user", "content": first}, *({"role": "assistant", "content": text} for text in more)]
        assert (await rig.post(CHAT, {"model": "u/s", "messages": [system, *turns]})).status_code == 200
        return asked[-1]

    assert await ask("hello") is None
    cached = 50
    await ask("hello")
    one, other = await ask("hello"), await ask("good morning")
    assert None not in (one, other)
    assert one != other
    assert await ask("hello", "hi", "and then?") == one, "a conversation that goes on is still the same"
    cached = 0
    for _ in range(400):
        await ask("hello")
    assert asked[-1] is None
