"""The request-level serving engine: all services of one simulation, from their arrivals to what became of each request.

May not read a clock or draw random numbers: the caller says until when to run, streams say what arrives. Everything
per request is compiled; this module only moves arrays in and numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import inf, isfinite, nan

import numpy as np
import numpy.typing as npt

from serve_apps.timing import Timing

from . import histogram, loop
from . import state as layout
from .spec import ReplicaWindow, RequestBatch, ServiceSpec, Totals, Window

SUMS = 11  # columns of loop.observe
CHUNK = 1 << 16  # requests handed over at once: bounds the pool when `advance` is called with long spans
_TIMING = tuple(field.name for field in fields(Timing))


def _check_replica(timing: Timing, slowdown: float, slots: int) -> None:
    """A step without duration would never let time pass, and the compiled code checks nothing."""
    numbers = [getattr(timing, name) for name in _TIMING]
    if slots < 1 or not 0.0 < slowdown < inf:
        raise ValueError(f"a replica needs slots >= 1 and a finite slowdown > 0, not {slots} and {slowdown}")
    if min(timing.a_s, timing.prefill_tps) <= 0.0 or min(numbers) < 0.0 or not all(map(isfinite, numbers)):
        raise ValueError(f"a replica's steps and prefill must take time, none negative or infinite: {timing}")
    if min(timing.max_num_seqs, timing.kv_capacity_tokens, timing.max_model_len) < 1:
        raise ValueError(f"a replica needs room for a sequence of at least one token: {timing}")


def _mean(
    total: npt.NDArray[np.float64], over: npt.NDArray[np.float64], made: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """`total` ÷ `over`; nan where nothing was `made`."""
    return np.divide(total, over, out=np.full(len(total), nan), where=made > 0.0)


class Engine:
    """Services and their replicas from `start_s` on. `service` and `variant` arguments are numbers from 0.

    Number a service's variants in order of name: ties in routing go to the lower number.
    """

    def __init__(self, services: Sequence[ServiceSpec], start_s: float = 0.0) -> None:
        self.now_s = start_s
        self._specs = tuple(services)
        self._memory = layout.Memory(len(services), histogram.BINS)
        self._unused: list[int] = []  # numbers of removed replicas
        self._replicas = 0
        self._seen: dict[int, npt.NDArray[np.float64]] = {}  # of each replica its sums at the last window
        self._sums: npt.NDArray[np.float64] | None = None  # as of now, once asked for
        self._windows = [(0,) * 8] * len(services)
        self._tasks = [0] * len(services)
        self._fill_services()

    def _fill_services(self) -> None:
        tasks = [spec.arrivals.tasks for spec in self._specs]
        base = 0
        for entry, spec, table in zip(self._memory["services"], self._specs, tasks, strict=True):
            entry["ttft_s"], entry["tpot_s"] = spec.ttft_s, spec.tpot_s
            entry["e2e_s"] = min(spec.e2e_s, spec.deadline_s)
            entry["timeout_s"], entry["max_queued"] = spec.queue_timeout_s, spec.max_queued
            entry["can_queue"], entry["overflow_rpm"] = spec.can_queue, spec.overflow_rpm
            entry["overflow_first"] = spec.overflow_first
            entry["overflow_usd_per_token"] = spec.overflow_usd_per_1m_tokens / 1e6
            entry["can_shed"] = spec.can_shed
            entry["slack_s"], entry["next_at_s"] = inf, nan
            entry["queue_head"] = entry["queue_tail"] = entry["late_tail"] = layout.NONE
            entry["task_base"] = base
            base += len(table.calls)
            if len(table.calls) and table.calls.min() < 1:
                raise ValueError(f"{spec.service}: a task has at least one call, this one has {table.calls.min()}")
        if tasks:
            self._memory.need(t=base)
            self._memory["task_calls"][:base] = np.concatenate([table.calls for table in tasks])
            self._memory["task_think_s"][:base] = np.concatenate([table.think_s for table in tasks])
            self._memory["task_grow"][:base] = np.concatenate([table.grow_tokens for table in tasks])

    # ---- replicas ---------------------------------------------------------------------------------------------------
    def add_replica(self, service: int, variant: int, timing: Timing, *, slowdown: float = 1.0, slots: int) -> int:
        """A replica that serves from now on; its number, which may be one that a removed replica had.

        `slots`: requests the gateway sends it at once. `slowdown` multiplies the duration of each step.
        """
        _check_replica(timing, slowdown, slots)
        replica = self._unused.pop() if self._unused else self._replicas
        self._replicas = max(self._replicas, replica + 1)
        self._memory.need(r=self._replicas, b=timing.max_num_seqs)
        self._ensure_variant(service, variant)
        self._memory["replicas"][replica] = np.zeros((), layout.REPLICA)
        record = self._memory["replicas"][replica]
        for name in _TIMING:
            record[name] = getattr(timing, name)
        record["service"], record["variant"] = service, variant
        record["slowdown"], record["slots"] = slowdown, slots
        loop.add(self._memory.root, replica, self.now_s)
        self._seen[replica] = np.zeros(SUMS)
        self._sums = None
        return replica

    def _ensure_variant(self, service: int, variant: int) -> None:
        self._memory.need(v=variant + 1)
        entry = self._memory["services"][service]
        entry["variants"] = max(int(entry["variants"]), variant + 1)

    def drain(self, replica: int) -> None:
        """Send `replica` nothing more; it ends what it has."""
        loop.drain(self._memory.root, self._known(replica))

    def remove(self, replica: int) -> None:
        """`replica` is gone now: its requests without a token go back to the head of the queue, the others fail."""
        loop.remove(self._memory.root, self._known(replica), self.now_s)
        del self._seen[replica]
        self._unused.append(replica)
        self._sums = None

    def in_flight(self, replica: int) -> int:
        """Requests that `replica` has, running or waiting."""
        return int(self._memory["replicas"]["in_flight"][self._known(replica)])

    def _known(self, replica: int) -> int:
        if replica not in self._seen:
            raise ValueError(f"there is no replica {replica}")
        return replica

    # ---- services ---------------------------------------------------------------------------------------------------
    def set_capacity_rps(self, service: int, variant: int, rps: float) -> None:
        """Requests/s that each replica of the variant is counted on for, by which the gateway routes."""
        self._ensure_variant(service, variant)
        self._memory["variants"]["rps"][service, variant] = rps

    def set_slots(self, service: int, variant: int, slots: int) -> None:
        """The gateway sends each replica that the variant has now up to `slots` requests at once."""
        if slots < 1:
            raise ValueError(f"a replica needs slots >= 1, not {slots}")
        table = self._memory["replicas"][: self._replicas]
        mine = (table["service"] == service) & (table["variant"] == variant) & (table["state"] != layout.ABSENT)
        for replica in np.flatnonzero(mine & (table["slots"] != slots)):
            loop.set_slots(self._memory.root, int(replica), slots)
        self._settle(service)

    def set_queue(self, service: int, *, max_queued: int, queue_timeout_s: float, slack_s: float = inf) -> None:
        """Bounds of the gateway's queue from now on; those who wait are turned away only by the time limit.

        Who has waited longer than `slack_s` lets those pass who can still meet their limits.
        """
        entry = self._memory["services"][service]
        if (entry["max_queued"], entry["timeout_s"], entry["slack_s"]) != (max_queued, queue_timeout_s, slack_s):
            entry["max_queued"], entry["timeout_s"], entry["slack_s"] = max_queued, queue_timeout_s, slack_s
            entry["late_tail"] = layout.NONE
            self._settle(service)

    def expect(self, service: int, next_capacity_s: float | None) -> None:
        """More capacity of the service is expected so many seconds from now; None: nothing is known."""
        at_s = nan if next_capacity_s is None else self.now_s + next_capacity_s
        self._memory["services"]["next_at_s"][service] = at_s

    def _settle(self, service: int) -> None:
        loop.settle(self._memory.root, service, self.now_s)
        self._sums = None

    def set_overflow_rpm(self, service: int, rpm: float) -> None:
        """The overflow endpoint takes `rpm` requests a minute from now on; 0 = none."""
        self._memory["services"]["overflow_rpm"][service] = rpm

    def note_coming(self, service: int, count: int) -> None:
        """`count` replicas of the service are starting or loading from now on."""
        if int(self._memory["services"]["coming"][service]) != count:
            loop.mark_cold(self._memory.root, service, count)

    # ---- time -------------------------------------------------------------------------------------------------------
    def advance(self, until_s: float) -> None:
        """Run until `until_s`. Raises ValueError for a time or a stream that goes back, and for negative tokens."""
        if not isfinite(until_s) or until_s < self.now_s:
            raise ValueError(f"the engine is at {self.now_s} s and cannot run to {until_s} s")
        for service, spec in enumerate(self._specs):
            batch = spec.arrivals.take(until_s)
            self._check(spec, batch, until_s)
            self._run(service, batch, until_s)
            self._tasks[service] += len(batch.at_s)
        self.now_s = until_s
        self._sums = None

    def _check(self, spec: ServiceSpec, batch: RequestBatch, until_s: float) -> None:
        at_s = batch.at_s
        if not len(at_s):
            return
        if not (self.now_s <= at_s[0] and at_s[-1] <= until_s and (at_s[1:] >= at_s[:-1]).all()):
            raise ValueError(f"{spec.service}: arrivals must be in order of time within {self.now_s} … {until_s} s")
        lowest = (batch.input_tokens.min(), batch.output_tokens.min(), batch.prefix_tokens.min() + 1)
        if min(lowest) < 1:
            raise ValueError(f"{spec.service}: a request has input and output tokens >= 1 and prefix tokens >= 0")
        if batch.task.max() >= len(spec.arrivals.tasks.calls):
            raise ValueError(f"{spec.service}: a request refers to task {batch.task.max()}, which there is not")

    def _run(self, service: int, batch: RequestBatch, until_s: float) -> None:
        count = len(batch.at_s)
        for low in range(0, max(count, 1), CHUNK):
            part = batch.part(low, low + CHUNK)
            self._memory.need_free(len(part.at_s))
            end_s = until_s if low + CHUNK >= count else float(part.at_s[-1])
            loop.advance(
                self._memory.root, service, end_s,
                part.at_s, part.input_tokens, part.output_tokens, part.prefix_tokens, part.task,
            )  # fmt: skip

    # ---- what happened ----------------------------------------------------------------------------------------------
    def window(self, service: int) -> Window:
        """What happened to `service` since the last call."""
        entry = self._memory["services"][service]
        output = int(entry["output_tokens"]) + loop.unseen_tokens(self._memory.root, service, self.now_s)
        ended = int(entry["finished"]) + int(entry["overflowed"])  # the endpoint's tokens are in `output` as well
        counts = (int(entry["arrived"]), int(entry["input_tokens"]), output, ended, int(entry["shed"]))
        now = (*counts, self._tasks[service], int(entry["met"]), int(entry["failed"]))
        before, self._windows[service] = self._windows[service], now
        arrived, inputs, outputs, *rest = (a - b for a, b in zip(now, before, strict=True))
        return Window(arrived, inputs, outputs, int(entry["queued"]), int(entry["running"]), *rest)

    def replica_windows(self, replicas: Sequence[int]) -> list[ReplicaWindow]:
        """What each of `replicas` did since the last call for it."""
        if not replicas:
            return []
        if self._sums is None:
            self._sums = np.zeros((self._replicas, SUMS))
            loop.observe(self._memory.root, self.now_s, self._sums)
        now = self._sums[[self._known(replica) for replica in replicas]]
        past = now - np.array([self._seen[replica] for replica in replicas])
        self._seen.update(zip(replicas, now, strict=True))
        tokens, token_s, busy_s, kv_s, prefill_s, prompt_tokens, prefills, steps = past.T[3:]
        kv_capacity = self._memory["replicas"]["kv_capacity_tokens"][list(replicas)]
        columns = (
            now[:, 0].astype(np.int64),
            now[:, 1].astype(np.int64),
            now[:, 2] / kv_capacity,
            _mean(token_s, tokens, tokens),
            _mean(prefill_s, prefills, prefills),
            _mean(prompt_tokens, prefills, prefills),
            _mean(tokens, steps, tokens),
            _mean(kv_s, busy_s, tokens),
            prefills.astype(np.int64),
            steps.astype(np.int64),
        )
        return list(map(ReplicaWindow._make, zip(*(column.tolist() for column in columns), strict=True)))

    def totals(self, service: int) -> Totals:
        """What happened to `service` since the start."""
        entry = self._memory["services"][service]
        ttft, tpot = self._memory["ttft_bins"][service], self._memory["tpot_bins"][service]
        names = ("requests", "finished", "met", "shed", "overflowed", "failed", "preemptions", "missed_ttft")
        counts = {name: int(entry[name]) for name in (*names, "missed_tpot", "missed_e2e", "input_tokens")}
        return Totals(
            **counts,
            in_flight=int(entry["queued"]) + int(entry["running"]),
            cold_start_misses=int(entry["cold_misses"]),
            output_tokens=int(entry["output_tokens"]) + loop.unseen_tokens(self._memory.root, service, self.now_s),
            overflow_usd=float(entry["overflow_usd"]),
            ttft_s={f"p{p}": histogram.quantile(ttft, p / 100) for p in (50, 95, 99)},
            tpot_s={f"p{p}": histogram.quantile(tpot, p / 100) for p in (50, 95)},
        )
