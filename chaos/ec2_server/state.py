"""The books of one account and region: pools, instances, reservations, quotas, call buckets, notices.

A pure state machine: time is passed in, every state is a function of instants, so that a listing that lags is the truth
of a moment ago. May not do I/O, read a clock or draw a random number. Instants are UTC seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["default", "capacity-block"]
BLOCK_STOP_S = 1800.0  # instances of a block start terminating this long before its end
BLOCK_WARNING_S = 2400.0
FORGET_S = 3600.0  # a terminated instance is listed for about an hour
FAMILIES = {"p": "P", "g": "G", "vt": "G", "trn": "Trn", "inf": "Inf"}


class Refusal(Exception):
    """A definite answer of no, in AWS's words."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def family(instance_type: str) -> str:
    """The quota's name of a type: its leading letters, as AWS groups them."""
    letters = instance_type[: next((at for at, sign in enumerate(instance_type) if not sign.isalpha()), None)]
    return FAMILIES.get(letters, "Standard")


@dataclass(slots=True)
class Bucket:
    """Tokens that refill; a call that finds too few is throttled."""

    burst: float
    per_s: float
    left: float = -1.0
    at_s: float = 0.0

    def take(self, now_s: float, count: float = 1.0) -> bool:
        """Whether there were `count` tokens."""
        refilled = self.burst if self.left < 0.0 else self.left + max(0.0, now_s - self.at_s) * self.per_s
        self.left, self.at_s = min(self.burst, refilled), now_s
        if self.left < count:
            return False
        self.left -= count
        return True


@dataclass(frozen=True, slots=True)
class Pool:
    """What the hidden inventory is counted by."""

    instance_type: str
    zone: str
    market: Literal["on-demand", "spot"] = "on-demand"


@dataclass(slots=True)
class Instance:
    """One instance. `market` is what it was bought as; `vcpus` count against the quota `quota` while it lives."""

    instance_id: str
    instance_type: str
    zone: str
    market: str
    subnet: str
    client_token: str
    tags: dict[str, str]
    launched_at_s: float
    running_at_s: float
    shutdown: str = "stop"
    reservation: str = ""
    preference: str = "open"
    group: str = ""
    stops_at_s: float = math.inf
    gone_at_s: float = math.inf
    reason: tuple[str, str] = ("", "")
    protected: bool = False
    volumes_tagged: bool = False
    user_data: str = ""

    def state(self, at_s: float) -> str:
        """EC2's word for it."""
        if at_s >= self.gone_at_s:
            return "terminated"
        if at_s >= self.stops_at_s:
            return "shutting-down"
        return "running" if at_s >= self.running_at_s else "pending"

    def live(self, at_s: float) -> bool:
        """Whether it holds capacity and costs money."""
        return self.launched_at_s <= at_s < self.gone_at_s

    def stop(self, at_s: float, takes_s: float, code: str, message: str) -> None:
        """From `at_s` on it shuts down; the first reason stays."""
        if self.stops_at_s <= at_s:
            return
        self.stops_at_s, self.gone_at_s, self.reason = at_s, at_s + takes_s, (code, message)


@dataclass(slots=True)
class Reservation:
    """An On-Demand Capacity Reservation or a Capacity Block."""

    reservation_id: str
    instance_type: str
    zone: str
    total: int
    created_at_s: float
    start_at_s: float
    end_at_s: float = math.inf
    kind: Kind = "default"
    match: str = "open"
    interruptible: bool = False
    tags: dict[str, str] = field(default_factory=dict)
    cancelled_at_s: float = math.inf
    client_token: str = ""

    def state(self, at_s: float) -> str:
        """EC2's word for it."""
        if at_s >= self.cancelled_at_s:
            return "cancelled"
        if at_s >= self.end_at_s:
            return "expired"
        if at_s >= self.start_at_s:
            return "active"
        return "scheduled" if self.kind == "capacity-block" else "pending"


@dataclass(frozen=True, slots=True)
class BlockOffering:
    """A Capacity Block for sale."""

    offering_id: str
    instance_type: str
    zone: str
    count: int
    start_at_s: float
    end_at_s: float
    fee_usd: float


