"""The gateway without HTTP and without Ray: who serves a call, what happens when that fails, and what is measured.

May not import Ray or Starlette. Runs on one event loop; the engines are behind `engine.Backend`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx

from serve_apps.wire import GatewayReport, OverflowRoute, PlanMessage, Routes, ServiceRoute

from .access import ANONYMOUS, Access
from .engine import Backend, Chunk, EngineFailed, EngineRefused
from .openai import ApiError, Call, rejected, session
from .overflow import Endpoint
from .service import Service, ShedError, Slot, Surroundings, Tally, TenantTokens
from .silence import SILENT_MAX_S, Silence

RETRIES = 3  # after the first attempt, and only before the first token
STRANDED_CHECK_S = 0.5
RETRY_PAUSE_S = 0.1  # times the attempt: a router needs a moment to learn that its replica is gone
HELD_MAX_BYTES = 512 * 2**20  # bodies of all requests that wait or run; more are turned away
HELD_RETRY_S = 2.0

_log = logging.getLogger("ray.serve")


class Gateway:
    """All services of one gateway. `routes` are in force until the first plan arrives. `transport` is how overflow
    endpoints are reached (None: over the network).
    """

    def __init__(
        self,
        backend: Backend,
        routes: Iterable[ServiceRoute] = (),
        now_s: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.id = uuid4().hex
        self.access = Access()
        self.services: dict[str, Service] = {}  # every service ever routed: its counters must never go back
        self.plan: PlanMessage | None = None
        self._backend = backend
        self._now_s = now_s
        self._around = Surroundings()
        self._received_at_s = 0.0
        self._routed: frozenset[str] = frozenset()
        self._report_seq = 0
        self._transport = transport
        self._held_bytes = 0
        self._closing: set[asyncio.Task[None]] = set()
        self.begin(Routes(services=tuple(routes)))

    # ---- plan and board ---------------------------------------------------------------------------------------------
    def begin(self, routes: Routes) -> None:
        """The routes until a plan arrives. Once one has, they change nothing."""
        if self.plan is None:
            self._route(routes)

    def apply(self, plan: PlanMessage, age_s: float = 0.0) -> None:
        """Take a plan that the board received `age_s` ago. Its services and keys replace those known so far."""
        self.plan = plan
        self._received_at_s = self._now_s() - age_s
        self._route(Routes(services=plan.services, keys=plan.keys))

    def refresh(self, gateways: int | None = None, rank: int = 0) -> None:
        """Notice that the plan has gone stale, or that the gateways changed (this one is the `rank`-th of them), and
        let in who may now start.
        """
        around = self._around
        if gateways is not None:
            around.gateways, around.rank = max(1, gateways), rank
        around.plan_age_s = self.plan_age_s()
        around.fresh = self.plan is not None and around.plan_age_s <= self.plan.stale_after_s
        for service in self.services.values():
            service.pump()
            service.spill()

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

    def _route(self, routes: Routes) -> None:
        """All at once: no call is ever decided by a part of the old routes and a part of the new ones."""
        for policy in routes.services:
            known = self.services.get(policy.service)
            if known is None:
                known = self.services[policy.service] = Service(policy, self._around, self._now_s)
            known.policy = policy
            self._open(known, policy.overflow)
        self._routed = frozenset(policy.service for policy in routes.services)
        self.access = Access(routes.keys)
        self.refresh()

    def _open(self, service: Service, wanted: OverflowRoute | None) -> None:
        """The service's overflow endpoint. One that stays the same keeps its trust; without one nothing goes there."""
        old = service.overflow
        if wanted is None or (isinstance(old, Endpoint) and old.route == wanted):
            return
        tally = service.tally

        def spent(tokens: int) -> None:
            tally.overflow_tokens += tokens

        try:
            new = Endpoint(wanted, spent=spent, opened=service.spill, now_s=self._now_s, transport=self._transport)
        except httpx.InvalidURL:
            _log.warning("%s: the overflow endpoint's url cannot be read", service.policy.service)
            return
        service.overflow = new

    # ---- calls ------------------------------------------------------------------------------------------------------
    def models(self) -> list[str]:
        """The services that may be asked for, sorted."""
        return sorted(self._routed)

    def knows(self, model: str) -> bool:
        """Whether `find` would find it."""
        return model in self._routed or sum(key.partition("/")[2] == model for key in self._routed) == 1

    def find(self, model: str) -> Service:
        """The service named ``unit/service``, or by its bare name when that is unique. Raises ApiError (404)."""
        if model in self._routed:
            return self.services[model]
        matches = sorted(key for key in self._routed if key.partition("/")[2] == model)
        if len(matches) == 1:
            return self.services[matches[0]]
        hint = f"It could be any of: {', '.join(matches)}." if matches else "See /v1/models."
        raise ApiError(404, f"The model '{model}' does not exist. {hint}", param="model", code="model_not_found")

    def hold(self, size: int) -> None:
        """Count a body that is kept until `let_go`. Raises ApiError (429) when all together are too large."""
        if self._held_bytes + size > HELD_MAX_BYTES:
            text = f"The gateway holds as much as it may. Try again in {HELD_RETRY_S:g} s."
            raise ApiError(429, text, kind="rate_limit_error", code="gateway_full", retry_after_s=HELD_RETRY_S)
        self._held_bytes += size

    def let_go(self, size: int) -> None:
        """The body's request has ended."""
        self._held_bytes -= size

    async def run(
        self, call: Call, request_id: str, service: Service | None = None, tenant: str = ANONYMOUS, task: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """Count, queue, dispatch and measure one call. Raises ApiError, before the first chunk or (rarely) after it.

        Calls of one `task` carry the same id.
        """
        service = service or self.find(call.model)
        service.arrive(task)
        request = call.engine | {"request_id": request_id}
        journey = _Journey(service, self._backend, request, call.priority, self._now_s())
        measure = _Measure(service, service.tokens_of(tenant), journey.arrived_at_s)
        silence = Silence(SILENT_MAX_S)
        try:
            while not measure.finished:
                chunks = await journey.open()
                try:
                    chunk = await journey.first(chunks, silence)
                    silence.listen()
                    while chunk is not None:
                        if not measure.started and journey.slot is not None:
                            cached = chunk.get("cached_tokens", 0)
                            service.prefilled(journey.slot.app, chunk["input_tokens"], cached)
                        measure.see(chunk, self._now_s(), own=journey.slot is not None)
                        yield chunk
                        chunk = await silence.bound(chunks)
                    if not measure.finished:
                        raise EngineFailed("the answer ended before it was finished")
                except EngineFailed:
                    if not measure.finished and (measure.started or journey.attempt > RETRIES):
                        raise
                finally:
                    await chunks.aclose()
        except ShedError as error:
            raise _shed(service.policy.service, error) from None
        except EngineRefused as error:
            raise rejected(str(error)) from None
        except EngineFailed as error:
            service.tally.failed += 1
            raise ApiError(503, f"The engine failed: {error}", kind="server_error", code="engine_failed") from None
        finally:
            silence.close()
            journey.close()


@dataclass(slots=True)
class _Journey:
    """One call on its way: the slot it holds, where it has been. Before the first chunk a failure moves it on; after
    that, never. What comes back from the overflow endpoint takes its old place in the queue and stays there.
    """

    service: Service
    backend: Backend
    request: dict[str, Any]
    priority: int
    arrived_at_s: float
    slot: Slot | None = None
    attempt: int = 0
    may_spill: bool = True
    tried: set[str] = field(default_factory=set)

    async def open(self) -> AsyncGenerator[Chunk, None]:
        """The chunks of the next attempt. Raises ShedError."""
        if self.slot is not None:
            self.tried.add(self.slot.app)
            self.service.move(self.slot, self.tried)
            await asyncio.sleep(RETRY_PAUSE_S * self.attempt)
        else:
            self.slot = await self.service.acquire(self.priority, self.arrived_at_s, may_spill=self.may_spill)
        self.attempt += self.slot is not None
        if self.slot is not None:
            alike = {"session": session(self.request)} if self.service.affine(self.slot.app) else {}
            return self.backend.generate(self.slot.app, self.request | alike)
        self.may_spill = False
        assert isinstance(self.service.overflow, Endpoint)
        return self.service.overflow.generate(self.request)

    async def first(self, chunks: AsyncGenerator[Chunk, None], silence: Silence) -> Chunk | None:
        """The first chunk, None when there is none. Serve keeps a request whose application has just lost its last
        replica until the next one, which may be far away: when another application could serve it, that raises
        EngineFailed.
        """
        if self.slot is None:
            return await silence.bound(chunks)
        clock_s = asyncio.get_running_loop().time
        until_s = clock_s() + SILENT_MAX_S
        first: asyncio.Future[Chunk | None] = asyncio.ensure_future(anext(chunks, None))
        try:
            while not first.done():
                await asyncio.wait({first}, timeout=STRANDED_CHECK_S)
                if not first.done() and (clock_s() > until_s or self.service.stranded(self.slot)):
                    raise EngineFailed(f"{self.slot.app} has no replica left, or none that answers")
        finally:
            first.cancel()
            if not first.done():
                await asyncio.wait({first})
        return first.result()

    def close(self) -> None:
        """Give the slot back."""
        if self.slot is not None:
            self.service.release(self.slot)


@dataclass(slots=True)
class _Measure:
    """Adds one answer to the counters: tokens as they come, latencies when it is whole. What the overflow endpoint
    answers is the tenant's, but says nothing about own replicas.
    """

    service: Service
    tenant: TenantTokens
    arrived_at_s: float
    first_at_s: float = 0.0
    input: int = 0
    output: int = 0
    started: bool = False
    finished: bool = False

    @property
    def tally(self) -> Tally:
        return self.service.tally

    def see(self, chunk: Chunk, now_s: float, *, own: bool) -> None:
        if not self.started:
            self.started, self.first_at_s = True, now_s
        more_in = max(0, chunk["input_tokens"] - self.input)
        more_out = max(0, chunk["output_tokens"] - self.output)
        self.input += more_in
        self.output += more_out
        self.tenant.input += more_in
        self.tenant.output += more_out
        if own:
            self.tally.input_tokens += more_in
            self.tally.output_tokens += more_out
        if chunk["finish_reason"]:
            self.finished = True
            self._complete(now_s, own=own)

    def _complete(self, now_s: float, *, own: bool) -> None:
        self.tally.met += self._met(now_s)
        if not own:
            self.tally.overflowed += 1
            return
        self.tally.completed += 1
        self.tally.ttft_sum_s += self.first_at_s - self.arrived_at_s
        if self.output >= 2:
            self.tally.tpot_sum_s += (now_s - self.first_at_s) / (self.output - 1)
            self.tally.tpot_count += 1

    def _met(self, now_s: float) -> bool:
        """Whether the answer kept every limit. What a client waits between its retries is not seen here."""
        limits = self.service.policy
        took = [(limits.ttft_s, self.first_at_s - self.arrived_at_s), (limits.e2e_s, now_s - self.arrived_at_s)]
        if self.output >= 2:
            took.append((limits.tpot_s, (now_s - self.first_at_s) / (self.output - 1)))
        return all(limit is None or seconds <= limit for limit, seconds in took)


def _shed(service: str, error: ShedError) -> ApiError:
    why = {
        "queue_full": "too many requests are waiting already",
        "queue_timeout": "no replica became free in time",
        "no_free_slot": "every replica is busy and this service does not queue",
        "wait_too_long": "those who wait already will take longer than a request may",
    }[error.shed.why]
    return ApiError(
        429,
        f"The service '{service}' is at its limit: {why}. Try again in {error.shed.retry_after_s:g} s.",
        kind="rate_limit_error",
        code=error.shed.why,
        retry_after_s=error.shed.retry_after_s,
    )
