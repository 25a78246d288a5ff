"""One service in one gateway: its queue, its slots and its counters.

Single-threaded: only the gateway's event loop may touch a Service. May not import Ray or know of HTTP; the decisions
themselves are `serve_apps.admission`'s.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

from serve_apps.admission import (
    Admit,
    Queue,
    ServiceState,
    Shed,
    Ticket,
    VariantState,
    admit,
    first,
    rank,
    route,
    states,
)
from serve_apps.wire import ServiceCounters, ServiceRoute


class ShedError(Exception):
    """The request was turned away; `shed` says why and when to come back."""

    def __init__(self, shed: Shed) -> None:
        super().__init__(shed.why)
        self.shed = shed


@dataclass(slots=True)
class Tally:
    """The cumulative half of `wire.ServiceCounters`, mutable.

    arrivals = completed + failed + shed + queued + running + those whose caller left or whose input the engine refused.
    """

    arrivals: int = 0
    completed: int = 0
    failed: int = 0
    shed: int = 0
    cold_start_waits: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    ttft_sum_s: float = 0.0
    tpot_sum_s: float = 0.0
    tpot_count: int = 0


@dataclass(slots=True, eq=False)
class Slot:
    """Leave to have one request in flight on `app`. Given back exactly once."""

    app: str
    held: bool = True


@dataclass(slots=True, eq=False)
class _Waiter:
    ticket: Ticket
    slot: asyncio.Future[Slot]


@dataclass(slots=True)
class Surroundings:
    """What every service of a gateway shares: gateways alive, and whether the plan in force is fresh."""

    gateways: int = 1
    fresh: bool = False


class Service:
    """Queue, slots and counters of one service. `route` may be replaced at any time, followed by `pump`."""

    def __init__(self, policy: ServiceRoute, around: Surroundings, now_s: Callable[[], float]) -> None:
        self.policy = policy
        self.tally = Tally()
        self._around = around
        self._now_s = now_s
        self._queue: list[_Waiter] = []  # sorted by `admission.rank`
        self._running: Counter[str] = Counter()
        self._seq = 0

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

    async def acquire(self, priority: int) -> Slot:
        """A slot, now or after waiting. `priority` orders the service's own requests, lower first. Raises ShedError."""
        now_s = self._now_s()
        self._seq += 1
        ticket = Ticket(priority=self.policy.priority - priority, arrived_at_s=now_s, seq=self._seq)
        around = self._around
        state = ServiceState(now_s=now_s, queued=self.queued, variants=self._states(), gateways=around.gateways)
        verdict = admit(ticket, state, self.policy)
        if isinstance(verdict, Admit):
            return self._take(verdict.app)
        if isinstance(verdict, Shed):
            self.tally.shed += 1
            raise ShedError(verdict)
        self.tally.cold_start_waits += verdict.cold
        return await self._wait(ticket, verdict)

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
            waiter = self._queue.pop(first([w.ticket for w in self._queue], self._now_s(), self.policy.slack_s))
            if not waiter.slot.done():
                waiter.slot.set_result(self._take(app))

    def _states(self) -> tuple[VariantState, ...]:
        return states(self.policy, self._running, gateways=self._around.gateways, fresh=self._around.fresh)

    def _take(self, app: str) -> Slot:
        self._running[app] += 1
        return Slot(app)

    async def _wait(self, ticket: Ticket, verdict: Queue) -> Slot:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(ticket, loop.create_future())
        insort(self._queue, waiter, key=_rank)
        timer = loop.call_later(verdict.until_s - ticket.arrived_at_s, self._expire, waiter)
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            # The caller left. The slot may have been given in the same turn of the loop: then it must go back.
            if waiter.slot.done() and not waiter.slot.cancelled() and waiter.slot.exception() is None:
                self.release(waiter.slot.result())
            raise
        finally:
            timer.cancel()
            if waiter in self._queue:
                self._queue.remove(waiter)

    def _expire(self, waiter: _Waiter) -> None:
        if not waiter.slot.done():
            self._queue.remove(waiter)
            self.tally.shed += 1
            shed = Shed(retry_after_s=self.policy.retry_after_s, why="queue_timeout")
            waiter.slot.set_exception(ShedError(shed))


def _rank(waiter: _Waiter) -> tuple[int, float, int]:
    return rank(waiter.ticket)
