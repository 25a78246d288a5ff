"""One service in one gateway: its queue, its slots and its counters.

Single-threaded: only the gateway's event loop may touch a Service. May not import Ray or know of HTTP; the decisions
themselves are `serve_apps.admission`'s.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from serve_apps.admission import (
    Admit,
    Queue,
    ServiceState,
    Shed,
    Ticket,
    VariantState,
    admit,
    capacity_rps,
    first,
    rank,
    retry_after_s,
    route,
    states,
    turn_s,
)
from serve_apps.wire import ServiceCounters, ServiceRoute

MAX_TENANTS = 200
MAX_TASKS = 10_000  # whose ids are remembered
TASK_CHARS = 128
SPILL_LOOKS = 256
AFFINE_FROM = 0.02  # of the prompts' tokens: a mere shared opening is found by every replica anyway
MEMORY = 0.99  # of one request by the next, in what is known of prefix caches
OTHERS = "others"


class ShedError(Exception):
    """The request was turned away; `shed` says why and when to come back."""

    def __init__(self, shed: Shed) -> None:
        super().__init__(shed.why)
        self.shed = shed


@dataclass(slots=True)
class Tally:
    """The cumulative half of `wire.ServiceCounters`, mutable.

    arrivals = completed + overflowed + failed + shed + queued + running + those whose caller left, or whose input the
    engine refused.
    """

    arrivals: int = 0
    tasks: int = 0
    completed: int = 0
    failed: int = 0
    shed: int = 0
    cold_start_waits: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    ttft_sum_s: float = 0.0
    tpot_sum_s: float = 0.0
    tpot_count: int = 0
    overflowed: int = 0
    overflow_tokens: int = 0
    met: int = 0


@dataclass(slots=True)
class TenantTokens:
    """What one tenant has used, overflow included."""

    input: int = 0
    output: int = 0


@dataclass(slots=True, eq=False)
class Slot:
    """Leave to have one request in flight on `app`. Given back exactly once."""

    app: str
    held: bool = True


@dataclass(slots=True, eq=False)
class _Waiter:
    ticket: Ticket
    slot: asyncio.Future[Slot | None]
    may_spill: bool


@dataclass(slots=True)
class Surroundings:
    """What every service of a gateway shares: gateways alive and which of them this one is, the plan's age, and whether
    it is fresh.
    """

    gateways: int = 1
    rank: int = 0
    plan_age_s: float = 0.0
    fresh: bool = False


class Overflow(Protocol):
    """The door of an overflow endpoint."""

    def take(self, gateways: int, rank: int) -> bool:
        """Whether one more request may go there now; it is counted then."""
        ...


class Service:
    """Queue, slots and counters of one service. `route` may be replaced at any time, followed by `pump`."""

    def __init__(self, policy: ServiceRoute, around: Surroundings, now_s: Callable[[], float]) -> None:
        self.policy = policy
        self.tally = Tally()
        self.overflow: Overflow | None = None
        self.tenants: dict[str, TenantTokens] = {}
        self._around = around
        self._now_s = now_s
        self._queue: list[_Waiter] = []  # sorted by `admission.rank`
        self._running: Counter[str] = Counter()
        self._seq = 0
        self._prompts: dict[str, tuple[float, float]] = {}  # application → tokens of late, and those found in its cache
        self._tasks: dict[str, None] = {}  # ids of tasks, the one called last at the end
        self._turn_at_s = 0.0  # when the last client turned away was told to come back

    @property
    def queued(self) -> int:
        """Requests waiting for a slot."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Slots held."""
        return self._running.total()

    def counters(self) -> ServiceCounters:
        """The counters as the board gets them."""
        return ServiceCounters(
            service=self.policy.service, queued=self.queued, running=self.running, **asdict(self.tally)
        )

    def arrive(self, task: str) -> None:
        """Count one more request, and the task that it begins: any without an id, and the first with an id."""
        self.tally.arrivals += 1
        task = task[:TASK_CHARS]
        self.tally.tasks += not task or task not in self._tasks
        if task:
            self._tasks.pop(task, None)
            self._tasks[task] = None
            if len(self._tasks) > MAX_TASKS:
                del self._tasks[next(iter(self._tasks))]

    def prefilled(self, app: str, tokens: int, cached: int) -> None:
        """An engine of `app` read a prompt, and found so much of it in its prefix cache."""
        before, hits = self._prompts.get(app, (0.0, 0.0))
        self._prompts[app] = (MEMORY * before + tokens, MEMORY * hits + cached)

    def affine(self, app: str) -> bool:
        """Whether engines of `app` find enough in their caches for like requests to be sent to the same one."""
        tokens, hits = self._prompts.get(app, (0.0, 0.0))
        return hits > AFFINE_FROM * tokens

    def tokens_of(self, tenant: str) -> TenantTokens:
        """The tenant's token counts. Past MAX_TENANTS of them, the rest are counted together."""
        name = tenant if tenant in self.tenants or len(self.tenants) < MAX_TENANTS else OTHERS
        return self.tenants.setdefault(name, TenantTokens())

    async def acquire(self, priority: int, arrived_at_s: float | None = None, *, may_spill: bool = True) -> Slot | None:
        """A slot, now or after waiting; None when the overflow endpoint takes the request. Raises ShedError.

        `priority` orders the service's own requests, lower first. A request that comes back from the overflow endpoint
        brings the instant of its first arrival, and may not go there again.
        """
        now_s = self._now_s()
        self._seq += 1
        arrived_at_s = now_s if arrived_at_s is None else arrived_at_s
        ticket = Ticket(priority=self.policy.priority - priority, arrived_at_s=arrived_at_s, seq=self._seq)
        verdict = admit(ticket, self._state(ticket), self.policy)
        if isinstance(verdict, Admit):
            return self._take(verdict.app)
        if isinstance(verdict, Shed):
            if may_spill and self._spill():
                return None
            raise self._turned_away(verdict)
        if verdict.spills and may_spill and self._spill():
            return None
        if verdict.displaces:
            self._displace()
        self.tally.cold_start_waits += verdict.cold
        return await self._wait(ticket, verdict, may_spill)

    def release(self, slot: Slot) -> None:
        """Give a slot back, which lets the next request in."""
        if not slot.held:
            raise RuntimeError(f"a slot of {slot.app} was released twice")
        slot.held = False
        self._running[slot.app] -= 1
        self.pump()

    def move(self, slot: Slot, exclude: Collection[str]) -> None:
        """Point a held slot at another application with a free slot, if there is one outside `exclude`."""
        app = route(self._states(), exclude)
        if app is not None:
            self._running[slot.app] -= 1
            self._running[app] += 1
            slot.app = app
            self.pump()

    def stranded(self, slot: Slot) -> bool:
        """Whether a slot's application has no replica left while another application has a free slot."""
        rows = self._states()
        return not any(v.app == slot.app and v.replicas for v in rows) and route(rows, (slot.app,)) is not None

    def pump(self) -> None:
        """Hand free slots to those who wait, in order."""
        while self._queue and (app := route(self._states())) is not None:
            slack_s = self.policy.slack_s
            index = 0 if slack_s is None else first([w.ticket for w in self._queue], self._now_s(), slack_s)
            waiter = self._queue.pop(index)
            if not waiter.slot.done():
                waiter.slot.set_result(self._take(app))

    def spill(self) -> None:
        """Send those to the overflow endpoint whose turn, as it looks now, comes too late. In the queue's order, and
        not past its front: who joins a long queue is looked at when it comes.
        """
        if self.overflow is None or self.policy.overflow is None:
            return
        for index, waiter in enumerate(self._queue[:SPILL_LOOKS]):
            verdict = admit(waiter.ticket, self._state(waiter.ticket, ahead=index), self.policy)
            late = isinstance(verdict, Shed) or (isinstance(verdict, Queue) and verdict.spills)
            if late and waiter.may_spill and not waiter.slot.done():
                if not self._spill():
                    return
                self._queue.remove(waiter)
                waiter.slot.set_result(None)

    def _state(self, ticket: Ticket, ahead: int | None = None) -> ServiceState:
        around, queue = self._around, self._queue
        return ServiceState(
            now_s=self._now_s(),
            queued=len(queue),
            variants=self._states(),
            gateways=around.gateways,
            rank=around.rank,
            least=queue[-1].ticket.priority if queue else None,
            ahead=bisect_right(queue, rank(ticket), key=_rank) if ahead is None else ahead,
            plan_age_s=around.plan_age_s,
        )

    def _states(self) -> tuple[VariantState, ...]:
        around = self._around
        return states(self.policy, self._running, gateways=around.gateways, rank=around.rank, fresh=around.fresh)

    def _spill(self) -> bool:
        """Whether the overflow endpoint takes one more."""
        around = self._around
        return (
            self.overflow is not None
            and self.policy.overflow is not None
            and self.overflow.take(around.gateways, around.rank)
        )

    def _displace(self) -> None:
        """Turn away the last of the queue, for one who is more important."""
        last = self._queue.pop()
        if not last.slot.done():
            shed = Shed(retry_after_s=retry_after_s(self._state(last.ticket), self.policy), why="queue_full")
            last.slot.set_exception(self._turned_away(shed))

    def _turned_away(self, shed: Shed) -> ShedError:
        """Count it, and give the client its own turn to come back."""
        self.tally.shed += 1
        now_s, rps = self._now_s(), capacity_rps(self._states(), self._around.gateways)
        self._turn_at_s = turn_s(self._turn_at_s, now_s, shed.retry_after_s, rps)
        return ShedError(replace(shed, retry_after_s=self._turn_at_s - now_s))

    def _take(self, app: str) -> Slot:
        self._running[app] += 1
        return Slot(app)

    async def _wait(self, ticket: Ticket, verdict: Queue, may_spill: bool) -> Slot | None:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(ticket, loop.create_future(), may_spill)
        insort(self._queue, waiter, key=_rank)
        timer = loop.call_later(verdict.until_s - self._now_s(), self._expire, waiter)
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            # The caller left. The slot may have been given in the same turn of the loop: then it must go back.
            if waiter.slot.done() and not waiter.slot.cancelled() and waiter.slot.exception() is None:
                slot = waiter.slot.result()
                if slot is not None:
                    self.release(slot)
            raise
        finally:
            timer.cancel()
            if waiter in self._queue:
                self._queue.remove(waiter)

    def _expire(self, waiter: _Waiter) -> None:
        if waiter.slot.done():
            return
        self._queue.remove(waiter)
        if waiter.may_spill and self._spill():
            waiter.slot.set_result(None)
            return
        shed = Shed(retry_after_s=retry_after_s(self._state(waiter.ticket), self.policy), why="queue_timeout")
        waiter.slot.set_exception(self._turned_away(shed))


def _rank(waiter: _Waiter) -> tuple[int, float, int]:
    return rank(waiter.ticket)
