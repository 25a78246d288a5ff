"""The load generator: how a trace is laid along the profile, and what its clients make of a gateway's answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chaos.demand import Rates, generated
from chaos.live.load import Load, Send, Sizing, as_requests, expected_requests, prompt, schedule
from chaos.report import Outcome
from policies.model import Goal, PolicySet, Service, Unit, Variant

SIZING = Sizing(peak_rps=4.0, input_divisor=10, output_divisor=8, input_tokens=(4, 300), output_tokens=(4, 48))
GOALS: tuple[tuple[str, Goal], ...] = (("a", "latency"), ("b", "throughput"), ("c", "cost"))


def _policy() -> PolicySet:
    variants = (Variant(id="v", instance_type="g6.2xlarge"),)
    return PolicySet(
        units=tuple(
            Unit(unit=unit, owner="o", services=(Service(name="s", model="m", goal=goal, variants=variants),))
            for unit, goal in GOALS
        )
    )


def test_the_schedule_follows_the_profile_and_the_shares() -> None:
    sends = schedule(generated(1, 3600.0), _policy(), SIZING, 600.0, seed=1)
    at_s = np.array([send.at_s for send in sends])
    assert (np.diff(at_s) >= 0).all()
    assert at_s[0] == 0.0
    assert at_s[-1] < 600.0
    assert len(sends) == round(expected_requests(SIZING, 600.0))
    assert np.sum((at_s > 290) & (at_s < 400)) == pytest.approx(110 * 4.0, rel=0.15)
    assert np.sum(at_s > 435) == pytest.approx(165 * 0.4, rel=0.4)
    names = [send.service for send in sends]
    assert names.count("a/s") / len(names) == pytest.approx(0.7, abs=0.06)
    assert names.count("c/s") / len(names) == pytest.approx(0.1, abs=0.04)
    assert all(4 <= send.output_tokens <= 48 and 4 <= send.input_tokens <= 300 for send in sends)


def test_the_schedule_is_a_function_of_trace_and_seed() -> None:
    trace = generated(1, 600.0)
    assert schedule(trace, _policy(), SIZING, 60.0, 1) == schedule(trace, _policy(), SIZING, 60.0, 1)
    assert schedule(trace, _policy(), SIZING, 60.0, 1) != schedule(trace, _policy(), SIZING, 60.0, 2)


def test_a_short_trace_is_repeated() -> None:
    trace = generated(1, 5.0)
    sends = schedule(trace, _policy(), SIZING, 600.0, 1)
    assert len(sends) == round(expected_requests(SIZING, 600.0)) > 10 * len(trace)


def test_rate_rows_become_enough_requests_and_not_all_of_a_large_trace() -> None:
    ones = np.ones(4)
    huge = Rates("r", "r", np.array([0.0, 600.0, 1200.0, 1800.0]), ones * 600.0, ones * 5000.0, ones, ones)
    assert len(as_requests(huge, 1, 1000.0)) == pytest.approx(2000, rel=0.1)


def test_prompts_grow_with_their_tokens() -> None:
    assert len(prompt(100)) == 400
    assert len(prompt(4)) == 16


# ---- clients against a server that answers like the gateway ---------------------------------------------------------
def _frames(words: int) -> list[str]:
    texts = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    texts += [{"choices": [{"index": 0, "delta": {"content": "x"}}]} for _ in range(words)]
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": words}}
    return [f"data: {json.dumps(frame)}\n\n" for frame in (*texts, usage)] + ["data: [DONE]\n\n"]


class _Gateway:
    """Answers by the model's name: ok, 429 a number of times, an error in mid-stream, a 503, or half an answer."""

    def __init__(self) -> None:
        self.refusals = {"busy/s": 1, "full/s": 1_000}

    async def answer(self, request: Request) -> Response:
        model = (await request.json())["model"]
        if self.refusals.get(model, 0) > 0:
            self.refusals[model] -= 1
            return JSONResponse(
                {"error": {"message": "busy"}}, 429, {"retry-after": "0.01" if model == "busy/s" else "99"}
            )
        if model == "down/s":
            return JSONResponse({"error": {"message": "no engine"}}, 503)
        frames = _frames(5)
        if model == "broken/s":
            frames = [*frames[:3], 'data: {"error": {"message": "replica died"}}\n\n']
        if model == "half/s":
            frames = frames[:3]

        async def stream() -> AsyncIterator[str]:
            for frame in frames:
                yield frame

        return StreamingResponse(stream(), media_type="text/event-stream")


async def _run(models: list[str]) -> dict[str, Outcome]:
    app = Starlette(routes=[Route("/v1/chat/completions", _Gateway().answer, methods=["POST"])])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        load = Load(
            f"http://127.0.0.1:{listener.getsockname()[1]}",
            [Send(0.01 * number, model, "latency", 10, 5) for number, model in enumerate(models)],
        )
        await load.run()
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    assert (load.sent, load.in_flight) == (len(models), 0)
    return {seen.service: seen for seen in load.outcomes}


def test_clients_measure_retry_give_up_and_tell_failures_apart() -> None:
    seen = asyncio.run(_run(["ok/s", "busy/s", "full/s", "down/s", "broken/s", "half/s"]))
    assert {name: outcome.state for name, outcome in seen.items()} == {
        "ok/s": "ok", "busy/s": "ok", "full/s": "shed", "down/s": "failed", "broken/s": "failed", "half/s": "failed",
    }  # fmt: skip
    good = seen["ok/s"]
    assert (good.input_tokens, good.output_tokens) == (7, 5)
    assert good.ttft_s is not None
    assert good.tpot_s is not None
    assert 0 < good.ttft_s <= good.e2e_s
    assert good.e2e_s == pytest.approx(good.ttft_s + 4 * good.tpot_s)
    assert seen["busy/s"].e2e_s >= 0.01
    assert "replica died" in seen["broken/s"].error
    assert "HTTP 503" in seen["down/s"].error
    assert "before [DONE]" in seen["half/s"].error


def test_a_gateway_that_is_not_there_is_a_failure_not_a_crash() -> None:
    async def run() -> list[Outcome]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            load = Load(f"http://127.0.0.1:{probe.getsockname()[1]}", [Send(0.0, "a/s", "latency", 4, 4)])
            await load.run()
            return load.outcomes

    (seen,) = asyncio.run(run())
    assert seen.state == "failed"
    assert "ConnectError" in seen.error
