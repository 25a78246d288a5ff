"""Carry out a plan: drains and publish, then terminates, then launches, each launch walking its alternates, several of
them in one call where the cloud can be asked so.

Every attempt is journalled before and after the call. A launch never moves on from an ambiguous answer: an idempotency
token protects within one offering only, so moving on could buy twice. Calls still open at the executor's deadline are
ambiguous from then on; what they answer later is ignored, because the next listing shows it by its token. May not
decide anything, read a clock, or import an adapter.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

from autoscaler.core.events import (
    Acted,
    ActFailed,
    Event,
    LaunchAmbiguous,
    LaunchGranted,
    LaunchRefused,
    LaunchTried,
    RefusalClass,
)
from autoscaler.core.learn import family
from autoscaler.core.model import Drain, Launch, Offering, Plan, Terminate
from autoscaler.core.reasons import ReasonCode
from autoscaler.ports import (
    Cloud,
    FleetAnswer,
    FleetCloud,
    Misconfigured,
    NoCapacity,
    NotFound,
    PortError,
    Quota,
    Serving,
    Throttled,
    Transient,
)
from serve_apps.wire import PlanMessage

E = TypeVar("E", bound=Event)
T = TypeVar("T")


class Record(Protocol):
    """Write an event to the journal and learn it; thread-safe. Raises Transient."""

    def __call__(self, event: E, *, durable: bool = False) -> E:
        """See above."""
        ...


class Executor(Protocol):
    """Runs jobs. Returns when all are done, or when the tick has no more time for them."""

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run `jobs`, starting them in order."""
        ...


class Inline:
    """One job after the other in the caller's thread: the simulated world, and tests."""

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """See Executor. There is no deadline."""
        for job in jobs:
            job()


