"""The books of one account and region: pools, instances, reservations, quotas, call buckets, notices.

A pure state machine: time is passed in, every state is a function of instants, so that a listing that lags is the truth
of a moment ago. May not do I/O, read a clock or draw a random number. Instants are UTC seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

Kind = Literal["default", "capacity-block"]
BLOCK_STOP_S = 1800.0  # instances of a block start terminating this long before its end
BLOCK_WARNING_S = 2400.0
FORGET_S = 3600.0  # a terminated instance is listed for about an hour
INTERRUPTED = "EC2 Spot Instance Interruption Warning"
CHANGED = "EC2 Instance State-change Notification"
REBALANCE = "EC2 Instance Rebalance Recommendation"
RECLAIMED = "EC2 Interruptible Capacity Reservation Instance Interruption Warning"
TAKEN = "EC2 Capacity Reservation Instance Interruption Warning"
DELIVERED = "Capacity Block Reservation Delivered"
EXPIRES = "Capacity Block Reservation Expiration Warning"
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
    spec: dict[str, Any] = field(default_factory=dict)
    told: str = "pending"  # the last state that an event named

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
    paid_at_s: float = -math.inf
    client_token: str = ""
    told: set[str] = field(default_factory=set)  # the events that have been sent about it

    def state(self, at_s: float) -> str:
        """EC2's word for it."""
        if at_s >= self.cancelled_at_s:
            return "cancelled"
        if at_s < self.paid_at_s:
            return "payment-pending"
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

    @property
    def hours(self) -> int:
        """Its duration, as it is asked for."""
        return round((self.end_at_s - self.start_at_s) / 3600.0)


@dataclass(slots=True)
class Message:
    """An event in the queue; hidden until `hidden_until_s` after it was received, and there until it is deleted."""

    message_id: str
    event: dict[str, Any]
    hidden_until_s: float = -math.inf
    receipt: str = ""


