"""The overflow endpoint: probed before it is trusted, used while a deadline is nearer than capacity, left by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_apps.gateway.app import make_app
from serve_apps.gateway.core import Gateway
from serve_apps.gateway.engine import EngineFailed
from serve_apps.gateway.overflow import Endpoint
from serve_apps.wire import OverflowRoute, ServiceRoute
from tests.gateway_fakes import FakeEngines, FakeReplica, Rig, plan, routed, until, variant

URL = "http://elsewhere.example/v1"


class Elsewhere:
    """A second gateway of our own, as somebody else's OpenAI-compatible endpoint; and what it was sent."""

    def __init__(self) -> None:
        self.engines = FakeEngines(far=1)
        self.rig = Rig(self.engines, routed("far/model", variant("far", slots=50)))
        self.transport = httpx.ASGITransport(app=self.rig.app)
        self.requests: list[httpx.Request] = []
        self.answers: list[httpx.Response] = []  # given instead of the gateway's own, first come first served

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.answers:
            return self.answers.pop(0)
        return await self.transport.handle_async_request(request)

    @property
    def replica(self) -> FakeReplica:
        return self.engines.all()[0]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]


def given(**more: Any) -> OverflowRoute:
    return OverflowRoute.model_validate({"url": URL, "model": "far/model", "rpm": 60, "usd_per_1m_tokens": 2.0} | more)


class Near(Rig):
    """Own gateway with one slot whose replica holds what it gets, and `Elsewhere` to turn to."""

    def __init__(self, far: Elsewhere, sacrifice: tuple[str, ...], *, route: OverflowRoute | None = None) -> None:
        policy = routed("u/s", variant("a", slots=1, rps=1.0), timeout_s=30.0)
        more = {"sacrifice": sacrifice, "overflow": route or given(), "slack_s": 1.9, "next_capacity_s": 60.0}
        self.policy: ServiceRoute = policy.model_copy(update=more)
        super().__init__(FakeEngines(a=1), self.policy)
        transport = httpx.MockTransport(far)
        self.gateway = Gateway(self.engines, (self.policy,), lambda: self.now_s, transport)
        self.plan(self.policy)
        self.app = make_app(self.gateway)
        self.replica = self.engines.all()[0]
        self.replica.hold_after = 0

    def plan(self, policy: ServiceRoute, seq: int = 1) -> None:
        self.gateway.apply(plan(policy, seq=seq, stale_after_s=1e6))

    async def settled(self) -> None:
        """Everything at the own replica is let go and ends."""
        self.replica.released.set()
        await until(self.nothing_is_left)


FIRST, AFTER = ("overflow", "queue", "shed"), ("queue", "overflow", "shed")


async def test_nothing_is_sent_before_a_probe_was_answered_and_then_the_waiting_go() -> None:
    far = Elsewhere()
    far.replica.hold_after = 0
    near = Near(far, FIRST)
    own, sent = near.stream(), near.stream(tokens=2)
    await until(lambda: far.requests)
    assert far.bodies[0]["messages"][0]["role"] == "user"
    assert (len(far.requests), near.counters().queued) == (1, 1), "the probe alone is there; the request waits"
    far.replica.released.set()
    assert (await sent.done()).text == "w0 w1 "
    assert [body["max_tokens"] for body in far.bodies] == [1, 2]
    await near.settled()
    await own.done()
    row = near.counters()
    assert (row.arrivals, row.completed, row.overflowed, row.output_tokens) == (2, 1, 1, 4)
    assert row.overflow_tokens == (2 + 1) + (3 + 2), "the probe, and the answer"


async def test_it_is_used_while_the_deadline_is_nearer_than_capacity_and_left_by_itself() -> None:
    """One a second is served, limits leave 1.9 s: the second may wait, the third would be late."""
    far = Elsewhere()
    near = Near(far, AFTER)
    callers = [near.stream(tokens=2) for _ in range(2)]
    await until(lambda: near.counters().queued == 1)
    callers.append(near.stream(tokens=2))
    await until(lambda: near.counters().overflowed == 1)
    assert near.counters().queued == 1
    near.plan(near.policy.model_copy(update={"next_capacity_s": 1.5}), seq=2)
    callers.append(near.stream(tokens=2))
    await until(lambda: near.counters().queued == 2)
    assert near.counters().overflowed == 1, "capacity comes in time again"
    await near.settled()
    for caller in callers:
        assert (await caller.done()).text == "w0 w1 "
    assert near.counters().completed == 3


