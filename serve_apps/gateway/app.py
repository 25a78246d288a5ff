"""HTTP in front of a Gateway: OpenAI's endpoints as a Starlette application.

May not import Ray: the tests run it in-process against a fake engine. The two POST endpoints are plain ASGI, because a
chunk should cost one `send` and nothing else, and because a caller who leaves must stop the engine at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any
from uuid import uuid4

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve_apps.wire import ANSWER_MAX_S, CALL_MAX_S, KeyRoute

from .access import tenant_of
from .core import Gateway
from .engine import Chunk
from .metrics import registry
from .openai import MAX_BODY_BYTES, Answer, ApiError, Call, error_frame, parse, usage
from .service import Service

BODY_MAX_S = 60.0  # in which a caller has to send its body
SERVICE_HEADER = "x-qm-service"
TASK_HEADER = "x-task-id"

_JSON = [(b"content-type", b"application/json")]
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def make_app(gateway: Gateway, lifespan: Lifespan | None = None) -> Starlette:
    """The application. `lifespan` runs what must live beside it (the board's tasks)."""
    started_s = int(time.time())
    metrics = registry(gateway)

    def card(key: str) -> dict[str, object]:
        return {"id": key, "object": "model", "created": started_s, "owned_by": key.partition("/")[0]}

    async def models(request: Request) -> Response:
        caller = gateway.access.caller(request.headers.get("authorization"))
        mine = [key for key in gateway.models() if gateway.access.may_call(key, caller)]
        return JSONResponse({"object": "list", "data": [card(key) for key in mine]})

    async def model(request: Request) -> Response:
        try:
            key = gateway.find(request.path_params["id"]).policy.service
            gateway.access.check(key, gateway.access.caller(request.headers.get("authorization")))
            return JSONResponse(card(key))
        except ApiError as error:
            return Response(error.json(), error.status, media_type="application/json")

    async def healthz(_: Request) -> Response:
        state = {"plan": gateway.plan_state, "plan_age_s": round(gateway.plan_age_s(), 3), "gateways": gateway.gateways}
        return JSONResponse({"status": "ok"} | state)

    async def metrics_text(_: Request) -> Response:
        return PlainTextResponse(generate_latest(metrics), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            *(
                Route(f"{prefix}/v1/{path}", _Completions(gateway, chat=chat), methods=["POST"])
                for prefix in ("", "/{unit}/{service}")
                for path, chat in (("chat/completions", True), ("completions", False))
            ),
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", model),
            Route("/healthz", healthz),
            Route("/metrics", metrics_text),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
        lifespan=lifespan,
    )


class _Completions:
    """POST /v1/chat/completions or /v1/completions, with or without ``/unit/service`` before it."""

    def __init__(self, gateway: Gateway, *, chat: bool) -> None:
        self._gateway = gateway
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        try:
            headers = Headers(scope=scope)
            caller = self._gateway.access.caller(headers.get("authorization"))
            body = await _read_body(scope, receive)
            if body is None:
                return
            self._gateway.hold(len(body))
            size = len(body)
            call, service = self._call(scope, headers, caller, body)
            del body
            answer_id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid4().hex}"
            task = headers.get(TASK_HEADER, "")
            chunks = self._gateway.run(call, answer_id, service, tenant_of(caller), task)
            serve = self._stream if call.stream else self._whole
            limit_s = min(service.policy.queue_timeout_s + ANSWER_MAX_S, CALL_MAX_S)
            await _while_connected(receive, serve(chunks, Answer(call, answer_id, int(time.time())), send), limit_s)
        except ApiError as error:
            await _send_error(send, error)
        finally:
            self._gateway.let_go(size)

    def _call(self, scope: Scope, headers: Headers, caller: KeyRoute | None, body: bytes) -> tuple[Call, Service]:
        """The call and whom it is for: by path, else by header, else by model, else by key. Raises ApiError."""
        gateway, place = self._gateway, scope.get("path_params") or {}
        named = f"{place['unit']}/{place['service']}" if place else headers.get(SERVICE_HEADER)
        given = None if caller is None else caller.service
        call = parse(body, chat=self._chat, service=named or given)
        if named is None and given is not None and not gateway.knows(call.model):
            named = given
        service = gateway.find(named or call.model)
        gateway.access.check(service.policy.service, caller)
        return call, service

    async def _stream(self, run: AsyncGenerator[Chunk, None], answer: Answer, send: Send) -> None:
        started = False
        try:
            async with aclosing(run) as chunks:
                async for chunk in chunks:
                    frames = answer.text(chunk["text"]) if chunk["text"] or not chunk["finish_reason"] else b""
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": _SSE})
                        frames = answer.first() + frames
                        started = True
                    if chunk["finish_reason"]:
                        frames += answer.last(
                            chunk["finish_reason"], usage(chunk["input_tokens"], chunk["output_tokens"])
                        )
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ApiError as error:
            if started:
                await send({"type": "http.response.body", "body": error_frame(error), "more_body": False})
            else:
                await _send_error(send, error)

    async def _whole(self, run: AsyncGenerator[Chunk, None], answer: Answer, send: Send) -> None:
        texts: list[str] = []
        last: dict[str, Any] = {}
        try:
            async with aclosing(run) as chunks:
                async for last in chunks:
                    texts.append(last["text"])
        except ApiError as error:
            await _send_error(send, error)
            return
        tokens = usage(last["input_tokens"], last["output_tokens"])
        await _send(send, 200, answer.body("".join(texts), last["finish_reason"], tokens), _JSON)


async def _read_body(scope: Scope, receive: Receive) -> bytes | None:
    """The body, at most MAX_BODY_BYTES of it (ApiError 413) within BODY_MAX_S (408); None when the caller left."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > MAX_BODY_BYTES:
            raise _too_large()
    try:
        async with asyncio.timeout(BODY_MAX_S):
            return await _read_parts(receive)
    except TimeoutError:
        raise ApiError(408, f"The body did not come within {BODY_MAX_S:g} s.", code="body_too_slow") from None


async def _read_parts(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large() -> ApiError:
    return ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.", code="body_too_large")


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None], limit_s: float) -> None:
    """Run `work`; stop it when the caller disconnects, Serve cancels the request, or `limit_s` have passed."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, left}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        task.cancel()
        await asyncio.gather(task, left, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_error(send: Send, error: ApiError) -> None:
    headers = list(_JSON)
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    await _send(send, error.status, error.json(), headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    wrong = ApiError(error.status_code, f"{error.detail}.", code="not_found" if error.status_code == 404 else None)
    return Response(wrong.json(), error.status_code, headers=error.headers, media_type="application/json")


async def _internal_error(_: Request, error: Exception) -> Response:
    wrong = ApiError(500, f"The gateway failed: {type(error).__name__}.", kind="server_error", code="internal_error")
    return Response(wrong.json(), 500, media_type="application/json")
