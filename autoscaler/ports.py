"""The edges of the controller: what it asks of the world, and the only errors it hears back.

Interfaces and error classes only; may not import an adapter, a vendor's package or the loop. An adapter translates
every vendor exception into one of these classes; anything else that escapes is a defect of the adapter. Every method
may be called from any thread. `tests/contract` runs one suite per port on every implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from autoscaler.core.events import Event, Ordered, Record
from autoscaler.core.model import CloudView, EngineLoad, ServiceLoad, ServingView, Shape
from policies.model import PolicySet
from serve_apps.wire import PlanMessage


class PortError(Exception):
    """Base of what a port may raise. `code` is the vendor's own word, kept for the journal."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code or type(self).__name__


class Transient(PortError):
    """It may or may not have happened, and may work later: time-outs, 5xx, connection lost."""


class Throttled(PortError):
    """Too many calls: certainly not done; says nothing about capacity."""


class NoCapacity(PortError):
    """The pool is dry. `offering` names it."""

    def __init__(self, offering: str, message: str, code: str = "InsufficientInstanceCapacity") -> None:
        super().__init__(message, code)
        self.offering = offering


class Quota(PortError):
    """An account limit, not the pool: other zones of the same family and market will answer the same."""


class Misconfigured(PortError):
    """The request itself is wrong (image, subnet, permission): trying elsewhere will not help."""


class NotFound(PortError):
    """The thing named does not exist (any more)."""


class Refused(PortError):
    """Any other definite no, unknown codes included: the safe class."""


class Superseded(PortError):
    """Another controller writes this journal now: this one may do nothing any more, and ends."""


class Reread(Transient):
    """The journal holds something that this controller has not learnt: it must begin anew by reading it."""


class Clock(Protocol):
    """Wall-clock instants."""

    def now_s(self) -> float:
        """Seconds since 1970 UTC."""
        ...


class Metrics(Protocol):
    """What the gateways and engines measured."""

    def loads(self, now_s: float) -> tuple[ServiceLoad, ...]:
        """Load per service since the previous call. Raises Transient when nothing at all can be read."""
        ...

    def engines(self, now_s: float) -> tuple[EngineLoad, ...]:
        """Every engine that exports gauges, dead ones possibly included. Raises Transient when none can be read."""
        ...


class Serving(Protocol):
    """The Ray cluster and Serve."""

    def observe(self, now_s: float) -> ServingView:
        """Replicas, nodes and current targets. Raises Transient."""
        ...

    def publish(self, message: PlanMessage) -> None:
        """Hand the plan to the board. Raises Transient."""
        ...

    def drain(self, instance_id: str, deadline_at_s: float, reason: str) -> None:
        """Stop placing work on the instance's node and let it finish by the deadline. Raises NotFound, Transient."""
        ...


class Cloud(Protocol):
    """Where instances come from."""

    def describe(self, now_s: float) -> CloudView:
        """Offerings, and all instances of this cluster, in one consistent-as-possible listing. Raises Transient,
        Throttled.
        """
        ...

    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        """Ask for `count` instances; returns the ids granted (at least one, maybe fewer than asked).

        The same token in the same offering returns the same instances. Raises NoCapacity, Quota, Misconfigured,
        NotFound, Refused, Throttled (all: nothing was launched) or Transient (nobody knows).
        """
        ...

    def terminate(self, instance_id: str) -> None:
        """Give the instance back; a second call is a no-op. Raises NotFound, Refused, Throttled, Transient."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAnswer:
    """What one call for several offerings got: ids by the offering that they landed in, and who refused."""

    granted: dict[str, tuple[str, ...]]
    refused: dict[str, PortError]


@runtime_checkable
class FleetCloud(Cloud, Protocol):
    """A cloud that can be asked for several offerings in one call, and knows what an instance said last."""

    def together(self, offerings: Sequence[str]) -> tuple[str, ...]:
        """The longest beginning of `offerings` that one call can ask for, tried in that order."""
        ...

    def launch_any(self, offerings: Sequence[str], count: int, token: str) -> FleetAnswer:
        """Ask for `count` instances in all, at any of `offerings`. The same token for the same offerings returns the
        same instances. Raises as Cloud.launch what holds for all of them.
        """
        ...

    def last_words(self, instance_id: str) -> str:
        """The end of what the instance wrote to its console, on one line; empty when there is none. Never raises."""
        ...


class Journal(Protocol):
    """The durable order of events."""

    def append(self, event: Event, *, durable: bool) -> Record:
        """Write one event and return its record as `read` will give it; with `durable` only after it is on disk.

        Raises Transient.
        """
        ...

    def read(self) -> Iterator[Record]:
        """The current history, oldest first: from the last snapshot, or from the beginning."""
        ...

    def roll(self, head: Callable[[], tuple[Event, ...]]) -> tuple[Record, ...]:
        """Start a new history with the events of `head()`, all or none, when the current one has grown enough.

        Returns the records written; none when it was not time, and `head` is not called then. Raises Transient.
        """
        ...


class Tenure(Protocol):
    """The right to act for a cluster; `epoch` counts its holders."""

    @property
    def epoch(self) -> int:
        """Larger for every later holder."""
        ...

    def check(self) -> None:
        """Raises Superseded when another controller holds it now, Transient when that cannot be told."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy that loaded, with its engine shapes; `digest` is equal exactly when both are."""

    policy: PolicySet
    shapes: tuple[Shape, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A policy folder that does not load, and every reason why."""

    problems: tuple[str, ...]


class PolicySource(Protocol):
    """Where the policy comes from."""

    def poll(self, now_s: float) -> Policy | Broken | None:
        """What is there now, when it changed since the last poll; None when it did not, or it is not time to look."""
        ...


class Orders(Protocol):
    """Where operators' orders wait until they are journalled."""

    def waiting(self) -> tuple[tuple[str, Ordered], ...]:
        """(name, order) of each, the oldest first."""
        ...

    def taken(self, name: str) -> None:
        """It is in the journal."""
        ...