class Pool:
    """`workers` daemon threads; `run` returns after `deadline_s` at the latest. A job not begun by then is dropped.

    Daemons, because a call that hangs must not keep the process from exiting.
    """

    def __init__(self, workers: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._jobs: queue.SimpleQueue[tuple[futures.Future[None], Callable[[], None]]] = queue.SimpleQueue()
        for number in range(workers):
            threading.Thread(target=self._work, name=f"qm-act-{number}", daemon=True).start()

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                job()
            finally:
                future.set_result(None)

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """See Executor."""
        running: list[futures.Future[None]] = []
        for job in jobs:
            future: futures.Future[None] = futures.Future()
            self._jobs.put((future, job))
            running.append(future)
        _, late = futures.wait(running, timeout=self._deadline_s)
        for future in late:
            future.cancel()


REFUSALS: tuple[tuple[type[PortError], RefusalClass], ...] = (
    (NoCapacity, "no_capacity"),
    (Quota, "quota"),
    (Misconfigured, "misconfigured"),
    (NotFound, "not_found"),
    (Throttled, "throttled"),
)


def refusal_class(error: PortError) -> RefusalClass:
    """Our word for a definite no; an unknown one is `refused`, the safe class."""
    return next((name for kind, name in REFUSALS if isinstance(error, kind)), "refused")


class _Refusals:
    """What this tick's refusals say, shared by its launches: nobody asks again for what was just refused."""

    def __init__(self, offerings: dict[str, Offering]) -> None:
        self._offerings = offerings
        self._refused: set[str] = set()
        self._lock = threading.Lock()

    def note(self, offering: str, error: RefusalClass) -> None:
        """A quota refusal speaks for its family, market and region, a dry pool for all of that pool."""
        if error == "throttled":
            return
        asked = self._offerings.get(offering)
        with self._lock:
            self._refused.add(offering)
            if asked is not None:
                alike = (o.offering for o in self._offerings.values() if _fails_with(error, asked, o))
                self._refused.update(alike)

    def covers(self, offering: str) -> bool:
        """Whether `offering` would only be refused again."""
        with self._lock:
            return offering in self._refused


def _fails_with(error: RefusalClass, asked: Offering, other: Offering) -> bool:
    if error == "quota":
        return _quota_of(asked) == _quota_of(other)
    return error == "no_capacity" and asked.pool == other.pool


def _quota_of(offering: Offering) -> tuple[str, str, str]:
    return family(offering.instance_type), offering.market, offering.region


class _Job(ABC):
    """The calls of one action. After `close`, at the deadline, it writes nothing, whatever a call answers."""

    def __init__(self, act: Act) -> None:
        self.act = act
        self.error: Exception | None = None
        self._closed = False
        self._if_late: Event | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Do it, unless the deadline has passed. What the journal raised is kept in `error`."""
        try:
            self._run()
        except Exception as error:
            self.error = error

    @abstractmethod
    def _run(self) -> None:
        """The calls, each between `_begin` and `_end`."""

    def close(self) -> None:
        """The deadline: what is still open is journalled as such."""
        with self._lock:
            self._closed = True
            if self._if_late is not None and self.error is None:
                self.act.record(self._if_late)

    def _begin(self, if_late: Event, tried: Event | None = None) -> bool:
        """Before a call; False when it is too late to make it."""
        with self._lock:
            if self._closed:
                return False
            if tried is not None:
                self.act.record(tried, durable=True)
            self._if_late = if_late
            return True

    def _end(self, answer: Event, *, durable: bool = False) -> bool:
        """After a call; False when the answer came too late to count."""
        with self._lock:
            if self._closed:
                return False
            self.act.record(answer, durable=durable)
            self._if_late = None
            return True


class _TerminateJob(_Job):
    def __init__(self, act: Act, terminate: Terminate) -> None:
        super().__init__(act)
        self._terminate = terminate

    def _run(self) -> None:
        target = self._terminate.instance_id
        if self._begin(self._failed("no answer by the tick's deadline")):
            try:
                said = self._last_words()
                self.act.cloud.terminate(target)
            except PortError as error:
                self._end(self._failed(f"{error.code}: {error}"))
            else:
                act = self._terminate.id
                self._end(Acted(at_s=self.act.now_s, action=act, verb="terminate", target=target, detail=said))

    def _last_words(self) -> str:
        """What an instance that never joined said last: it cannot be asked afterwards."""
        cloud, reasons = self.act.cloud, {reason.code for reason in self._terminate.reasons}
        if ReasonCode.STARTING_EXPIRED in reasons and isinstance(cloud, FleetCloud):
            return cloud.last_words(self._terminate.instance_id)
        return ""

    def _failed(self, why: str) -> ActFailed:
        return ActFailed(
            at_s=self.act.now_s,
            action=self._terminate.id,
            verb="terminate",
            target=self._terminate.instance_id,
            error=why,
        )


class _LaunchJob(_Job):
    def __init__(self, act: Act, launch: Launch, refusals: _Refusals) -> None:
        super().__init__(act)
        self._launch = launch
        self._refusals = refusals
        self._answered: set[str] = set()

    def _run(self) -> None:
        missing = self._launch.count
        while missing > 0 and (group := self._group()):
            token, names = f"{self._launch.id}/{group[0]}", tuple(self._launch.alternates[each] for each in group)
            self._answered.add(names[0])
            granted = self._try(token, names[0], missing) if len(names) == 1 else self._try_any(token, names, missing)
            if granted is None:
                return
            missing -= granted

    def _group(self) -> list[int]:
        """Which alternates are asked next, in one call, by number; none when all have answered."""
        names, cloud = self._launch.alternates, self.act.cloud
        left = [at for at, name in enumerate(names) if name not in self._answered and not self._refusals.covers(name)]
        if len(left) < 2 or not isinstance(cloud, FleetCloud):
            return left[:1]
        return left[: max(1, len(cloud.together([names[at] for at in left])))]

    def _try_any(self, token: str, names: tuple[str, ...], count: int) -> int | None:
        """Ask several offerings in one call; returns as `_try`."""
        tried = LaunchTried(at_s=self.act.now_s, intent=self._launch.id, token=token, offering=names[0], count=count)
        cloud = self.act.cloud
        assert isinstance(cloud, FleetCloud)
        answer = self._asked(tried, lambda: cloud.launch_any(names, count, token))
        if not isinstance(answer, FleetAnswer):
            return answer
        granted = 0
        self._answered.update(answer.granted, answer.refused)
        for offering, ids in answer.granted.items():
            if not self._end(self._grant(tried, offering, ids), durable=True):
                return None
            granted += len(ids)
        kinds = [self._refused(replace(tried, offering=name), error) for name, error in answer.refused.items()]
        return None if None in kinds else granted

    def _try(self, token: str, offering: str, count: int) -> int | None:
        """Ask one offering; the number granted, or None when this launch must not go on in this tick."""
        tried = LaunchTried(at_s=self.act.now_s, intent=self._launch.id, token=token, offering=offering, count=count)
        ids = self._asked(tried, lambda: self.act.cloud.launch(offering, count, token))
        if not isinstance(ids, tuple):
            return ids
        return len(ids) if self._end(self._grant(tried, offering, ids), durable=True) else None

    def _asked(self, tried: LaunchTried, call: Callable[[], T]) -> T | int | None:
        """The answer of a call between its records; a number or None, as `_try`, when it was no grant."""
        if not self._begin(self._ambiguous(tried, "no answer by the tick's deadline"), tried):
            return None
        try:
            return call()
        except Transient as error:
            self._end(self._ambiguous(tried, f"{error.code}: {error}"))
            return None
        except PortError as error:
            return self._refused(tried, error)
        except Exception as defect:
            self._end(self._ambiguous(tried, f"defect of the adapter: {defect!r}"))
            raise

    @staticmethod
    def _grant(tried: LaunchTried, offering: str, ids: tuple[str, ...]) -> LaunchGranted:
        return LaunchGranted(
            at_s=tried.at_s, intent=tried.intent, token=tried.token, offering=offering, instance_ids=ids
        )

    def _refused(self, tried: LaunchTried, error: PortError) -> int | None:
        """Journal a definite no. Being throttled and a wrong request would meet the same answer elsewhere: stop."""
        kind = refusal_class(error)
        self._refusals.note(tried.offering, kind)
        refusal = LaunchRefused(
            at_s=tried.at_s,
            intent=tried.intent,
            token=tried.token,
            offering=tried.offering,
            error=kind,
            code=error.code,
        )
        return 0 if self._end(refusal) and kind not in ("throttled", "misconfigured") else None

    def _ambiguous(self, tried: LaunchTried, why: str) -> LaunchAmbiguous:
        return LaunchAmbiguous(
            at_s=tried.at_s, intent=tried.intent, token=tried.token, offering=tried.offering, why=why
        )


@dataclass
class Act:
    """One tick's acts. `offerings` are the cloud's current ones by name, for what a refusal speaks for."""

    now_s: float
    serving: Serving
    cloud: Cloud
    record: Record
    executor: Executor
    offerings: dict[str, Offering] = field(default_factory=dict)

    def carry_out(self, plan: Plan, message: PlanMessage) -> None:
        """Do all of `plan`. Raises what the journal raised (Transient), after everything else is settled."""
        for drain in plan.drains:
            self._drain(drain)
        self.publish(plan.id, message)
        refusals = _Refusals(self.offerings)
        jobs: list[_Job] = [_TerminateJob(self, terminate) for terminate in plan.terminates]
        jobs += [_LaunchJob(self, launch, refusals) for launch in plan.launches]
        self.executor.run([job.run for job in jobs])
        for job in jobs:
            job.close()
        for job in jobs:
            if job.error is not None:
                raise job.error

    def publish(self, action: str, message: PlanMessage) -> None:
        """Hand the targets to the board."""
        target = f"{message.run_id}/{message.seq}"
        self._call(action, "publish", target, lambda: self.serving.publish(message))

    def _drain(self, drain: Drain) -> None:
        reason = drain.reasons[0].code.value if drain.reasons else "drain"
        self._call(
            drain.id,
            "drain",
            drain.instance_id,
            lambda: self.serving.drain(drain.instance_id, drain.deadline_at_s, reason),
        )

    def _call(self, action: str, verb: Literal["publish", "drain"], target: str, call: Callable[[], None]) -> None:
        try:
            call()
        except PortError as error:
            why = f"{error.code}: {error}"
            self.record(ActFailed(at_s=self.now_s, action=action, verb=verb, target=target, error=why))
        else:
            self.record(Acted(at_s=self.now_s, action=action, verb=verb, target=target))