async def test_who_waits_already_goes_when_it_turns_out_too_long() -> None:
    far = Elsewhere()
    near = Near(far, AFTER)
    callers = [near.stream(tokens=2) for _ in range(2)]
    await until(lambda: near.counters().queued == 1)
    near.now_s += 1.5
    near.gateway.refresh()
    await until(lambda: near.counters().overflowed == 1)
    await near.settled()
    assert [(await caller.done()).text for caller in callers] == ["w0 w1 "] * 2


async def test_what_would_be_shed_goes_there_and_its_rate_limit_is_kept() -> None:
    far = Elsewhere()
    near = Near(far, ("overflow", "shed"), route=given(rpm=2))
    near.plan(near.policy.model_copy(update={"max_queued": 0}))
    own = near.stream()
    await until(lambda: near.replica.running)
    probing = await near.stream().done()
    assert probing.status == 429, "not trusted yet"
    await until(lambda: near.gateway.services["u/s"].overflow.trusted)  # type: ignore[union-attr]
    assert [(await near.stream(tokens=1).done()).status for _ in range(4)] == [200, 200, 429, 429]
    near.now_s += 60.0
    near.gateway.refresh()
    await until(lambda: near.gateway.plan_state == "fresh")
    probing = await near.stream().done()
    await until(lambda: near.gateway.services["u/s"].overflow.trusted)  # type: ignore[union-attr]
    assert (await near.stream(tokens=1).done()).status == 200, "another minute"
    await near.settled()
    await own.done()


async def test_without_the_word_in_the_policy_or_the_budget_it_is_not_used() -> None:
    far = Elsewhere()
    near = Near(far, FIRST)
    near.plan(near.policy.model_copy(update={"overflow": None}), seq=2)
    callers = [near.stream(tokens=1) for _ in range(2)]
    await until(lambda: near.counters().queued == 1)
    near.gateway.refresh()
    assert not far.requests
    await near.settled()
    assert [(await caller.done()).status for caller in callers] == [200, 200]


# ---- the endpoint itself --------------------------------------------------------------------------------------------
class Alone:
    """An Endpoint with a clock."""

    def __init__(self, answer: Callable[[httpx.Request], Any], **more: Any) -> None:
        self.now_s = 0.0
        self.tokens = 0
        self.opened = 0
        self.endpoint = Endpoint(
            given(**more),
            spent=self._spent,
            opened=self._open,
            now_s=lambda: self.now_s,
            transport=httpx.MockTransport(answer),
        )

    def _spent(self, tokens: int) -> None:
        self.tokens += tokens

    def _open(self) -> None:
        self.opened += 1

    async def probed(self) -> bool:
        """Let it probe; whether it is trusted then."""
        assert not self.endpoint.take()
        probe = self.endpoint._probe
        assert probe is not None
        await asyncio.wait_for(probe, 5.0)
        return self.endpoint.trusted


def sse(*events: Any) -> httpx.Response:
    return httpx.Response(200, text="".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events))


def delta(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}
GOOD = (delta("yes"), delta("", "stop"), USAGE, "[DONE]")


@pytest.mark.parametrize(
    ("case", "answer"),
    [
        ("refused", lambda _: httpx.Response(401, json={"error": {"message": "no"}})),
        ("broken", lambda _: httpx.Response(500)),
        ("a redirect is not followed", lambda _: httpx.Response(302, headers={"location": "http://other/"})),
        ("not SSE", lambda _: httpx.Response(200, text="<html>")),
        ("not JSON", lambda _: sse("{")),
        ("ends early", lambda _: sse(delta("yes"))),
        ("no reason", lambda _: sse(delta("yes"), "[DONE]")),
        ("fails in the middle", lambda _: sse(delta("yes"), {"error": {"message": "overloaded"}})),
        ("another shape", lambda _: sse({"choices": [7]})),
        ("tokens that are none", lambda _: sse(delta("yes", "stop"), {"usage": {"prompt_tokens": []}}, "[DONE]")),
    ],
)
async def test_an_endpoint_that_answers_wrong_is_left_alone_longer_each_time(
    case: str, answer: Callable[[httpx.Request], httpx.Response]
) -> None:
    alone = Alone(answer)
    for shut_s in (15.0, 30.0, 60.0):
        assert not await alone.probed(), case
        alone.now_s += shut_s - 1.0
        probe = alone.endpoint._probe
        assert not alone.endpoint.take()
        assert alone.endpoint._probe is probe, "it is not even asked"
        alone.now_s += 1.0
    assert alone.opened == 0


