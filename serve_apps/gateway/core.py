"""The gateway without HTTP and without Ray: who serves a call, what happens when that fails, and what is measured.

May not import Ray or Starlette. Runs on one event loop; the engines are behind `Backend`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from serve_apps.wire import GatewayReport, PlanMessage, ServiceRoute

from .openai import ApiError, Call, rejected
from .service import Service, ShedError, Slot, Surroundings, Tally

RETRIES = 3  # after the first attempt, and only before the first token
STRANDED_CHECK_S = 0.5
RETRY_PAUSE_S = 0.1  # times the attempt: a router needs a moment to learn that its replica is gone

Chunk = dict[str, Any]  # {"text": delta, "output_tokens": so far, "input_tokens": n, "finish_reason": str | None}


class EngineFailed(Exception):
    """The engine, its replica or the way to it failed; another replica may do better."""


class EngineRefused(Exception):
    """The engine found the request itself invalid (longer than its context, say)."""


class Backend(Protocol):
    """The engines. An answer that is closed early must stop the engine's work on it."""

    def generate(self, app: str, request: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer from some replica of `app`. Raises EngineFailed, EngineRefused."""
        ...


class Gateway:
    """All services of one gateway. `routes` are in force until the first plan arrives."""

    def __init__(
        self, backend: Backend, routes: Iterable[ServiceRoute], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.id = uuid4().hex
        self.services: dict[str, Service] = {}  # every service ever routed: its counters must never go back
        self.plan: PlanMessage | None = None
        self._backend = backend
        self._now_s = now_s
        self._around = Surroundings()
        self._received_at_s = 0.0
        self._routed: frozenset[str] = frozenset()
        self._report_seq = 0
        self._route(tuple(routes))

    # ---- plan and board ---------------------------------------------------------------------------------------------
    def apply(self, plan: PlanMessage, age_s: float = 0.0) -> None:
        """Take a plan that the board received `age_s` ago. Its services replace those known so far."""
        self.plan = plan
        self._received_at_s = self._now_s() - age_s
        self._route(plan.services)

    def refresh(self, gateways: int | None = None) -> None:
        """Notice that the plan has gone stale, or that the number of gateways changed, and let in who may now start."""
        self._around.gateways = max(1, gateways or self._around.gateways)
        self._around.fresh = self.plan is not None and self.plan_age_s() <= self.plan.stale_after_s
        for service in self.services.values():
            service.pump()

    def plan_age_s(self) -> float:
        """Seconds since the last new plan was received (since start without one)."""
        return self._now_s() - self._received_at_s

    @property
    def gateways(self) -> int:
        """Gateways that share the slots, this one included."""
        return self._around.gateways

    @property
    def plan_state(self) -> str:
        """``none``, ``fresh`` or ``stale``."""
        return "none" if self.plan is None else "fresh" if self._around.fresh else "stale"

    def report(self, sent_at_s: float) -> GatewayReport:
        """The next report for the board."""
        self._report_seq += 1
        counters = tuple(service.counters() for service in self.services.values())
        return GatewayReport(gateway_id=self.id, seq=self._report_seq, sent_at_s=sent_at_s, services=counters)

    def _route(self, routes: tuple[ServiceRoute, ...]) -> None:
        for policy in routes:
            known = self.services.get(policy.service)
            if known is None:
                self.services[policy.service] = Service(policy, self._around, self._now_s)
            else:
                known.policy = policy
        self._routed = frozenset(policy.service for policy in routes)
        self.refresh()

    # ---- calls ------------------------------------------------------------------------------------------------------
    def models(self) -> list[str]:
        """The services that may be asked for, sorted."""
        return sorted(self._routed)

    def find(self, model: str) -> Service:
        """The service named ``unit/service``, or by its bare name when that is unique. Raises ApiError (404)."""
        if model in self._routed:
            return self.services[model]
        matches = sorted(key for key in self._routed if key.partition("/")[2] == model)
        if len(matches) == 1:
            return self.services[matches[0]]
        hint = f"It could be any of: {', '.join(matches)}." if matches else "See /v1/models."
        raise ApiError(404, f"The model '{model}' does not exist. {hint}", param="model", code="model_not_found")

    async def run(self, call: Call, request_id: str) -> AsyncGenerator[Chunk, None]:
        """Count, queue, dispatch and measure one call. Raises ApiError, before the first chunk or (rarely) after it."""
        service = self.find(call.model)
        service.tally.arrivals += 1
        arrived_at_s = self._now_s()
        try:
            slot = await service.acquire(call.priority)
        except ShedError as error:
            raise _shed(service.policy.service, error) from None
        try:
            request = call.engine | {"request_id": request_id}
            async with aclosing(self._attempts(service, slot, request)) as chunks:
                measure = _Measure(service.tally, arrived_at_s)
                async for chunk in chunks:
                    measure.see(chunk, self._now_s())
                    yield chunk
        except EngineRefused as error:
            raise rejected(str(error)) from None
        except EngineFailed as error:
            service.tally.failed += 1
            raise ApiError(503, f"The engine failed: {error}", kind="server_error", code="engine_failed") from None
        finally:
            service.release(slot)

    async def _attempts(self, service: Service, slot: Slot, request: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Chunks of the first attempt that yields any. Before the first chunk a failure moves on; after it, never."""
        tried: set[str] = set()
        for attempt in range(1, RETRIES + 2):
            started = finished = False
            try:
                async with aclosing(self._backend.generate(slot.app, request)) as chunks:
                    chunk = await _first(chunks, service, slot)
                    while chunk is not None:
                        started, finished = True, bool(chunk["finish_reason"])
                        yield chunk
                        chunk = await anext(chunks, None)
                if not finished:
                    raise EngineFailed("the answer ended before it was finished")
            except EngineFailed:
                if not finished and (started or attempt > RETRIES):
                    raise
            if finished:
                return
            tried.add(slot.app)
            service.move(slot, tried)
            await asyncio.sleep(RETRY_PAUSE_S * attempt)


async def _first(chunks: AsyncGenerator[Chunk, None], service: Service, slot: Slot) -> Chunk | None:
    """The first chunk, None when there is none. Serve keeps a request whose application has just lost its last replica
    until the next one, which may be far away: when another application could serve it, that raises EngineFailed."""
    first: asyncio.Future[Chunk | None] = asyncio.ensure_future(anext(chunks, None))
    try:
        while not first.done():
            await asyncio.wait({first}, timeout=STRANDED_CHECK_S)
            if not first.done() and service.stranded(slot):
                raise EngineFailed(f"{slot.app} has no replica left")
    finally:
        first.cancel()
        if not first.done():
            await asyncio.wait({first})
    return first.result()


@dataclass(slots=True)
class _Measure:
    """Adds one answer to the counters: tokens as they come, latencies when it is whole."""

    tally: Tally
    arrived_at_s: float
    first_at_s: float | None = None
    tokens: int = 0

    def see(self, chunk: Chunk, now_s: float) -> None:
        if self.first_at_s is None:
            self.first_at_s = now_s
            self.tally.input_tokens += chunk["input_tokens"]
        self.tally.output_tokens += chunk["output_tokens"] - self.tokens
        self.tokens = chunk["output_tokens"]
        if chunk["finish_reason"]:
            self._complete(now_s, self.first_at_s)

    def _complete(self, now_s: float, first_at_s: float) -> None:
        self.tally.completed += 1
        self.tally.ttft_sum_s += first_at_s - self.arrived_at_s
        if self.tokens >= 2:
            self.tally.tpot_sum_s += (now_s - first_at_s) / (self.tokens - 1)
            self.tally.tpot_count += 1


def _shed(service: str, error: ShedError) -> ApiError:
    why = {
        "queue_full": "too many requests are waiting already",
        "queue_timeout": "no replica became free in time",
        "no_free_slot": "every replica is busy and this service does not queue",
    }[error.shed.why]
    return ApiError(
        429,
        f"The service '{service}' is at its limit: {why}. Try again in {error.shed.retry_after_s:g} s.",
        kind="rate_limit_error",
        code=error.shed.why,
        retry_after_s=error.shed.retry_after_s,
    )