@dataclass(slots=True)
class Region:
    """What may be set up before and changed during a test; everything a real region hides is in here.

    `pools` is the inventory in instances, ours included; a type is offered in a zone when a pool of it exists.
    `subnets` maps a subnet to its zone and free addresses, `templates` a launch template to its data in RunInstances'
    words. `lag_s` is the greatest age of what a listing shows.
    """

    name: str = "us-east-1"
    types: dict[str, int] = field(default_factory=dict)  # vCPU by type
    pools: dict[Pool, int] = field(default_factory=dict)
    quotas: dict[tuple[str, str], int] = field(default_factory=dict)  # vCPU by family and market
    subnets: dict[str, tuple[str, int]] = field(default_factory=dict)
    templates: dict[str, dict[str, Any]] = field(default_factory=dict)
    images: set[str] = field(default_factory=lambda: {"ami-1"})
    blocks: dict[str, BlockOffering] = field(default_factory=dict)
    boot_s: float = 5.0
    stopping_s: float = 20.0
    pending_reservation_s: float = 5.0
    lag_s: float = 0.0
    group_limit: int | None = None  # instances of one placement group in one zone
    dies: tuple[str, str] | None = None  # every new instance ends at once, for this reason
    denied: set[str] = field(default_factory=set)  # actions without permission
    spot_role: bool = True
    launch_tokens: Bucket = field(default_factory=lambda: Bucket(1000.0, 2.0))
    calls: dict[str, Bucket] = field(default_factory=dict)
    default_calls: tuple[float, float] = (100.0, 10.0)
    instances: dict[str, Instance] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    launches: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    fleets: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    notices: list[dict[str, Any]] = field(default_factory=list)
    log: list[tuple[float, str]] = field(default_factory=list)
    made: int = 0

    def new_id(self, prefix: str) -> str:
        """A fresh identifier."""
        self.made += 1
        return f"{prefix}-{self.made:017x}"

    def admit(self, action: str, now_s: float) -> None:
        """Count the call. Raises Refusal when it is throttled or forbidden."""
        self.log.append((now_s, action))
        if not self.calls.setdefault(action, Bucket(*self.default_calls)).take(now_s):
            raise Refusal("RequestLimitExceeded", "Request limit exceeded.", 503)
        if action in self.denied:
            raise Refusal("UnauthorizedOperation", f"You are not authorized to perform: ec2:{action}", 403)

    def live(self, now_s: float) -> Iterator[Instance]:
        """Instances that hold capacity."""
        return (each for each in self.instances.values() if each.live(now_s))

    def room(self, pool: Pool, now_s: float) -> int:
        """Instances that the pool could still give. Reserved capacity is taken from on-demand while it is held."""
        held = 0
        if pool.market == "on-demand":
            places = [
                r for r in self.reservations.values() if (r.instance_type, r.zone) == (pool.instance_type, pool.zone)
            ]
            held = sum(r.total for r in places if r.kind == "default" and r.state(now_s) in ("active", "pending"))
        used = sum(
            (each.instance_type, each.zone, each.market) == (pool.instance_type, pool.zone, pool.market)
            and not each.reservation
            for each in self.live(now_s)
        )
        return self.pools.get(pool, 0) - held - used

    def quota_room(self, instance_type: str, market: str, now_s: float) -> int:
        """Instances of a type that the account's limit still allows."""
        limit = self.quotas.get((family(instance_type), market))
        if limit is None:
            return 1_000_000
        used = sum(
            self.types.get(each.instance_type, 0)
            for each in self.live(now_s)
            if family(each.instance_type) == family(instance_type) and each.market == market and not each.reservation
        )
        return (limit - used) // max(1, self.types.get(instance_type, 1))

    def free(self, reservation: Reservation, now_s: float) -> int:
        """Instances that fit in a reservation now."""
        if reservation.state(now_s) != "active":
            return 0
        return reservation.total - sum(each.reservation == reservation.reservation_id for each in self.live(now_s))

    def advance(self, now_s: float) -> None:
        """Blocks end; what ended long ago is forgotten."""
        for block in self.reservations.values():
            stops_at_s = block.end_at_s - BLOCK_STOP_S
            if block.kind == "capacity-block" and now_s >= stops_at_s:
                for each in self.instances.values():
                    if each.reservation == block.reservation_id:
                        each.stop(stops_at_s, self.stopping_s, "Server.CapacityReservationExpired", "the block ends")
        gone = [key for key, each in self.instances.items() if now_s >= each.gone_at_s + FORGET_S]
        for key in gone:
            del self.instances[key]

    def interrupt(self, instance_id: str, now_s: float, notice_s: float = 120.0) -> float:
        """Weather: a spot (or interruptible) instance gets its notice; returns when it is taken."""
        instance = self.instances[instance_id]
        at_s = now_s + notice_s
        instance.stop(at_s, self.stopping_s, "Server.SpotInstanceTermination", "Spot instance termination")
        kind = "EC2 Spot Instance Interruption Warning"
        detail = {"instance-id": instance_id, "instance-action": "terminate"}
        self.notices.append(event(kind, now_s, detail, self.name))
        return at_s


def event(kind: str, at_s: float, detail: Mapping[str, Any], region: str) -> dict[str, Any]:
    """An event as EventBridge puts it into a queue. `at_s` becomes the ISO instant in `time`."""
    from datetime import UTC, datetime

    time = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"detail-type": kind, "source": "aws.ec2", "region": region, "time": time, "detail": dict(detail)}


@dataclass(slots=True)
class Account:
    """Regions by name."""

    regions: dict[str, Region]
