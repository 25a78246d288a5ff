"""The gateway against fake engines: what goes over HTTP, what is counted, and the board."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_apps.gateway import link
from serve_apps.gateway.app import make_app
from serve_apps.gateway.core import Gateway
from serve_apps.gateway.link import linked
from serve_apps.wire import GatewayReport, decode, encode
from tests.gateway_fakes import (
    CHAT,
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
    assert (await rig.request("GET", "/v1/models/u/s")).json() == models["data"][0]
    assert (await rig.request("GET", "/v1/models/t")).json()["id"] == "v/t"
    unknown = await rig.request("GET", "/v1/models/w/x")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
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
    board.others_ages_s = {"other": 1.0, "gone": 30.0}
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
