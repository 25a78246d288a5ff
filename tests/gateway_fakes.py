"""Engines, a board and a caller for tests of the gateway, with the semantics of the real ones: a replica that dies
takes its answers with it, an answer that is closed early stops its work, a caller reads frame by frame and may leave.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette

from serve_apps.gateway.app import make_app
from serve_apps.gateway.core import Gateway
from serve_apps.gateway.engine import EngineFailed, EngineRefused
from serve_apps.wire import PlanMessage, ServiceRoute, VariantRoute

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CONTEXT_WORDS = 50


async def until(what: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait, with bounded polling, until `what()` is true."""
    async with asyncio.timeout(within_s):
        while not what():
            await asyncio.sleep(0.001)


@dataclass
class FakeReplica:
    """One engine. It holds answers after `hold_after` tokens until released, dies or falls silent after so many."""

    name: str
    alive: bool = True
    dies_after: int | None = None
    silent_after: int | None = None
    hold_after: int | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    running: set[str] = field(default_factory=set)
    stopped: list[str] = field(default_factory=list)
    started: list[dict[str, Any]] = field(default_factory=list)

    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        key = request["request_id"]
        prompt = request.get("prompt") or " ".join(m["content"] for m in request["messages"])
        words, total = len(prompt.split()), request.get("max_tokens", 4)
        self.started.append(request)
        if words > CONTEXT_WORDS:
            raise EngineRefused(f"{words} tokens do not fit into {CONTEXT_WORDS}")
        self.running.add(key)
        try:
            for n in range(total + 1):
                if self.dies_after is not None and n >= self.dies_after:
                    self.alive = False
                if n == self.silent_after:
                    return
                if n == self.hold_after:
                    await self.released.wait()
                if not self.alive:
                    raise EngineFailed(f"{self.name} died")
                if n < total:
                    done = "length" if n + 1 == total else None
                    yield {"text": f"w{n} ", "output_tokens": n + 1, "input_tokens": words, "finish_reason": done}
                await asyncio.sleep(0)
            self.running.discard(key)
        finally:
            if key in self.running:
                self.running.discard(key)
                self.stopped.append(key)


class FakeEngines:
    """Applications of replicas. A request goes to the live replica of its application that has the fewest."""

    def __init__(self, **replicas: int) -> None:
        self.apps = {app: [FakeReplica(f"{app}#{i}") for i in range(count)] for app, count in replicas.items()}
        self.calls: list[str] = []

    def all(self) -> list[FakeReplica]:
        return [replica for replicas in self.apps.values() for replica in replicas]

    async def generate(self, app: str, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self.calls.append(app)
        alive = [replica for replica in self.apps.get(app, []) if replica.alive]
        if not alive:
            raise EngineFailed(f"{app} has no replica")
        answer = min(alive, key=lambda one: len(one.running)).generate(request)
        try:
            async for chunk in answer:
                yield chunk
        finally:
            await answer.aclose()


class FakeBoard:
    """The board's messages, with ages that a test sets. While `absent` every call fails."""

    def __init__(self) -> None:
        self.absent = False
        self.asked = 0
        self.aged: tuple[float, bytes] | None = None
        self.reports: dict[str, bytes] = {}
        self.others_ages_s: dict[str, float] = {}

    async def aged_plan(self) -> tuple[float, bytes] | None:
        self.asked += 1
        self._maybe_fail()
        return self.aged

    async def report(self, gateway_id: str, raw: bytes) -> None:
        self._maybe_fail()
        self.reports[gateway_id] = raw

    async def report_ages_s(self) -> dict[str, float]:
        self._maybe_fail()
        return dict.fromkeys(self.reports, 0.0) | self.others_ages_s

    def _maybe_fail(self) -> None:
        if self.absent:
            raise ValueError("no actor of that name")


class Caller:
    """An HTTP client at the ASGI level: reads an answer while it comes, and may `leave` at any time."""

    def __init__(self, app: Starlette, path: str, body: dict[str, Any], reads: int | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reads = reads  # messages it takes before it stops reading
        self._left = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(dict(message))
        if len(self.messages) == self._reads:
            await asyncio.Event().wait()

    async def done(self) -> Caller:
        """Wait for the end of the answer."""
        async with asyncio.timeout(5.0):
            await self.task
        return self

    async def leave(self) -> None:
        """Disconnect, and wait until the application has noticed."""
        self._left.set()
        await self.done()

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def events(self) -> list[str]:
        """The data of the SSE events so far."""
        return [frame.removeprefix("data: ") for frame in self.body.decode().split("\n\n") if frame]

    @property
    def text(self) -> str:
        """The text of the SSE events so far."""
        chunks = [json.loads(event) for event in self.events if event != "[DONE]"]
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def variant(app: str, *, ready: int = 1, target: int | None = None, slots: int = 4, rps: float = 1.0) -> VariantRoute:
    return VariantRoute(
        app=app,
        target_replicas=ready if target is None else target,
        ready_replicas=ready,
        max_concurrency_per_replica=slots,
        capacity_rps_per_replica=rps,
    )


def routed(service: str, *variants: VariantRoute, max_queued: int = 10, timeout_s: float = 30.0) -> ServiceRoute:
    return ServiceRoute(
        service=service,
        priority=10,
        variants=variants,
        max_queued=max_queued,
        queue_timeout_s=timeout_s,
        retry_after_s=2.5,
    )


def plan(*services: ServiceRoute, seq: int = 1, stale_after_s: float = 60.0, version: int = 1) -> PlanMessage:
    return PlanMessage(
        version=version,
        run_id="r",
        seq=seq,
        published_at_s=0.0,
        stale_after_s=stale_after_s,
        targets={},
        local_rules={},
        services=services,
    )


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
