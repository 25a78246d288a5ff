"""The gateway against fake engines: HTTP, queue and slots, failover, callers who leave, counters, and the board."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from serve_apps.gateway import core, link
from serve_apps.gateway.app import make_app
from serve_apps.gateway.core import Gateway
from serve_apps.gateway.link import linked
from serve_apps.wire import GatewayReport, ServiceRoute, decode, encode
from tests.gateway_fakes import Caller, FakeBoard, FakeEngines, plan, routed, until, variant

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture(autouse=True)
def _no_pause_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "RETRY_PAUSE_S", 0.0)


class Rig:
    """A gateway with a fresh plan over fake engines, and its clock."""

    def __init__(self, engines: FakeEngines, *services: ServiceRoute) -> None:
        self.now_s = 1000.0
        self.engines = engines
        self.gateway = Gateway(engines, services, now_s=lambda: self.now_s)
        self.gateway.apply(plan(*services))
        self.app: Starlette = make_app(self.gateway)

    def stream(self, model: str = "u/s", *, tokens: int = 4, **more: Any) -> Caller:
        body = {"model": model, "prompt": "one two three", "max_tokens": tokens, "stream": True} | more
        return Caller(self.app, TEXT, body)

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return await self.request("POST", path, content=body if isinstance(body, bytes) else json.dumps(body), **kwargs)

    async def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, **kwargs)

    def counters(self, service: str = "u/s") -> Any:
        return self.gateway.services[service].counters()

    def nothing_is_left(self) -> bool:
        """Every slot is free again and no engine works for nobody."""
        row = self.counters()
        return row.queued == row.running == 0 and not any(replica.running for replica in self.engines.all())


def one_app(*, slots: int = 4, replicas: int = 1, **rules: Any) -> Rig:
    return Rig(FakeEngines(a=replicas), routed("u/s", variant("a", ready=replicas, slots=slots), **rules))


def two_apps(**rules: Any) -> Rig:
    """Application a is always preferred, unless it is full or excluded."""
    return Rig(FakeEngines(a=1, b=1), routed("u/s", variant("a", rps=10.0), variant("b"), **rules))


# ---- answers --------------------------------------------------------------------------------------------------------
async def test_chat_streams_role_text_finish_usage_done() -> None:
    rig = one_app()
    body = {
        "model": "u/s",
        "messages": [{"role": "user", "content": "one two three"}],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    caller = await Caller(rig.app, CHAT, body).done()
    assert (caller.status, caller.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *chunks, done = caller.events
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert {(c["object"], c["model"], c["id"]) for c in parsed} == {("chat.completion.chunk", "u/s", parsed[0]["id"])}
    assert [c["choices"][0]["delta"] if c["choices"] else None for c in parsed] == [
        {"role": "assistant", "content": ""},
        {"content": "w0 "},
        {"content": "w1 "},
        {},
        None,
    ]
    assert [c["choices"][0]["finish_reason"] for c in parsed[:-1]] == [None, None, None, "length"]
    assert [c["usage"] for c in parsed[:-1]] == [None] * 4
    assert parsed[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert rig.nothing_is_left()


async def test_each_chunk_of_the_engine_is_sent_at_once() -> None:
    rig = one_app()
    replica = rig.engines.all()[0]
    replica.hold_after = 2
    caller = rig.stream(tokens=3)
    await until(lambda: caller.text == "w0 w1 ")
    assert not caller.task.done()
    replica.released.set()
    assert (await caller.done()).text == "w0 w1 w2 "
    assert [json.loads(e)["choices"][0]["finish_reason"] for e in caller.events[:-1]] == [None, None, None, "length"]


async def test_chat_without_streaming() -> None:
    rig = one_app()
    answer = await rig.post(CHAT, {"model": "s", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    body = answer.json()
    assert answer.status_code == 200
    assert (body["object"], body["model"]) == ("chat.completion", "s")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "w0 w1 ", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


async def test_completion_without_streaming_defaults_to_16_tokens() -> None:
    rig = one_app()
    body = (await rig.post(TEXT, {"model": "u/s", "prompt": ["a b"]})).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"].split() == [f"w{n}" for n in range(16)]
    assert body["usage"]["completion_tokens"] == 16


async def test_what_the_engine_is_asked() -> None:
    rig = one_app()
    fields = {
        "min_tokens": 1,
        "ignore_eos": True,
        "temperature": 0.5,
        "stop": "x",
        "priority": 3,
        "seed": 7,
        "user": "me",
    }
    answer = await rig.post(TEXT, {"model": "u/s", "prompt": "a", "max_completion_tokens": 5} | fields)
    request = rig.engines.all()[0].started[0]
    assert request.pop("request_id") == answer.json()["id"]
    assert request == {
        "prompt": "a",
        "max_tokens": 5,
        "min_tokens": 1,
        "ignore_eos": True,
        "temperature": 0.5,
        "stop": ["x"],
        "priority": 3,
        "seed": 7,
    }


async def test_models_and_health() -> None:
    rig = Rig(FakeEngines(), routed("u/s"), routed("v/s"), routed("v/t"))
    models = (await rig.request("GET", "/v1/models")).json()
    assert [(m["id"], m["object"], m["owned_by"]) for m in models["data"]] == [
        ("u/s", "model", "u"),
        ("v/s", "model", "v"),
        ("v/t", "model", "v"),
    ]
    health = (await rig.request("GET", "/healthz")).json()
    assert health == {"status": "ok", "plan": "fresh", "plan_age_s": 0.0, "gateways": 1}


# ---- refusals -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nope", "The model 'nope' does not exist. See /v1/models."),
        ("s", "The model 's' does not exist. It could be any of: u/s, v/s."),
    ],
)
async def test_unknown_and_ambiguous_models_are_404(model: str, message: str) -> None:
    rig = Rig(FakeEngines(), routed("u/s"), routed("v/s"))
    answer = await rig.post(TEXT, {"model": model, "prompt": "a"})
    assert answer.status_code == 404
    error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert answer.json() == {"error": error}


async def test_too_large_a_body_is_413_with_and_without_its_length() -> None:
    rig = one_app()
    body = json.dumps({"model": "u/s", "prompt": "x" * 2**22}).encode()

    async def parts() -> Any:
        for start in range(0, len(body), 2**16):
            yield body[start : start + 2**16]

    for content in (body, parts()):
        answer = await rig.request("POST", TEXT, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert rig.counters().arrivals == 0


async def test_what_the_engine_finds_invalid_is_the_callers_mistake() -> None:
    rig = two_apps()
    answer = await rig.post(TEXT, {"model": "u/s", "prompt": "a " * 51})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "51 tokens do not fit into 50"
    assert len(rig.engines.calls) == 1
    row = rig.counters()
    assert (row.arrivals, row.completed, row.failed, row.shed) == (1, 0, 0, 0)
    assert rig.nothing_is_left()


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", TEXT, 405)])
async def test_wrong_paths_and_methods_have_openais_shape(method: str, path: str, status: int) -> None:
    answer = await one_app().request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_defect_of_the_gateway_is_a_500_with_openais_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = one_app()

    async def broken(app: str, request: dict[str, Any]) -> Any:
        defect: dict[str, Any] = {}
        yield defect[app]

    monkeypatch.setattr(rig.engines, "generate", broken)
    transport = httpx.ASGITransport(app=rig.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.post(TEXT, json={"model": "u/s", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert rig.nothing_is_left()


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


async def test_a_full_queue_sheds_with_retry_after() -> None:
    rig = one_app(slots=1, max_queued=1)
    rig.engines.all()[0].hold_after = 0
    waiting = [rig.stream(), rig.stream()]
    await until(lambda: rig.counters().queued == 1)
    refused = await rig.stream().done()
    assert (refused.status, refused.headers["retry-after"]) == (429, "3")
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
    rig.gateway.apply(plan(routed("u/s", variant("a", ready=0), variant("b", ready=0)), seq=2))
    assert rig.counters().running == 1  # nowhere better to go
    rig.gateway.apply(plan(routed("u/s", variant("a", ready=0), variant("b")), seq=3))
    assert (await caller.done()).text == "w0 w1 w2 w3 "
    assert (rig.engines.calls, len(stuck.stopped)) == (["a", "b"], 1)
    assert rig.nothing_is_left()


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
    held = await service.acquire(0)
    waiting = asyncio.ensure_future(service.acquire(0))
    await until(lambda: service.queued == 1)
    if first == "the slot is given":
        service.release(held)
        waiting.cancel()
    else:
        waiting.cancel()
        service.release(held)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (service.queued, service.running) == (0, 0)


async def test_a_slot_is_never_given_back_twice() -> None:
    service = one_app().gateway.services["u/s"]
    slot = await service.acquire(0)
    service.release(slot)
    with pytest.raises(RuntimeError, match="released twice"):
        service.release(slot)


# ---- counters, plan and board ---------------------------------------------------------------------------------------
async def test_latencies_are_measured_from_arrival_and_over_the_tokens_after_the_first() -> None:
    rig = one_app()
    replica = rig.engines.all()[0]
    replica.hold_after = 0
    caller = rig.stream(tokens=3)
    await until(lambda: replica.running)
    rig.now_s += 2.0
    replica.hold_after = 1
    replica.released.set()
    replica.released = asyncio.Event()
    await until(lambda: caller.text == "w0 ")
    rig.now_s += 1.0
    replica.released.set()
    await caller.done()
    row = rig.counters()
    assert (row.ttft_sum_s, row.tpot_sum_s, row.tpot_count) == (2.0, 0.5, 1)


async def test_one_token_has_no_time_per_token() -> None:
    rig = one_app()
    await rig.stream(tokens=1).done()
    assert (rig.counters().completed, rig.counters().tpot_count) == (1, 0)


async def test_metrics_show_the_counters() -> None:
    rig = one_app()
    await rig.stream(tokens=2).done()
    text = (await rig.request("GET", "/metrics")).text
    samples = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples["qm_gateway_arrivals_total"].value == 1
    assert samples["qm_gateway_output_tokens_total"].value == 2
    assert samples["qm_gateway_ttft_seconds_count"].value == 1
    assert samples["qm_gateway_running"].labels == {"service": "u/s", "gateway": rig.gateway.id}


async def test_a_stale_plan_leaves_readiness_to_serve() -> None:
    rig = Rig(FakeEngines(a=1), routed("u/s", variant("a", ready=0, target=1, slots=2)))
    waiting = rig.stream()
    await until(lambda: rig.counters().queued == 1)
    rig.engines.all()[0].hold_after = 0
    rig.now_s += 61.0
    rig.gateway.refresh()
    more = [rig.stream() for _ in range(2)]
    await until(lambda: rig.counters().queued == 1)
    assert rig.counters().running == 2
    assert rig.gateway.plan_state == "stale"
    rig.engines.all()[0].released.set()
    for caller in (waiting, *more):
        assert (await caller.done()).status == 200


async def test_without_any_plan_the_routes_of_the_arguments_serve() -> None:
    engines = FakeEngines(a=1)
    gateway = Gateway(engines, [routed("u/s", variant("a", ready=0, target=0))])
    caller = await Caller(make_app(gateway), TEXT, {"model": "s", "prompt": "a"}).done()
    assert (caller.status, gateway.plan_state) == (200, "none")


async def test_a_service_that_leaves_the_plan_is_unknown_but_keeps_its_counters() -> None:
    rig = one_app()
    await rig.stream().done()
    rig.gateway.apply(plan(routed("v/t"), seq=2))
    assert (await rig.post(TEXT, {"model": "u/s", "prompt": "a"})).status_code == 404
    report = rig.gateway.report(sent_at_s=5.0)
    assert [(row.service, row.arrivals) for row in report.services] == [("u/s", 1), ("v/t", 0)]


async def test_the_board_gets_reports_and_gives_plans() -> None:
    gateway = Gateway(FakeEngines(), [])
    board = FakeBoard()
    board.others_ages_s = [1.0, 30.0]
    async with linked(gateway, board):
        await until(lambda: gateway.id in board.reports)
        assert decode(GatewayReport, board.reports[gateway.id]).seq == 1
        board.aged = (0.0, encode(plan(routed("u/s"))))
        await until(lambda: gateway.models() == ["u/s"])
        assert gateway.plan_state == "fresh"
        assert gateway.gateways == 2  # the one silent for 30 s is gone
        board.aged = (61.0, encode(plan(routed("u/t"), seq=2)))
        await until(lambda: gateway.models() == ["u/t"])
        assert gateway.plan_state == "stale"


async def test_no_board_or_an_unreadable_plan_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PLAN_PERIOD_S", 0.001)
    gateway = Gateway(FakeEngines(), [routed("u/s")])
    board = FakeBoard()
    board.absent = True
    async with linked(gateway, board):
        await until(lambda: board.asked > 2)
        board.aged = (0.0, encode(plan(routed("u/x"), version=2)))
        board.absent = False
        seen = board.asked
        await until(lambda: board.asked > seen + 2)
        assert (gateway.models(), gateway.plan_state) == (["u/s"], "none")
        board.aged = (0.0, encode(plan(routed("u/t"))))
        await until(lambda: gateway.models() == ["u/t"])