async def test_trust_ends_a_minute_after_the_last_good_answer() -> None:
    alone = Alone(lambda _: sse(*GOOD))
    assert await alone.probed()
    assert (alone.opened, alone.tokens) == (1, 9)
    alone.now_s = 59.0
    assert alone.endpoint.take()
    assert [c["text"] async for c in alone.endpoint.generate({"prompt": "a"})] == ["yes", ""]
    alone.now_s = 118.0
    assert alone.endpoint.take()
    alone.now_s = 119.0
    assert not alone.endpoint.take()


async def test_a_limit_of_theirs_is_kept_as_long_as_they_say_and_trust_stays() -> None:
    answers = [sse(*GOOD), httpx.Response(429, headers={"retry-after": "7"}), sse(*GOOD)]
    alone = Alone(lambda _: answers.pop(0))
    assert await alone.probed()
    with pytest.raises(EngineFailed):
        await anext(alone.endpoint.generate({"prompt": "a"}))
    alone.now_s = 6.9
    assert not alone.endpoint.take()
    alone.now_s = 7.0
    assert alone.endpoint.take()


async def test_the_key_is_read_where_the_policy_says_and_goes_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(500)

    secret = tmp_path / "key"
    secret.write_text("sk-file\n")
    monkeypatch.setenv("QM_TEST_KEY", "sk-env")
    with caplog.at_level("DEBUG"):
        for more in ({"key_file": str(secret)}, {"key_env": "QM_TEST_KEY"}, {}):
            assert not await Alone(answer, **more).probed()
        for more in ({"key_file": str(tmp_path / "none")}, {"key_env": "QM_NO_SUCH_KEY"}):
            assert not await Alone(answer, **more).probed(), "without its key it is not asked"
    assert seen == ["Bearer sk-file", "Bearer sk-env", None]
    assert caplog.text
    assert "sk-" not in caplog.text


async def test_what_only_vllm_knows_is_not_sent() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return sse(*GOOD)

    request = {"prompt": "a", "max_tokens": 3, "priority": 2, "request_id": "r", "ignore_eos": True, "temperature": 0.5}
    async for _ in Alone(answer).endpoint.generate(request):
        pass
    assert bodies == [
        {
            "prompt": "a",
            "max_tokens": 3,
            "temperature": 0.5,
            "model": "far/model",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_a_failure_before_the_first_token_returns_to_the_queue_and_after_it_is_an_error() -> None:
    far = Elsewhere()
    near = Near(far, FIRST)
    own = near.stream(tokens=1)
    await until(lambda: near.replica.running)
    waiting = near.stream(tokens=1)
    await until(lambda: near.gateway.services["u/s"].overflow.trusted)  # type: ignore[union-attr]
    await waiting.done()
    far.answers = [httpx.Response(500)]
    back = near.stream(tokens=2)
    await until(lambda: near.counters().queued == 1)
    await near.settled()
    assert (await back.done()).text == "w0 w1 "
    near.now_s += 400.0
    near.replica.hold_after, near.replica.released = 0, asyncio.Event()
    own = near.stream(tokens=1)
    await until(lambda: near.replica.running)
    probing = near.stream(tokens=1)
    await until(lambda: near.gateway.services["u/s"].overflow.trusted)  # type: ignore[union-attr]
    await probing.done()
    far.answers = [sse({"choices": [{"text": "one ", "finish_reason": None}]}, {"error": {"message": "x"}})]
    broken = await near.stream(tokens=2).done()
    assert json.loads(broken.events[-1])["error"]["code"] == "engine_failed"
    assert broken.text == "one "
    await near.settled()
    await own.done()
    assert near.counters().failed == 1