@dataclass(slots=True)
class Region:
    """What may be set up before and changed during a test; everything a real region hides is in here.

    `pools` is the inventory in instances, ours included; a type is offered in a zone that has it (`places`).
    `subnets` maps a subnet to its zone and free addresses, `templates` a launch template to its data in RunInstances'
    words. `lag_s` is the greatest age of what a listing shows. `stopping_s` is how long an instance takes to end; it is
    endless where something outside says when it has (`ended`).
    """

    name: str = "us-east-1"
    types: dict[str, int] = field(default_factory=dict)  # vCPU by type
    pools: dict[Pool, int] = field(default_factory=dict)
    quotas: dict[tuple[str, str], int] = field(default_factory=dict)  # vCPU by family and market
    subnets: dict[str, tuple[str, int]] = field(default_factory=dict)
    templates: dict[str, dict[str, Any]] = field(default_factory=dict)
    images: set[str] = field(default_factory=lambda: {"ami-1"})
    groups: dict[str, str] = field(default_factory=lambda: {"pg": "cluster"})  # placement groups and their strategy
    console: dict[str, str] = field(default_factory=dict)  # what instances have printed
    blocks: dict[str, BlockOffering] = field(default_factory=dict)
    boot_s: float = 5.0
    boots_s: dict[Pool, float] = field(default_factory=dict)  # where a pool's instances take another time
    stopping_s: float = 20.0
    pending_reservation_s: float = 5.0
    payment_s: float = 0.0
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
    queue: str = "qm-events"
    messages: list[Message] = field(default_factory=list)
    notices: list[dict[str, Any]] = field(default_factory=list)
    log: list[tuple[float, str]] = field(default_factory=list)
    made: int = 0

    def new_id(self, prefix: str) -> str:
        """A fresh identifier."""
        self.made += 1
        return f"{prefix}-{self.made:017x}"

    def places(self) -> set[tuple[str, str]]:
        """Types with the zones that have them: where there is a pool, a reservation or a block."""
        found = {(pool.instance_type, pool.zone) for pool in self.pools}
        found |= {(block.instance_type, block.zone) for block in self.blocks.values()}
        return found | {(row.instance_type, row.zone) for row in self.reservations.values()}

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
        """Blocks begin and end; what ended long ago is forgotten."""
        for block in self.reservations.values():
            if block.kind == "capacity-block" and block.cancelled_at_s > now_s:
                self._live_through(block, now_s)
        for each in self.instances.values():
            if (state := each.state(now_s)) != each.told:
                each.told = state
                detail = {"instance-id": each.instance_id, "state": state}
                self.notices.append(event(CHANGED, now_s, detail, self.name))
        gone = [key for key, each in self.instances.items() if now_s >= each.gone_at_s + FORGET_S]
        for key in gone:
            del self.instances[key]

    def _live_through(self, block: Reservation, now_s: float) -> None:
        stops_at_s = block.end_at_s - BLOCK_STOP_S
        detail = {"capacity-reservation-id": block.reservation_id, "end-date": iso(block.end_at_s)}
        for kind, at_s in ((DELIVERED, block.start_at_s), (EXPIRES, block.end_at_s - BLOCK_WARNING_S)):
            if at_s <= now_s < block.end_at_s and kind not in block.told:
                block.told.add(kind)
                self.notices.append(event(kind, at_s, detail, self.name))
        if now_s < block.end_at_s - BLOCK_WARNING_S:
            return
        for each in self.instances.values():
            if each.reservation != block.reservation_id or each.stops_at_s <= stops_at_s:
                continue
            if now_s < stops_at_s and each.instance_id not in block.told:
                block.told.add(each.instance_id)
                self.notices.append(event(TAKEN, now_s, _last(each, stops_at_s), self.name))
            if now_s >= stops_at_s:
                each.stop(stops_at_s, self.stopping_s, "Server.CapacityReservationExpired", "the block ends")

    def ended(self, instance_id: str, now_s: float, code: str, message: str) -> None:
        """Nothing runs on the instance any more, for the reason given unless it was being stopped."""
        instance = self.instances[instance_id]
        instance.stop(now_s, 0.0, code, message)
        instance.gone_at_s = min(instance.gone_at_s, now_s)

    def interrupt(self, instance_id: str, now_s: float, notice_s: float = 120.0) -> float:
        """Weather: a spot (or interruptible) instance gets its notice; returns when it is taken."""
        instance = self.instances[instance_id]
        at_s = now_s + notice_s
        instance.stop(at_s, self.stopping_s, "Server.SpotInstanceTermination", "Spot instance termination")
        spot = instance.market == "spot" or not instance.reservation
        detail = {"instance-id": instance_id, "instance-action": "terminate"} if spot else _last(instance, at_s)
        self.notices.append(event(INTERRUPTED if spot else RECLAIMED, now_s, detail, self.name))
        return at_s

    def advise(self, instance_id: str, now_s: float) -> None:
        """Weather: a rebalance recommendation."""
        self.notices.append(event(REBALANCE, now_s, {"instance-id": instance_id}, self.name))


def event(kind: str, at_s: float, detail: Mapping[str, Any], region: str) -> dict[str, Any]:
    """An event as EventBridge puts it into a queue. `at_s` becomes the ISO instant in `time`."""
    return {"detail-type": kind, "source": "aws.ec2", "region": region, "time": iso(at_s), "detail": dict(detail)}


def iso(at_s: float) -> str:
    """An instant as AWS writes it."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _last(instance: Instance, at_s: float) -> dict[str, str]:
    return {
        "instance-id": instance.instance_id,
        "instance-action": "terminate",
        "instance-termination-time": iso(at_s),
    }


@dataclass(slots=True)
class Key:
    """An access key: its secret, its session token if it has one, and its end."""

    secret: str
    session: str = ""
    expires_at_s: float = math.inf


@dataclass(slots=True)
class Account:
    """Regions by name, and who may call. `skew_s` is how far a caller's clock may be off."""

    regions: dict[str, Region]
    keys: dict[str, Key] = field(default_factory=lambda: {"test": Key("test")})
    skew_s: float = math.inf
