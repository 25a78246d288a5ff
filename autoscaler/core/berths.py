"""The pieces of a placement: ways to serve, instances with room, and seats on them.

May not do I/O or read a clock. `Berth` and `Need` change while one plan is made and live no longer than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from policies.model import Service
from serve_apps.wire import app_name

from .capacity import Capacity
from .model import Demand, Offering, Shape
from .reasons import Reason, ReasonCode, why
from .shares import More, Purse, make_room

CLOSING_S = 2400.0  # a Capacity Block takes no new work from 40 minutes before its end
SUNK = frozenset({"odcr", "block"})  # paid for whether used or not
PREEMPTIBLE = frozenset({"spot", "interruptible"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to serve a service: a variant's shape and what a replica of it carries."""

    shape: Shape
    capacity: Capacity
    lead_s: float = 0.0  # boot + load, at P90
    tier: int = 0  # variants of a later tier are a sacrifice: for when those of earlier ones cannot be had
    app: str = field(init=False)  # the Serve application of this variant

    def __post_init__(self) -> None:
        object.__setattr__(self, "app", app_name(self.shape.service, self.shape.variant))


@dataclass(slots=True, kw_only=True, eq=False)
class Berth:
    """A usable instance. `present` names, by application, the replicas led from it now, each by its other instances;
    the first `ready` of them serve.
    """

    instance_id: str
    offering: Offering
    joined: bool
    launched_at_s: float
    present: dict[str, tuple[tuple[str, ...], ...]]
    ready: Mapping[str, int] = field(default_factory=dict)
    pace: float = 1.0  # how many times longer a step takes here than elsewhere
    seats: int = 0
    free_gpus: int = field(init=False)
    busy: int = field(init=False)  # replicas led from it now
    sunk: bool = field(init=False)  # paid for whether used or not
    usd_per_gpu_h: float = field(init=False)

    def __post_init__(self) -> None:
        offering = self.offering
        self.free_gpus, self.sunk = offering.gpus, offering.market in SUNK
        self.usd_per_gpu_h = offering.price_usd_per_h / max(1, offering.gpus)
        self.busy = sum(map(len, self.present.values()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seat:
    """One replica's place: as many berths as its shape has nodes."""

    option: Option
    berths: tuple[Berth, ...]
    usd_per_h: float = field(init=False)  # price of the GPUs it takes
    rps: float = field(init=False)  # that it is planned to carry: the slowest of its instances sets the pace

    def __post_init__(self) -> None:
        gpus, rps, berths = self.option.shape.gpus, self.option.capacity.rps, self.berths
        object.__setattr__(self, "usd_per_h", sum([gpus * berth.usd_per_gpu_h for berth in berths]))
        object.__setattr__(self, "rps", rps / max([berth.pace for berth in berths]))

    @property
    def joined(self) -> bool:
        """Whether all of it is in the cluster."""
        return all(berth.joined for berth in self.berths)

    @property
    def sunk(self) -> bool:
        """Whether giving it up would save nothing."""
        return all(berth.sunk for berth in self.berths)

    @property
    def steady(self) -> bool:
        """Whether no part of it is on a market that is taken back."""
        return all(berth.offering.market not in PREEMPTIBLE for berth in self.berths)


@dataclass(slots=True, kw_only=True, eq=False)
class Need:
    """One service's demand while it is being placed."""

    demand: Demand
    entry: Service
    purse: Purse
    options: tuple[Option, ...]
    seats: list[Seat] = field(default_factory=list)
    rps: float = 0.0
    steady: int = 0  # replicas on markets that are not taken back
    pressing: float = 1.0  # how much of what is missing is missed already, 0–1
    gpus_per_rps: dict[str, float] = field(init=False)  # by instance type: what a request/s takes there
    reasons: list[Reason] = field(default_factory=list)
    queue_s: float = 0.0  # how long its requests may wait before a smaller variant is used
    using: tuple[Option, ...] = ()  # what its next replicas may be
    waiting: Counter[str] = field(default_factory=Counter)  # GPUs by type that those who are served later lack
    claims: bool = True  # False for what is more than its demand: that takes nothing of others

    def __post_init__(self) -> None:
        self.using = self.using or self.options
        self.purse.needs.append(self)
        self.gpus_per_rps = {}
        for option in self.options:
            kind, shape = option.shape.instance_type, option.shape
            taken = shape.gpus * shape.nodes / option.capacity.rps
            self.gpus_per_rps[kind] = min(taken, self.gpus_per_rps.get(kind, taken))

    def order(self, shelf: list[Berth]) -> list[Berth]:
        """Its berths of a shelf, the best first: steady ones while the on-demand floor may need them, in the cluster,
        cheap for what it carries there, busy (so that the others empty), old.
        """
        floor = self.entry.on_demand_floor > 0
        mine = {option.app for option in self.options}

        def key(berth: Berth) -> tuple[bool, bool, float, int, float, str]:
            shaky = floor and berth.offering.market in PREEMPTIBLE
            return shaky, not berth.joined, self._usd(berth, mine), -berth.busy, berth.launched_at_s, berth.instance_id

        return sorted([row for row in shelf if row.offering.instance_type in self.gpus_per_rps], key=key)

    def _usd(self, berth: Berth, mine: set[str]) -> float:
        """$/h for each request/s there: nothing where it is paid for anyway, a share where others are too, else all of
        the instance for what the service would use of it.
        """
        if berth.sunk or berth.seats > 0:
            return 0.0
        rate = self.gpus_per_rps[berth.offering.instance_type]
        if not mine.issuperset(berth.present):
            return berth.usd_per_gpu_h * rate
        used = min(berth.offering.gpus / rate, max(self.demand.arrival_rps, 1.0 / rate))
        return berth.offering.price_usd_per_h / used

    @property
    def miss_weight(self) -> float:
        """What a request that is missed is worth, of the price of serving it: at f/(1 − f) the cheapest capacity is
        that which serves the fraction f.
        """
        return self.entry.slo.fraction / (1.0 - self.entry.slo.fraction)

    @property
    def replicas(self) -> int:
        """Replicas that have a place."""
        return len(self.seats)

    @property
    def floor(self) -> int:
        """Replicas that the policy wants whatever the load."""
        return 0 if self.entry.scale_to_zero else self.entry.min_replicas

    def missing(self, option: Option, spare: float = 0.0, *, shaky: bool = False) -> int:
        """Replicas of `option` still needed, within the policy's bounds, for `spare` times more than the demand; of
        `shaky` ones, which may be taken back, none for the on-demand floor.
        """
        wanted_rps = (1.0 + spare) * self.demand.arrival_rps
        by_rate = ceil(max(0.0, wanted_rps - self.rps) / option.capacity.rps - 1e-9)
        wanted = max(by_rate, self.demand.replicas_floor - self.replicas, 0 if shaky else self.unsteady)
        return max(0, min(wanted, self.entry.max_replicas - self.replicas))

    @property
    def unsteady(self) -> int:
        """Replicas that stand in for those which the on-demand floor wants elsewhere."""
        return max(0, min(self.entry.on_demand_floor, self.replicas) - self.steady)

    def lacking(self) -> Counter[str]:
        """GPUs for what is missing, by the instance types that may have them: of each, as if it had all."""
        gpus: Counter[str] = Counter()
        for option in self.options:
            kind, shape = option.shape.instance_type, option.shape
            gpus[kind] = max(gpus[kind], self.missing(option) * shape.nodes * shape.gpus)
        return gpus

    def up_to(self, tier: int) -> tuple[Option, ...]:
        """The options of a tier and all before it."""
        return tuple(option for option in self.options if option.tier <= tier)

    @property
    def short(self) -> bool:
        """Whether any replica is still needed."""
        return any(self.missing(option) for option in self.options)

    def allows(self, offering: Offering, *, stands: bool = False) -> bool:
        """Whether the policy lets this service use the offering for its next replica, or for one that `stands` there:
        that need not leave because one on demand was lost, only be followed by another.
        """
        entry = self.entry
        return (
            offering.market in entry.markets
            and (not entry.zones or offering.zone in entry.zones)
            and (not entry.instance_types or offering.instance_type in entry.instance_types)
            and (stands or not (offering.market in PREEMPTIBLE and self.steady < entry.on_demand_floor))
        )

    def give(self, option: Option, berths: tuple[Berth, ...]) -> bool:
        """Seat one replica there; False (with the reason noted) when a limit of its unit forbids it and nobody gives
        way.
        """
        seat = Seat(option=option, berths=berths)
        more = More(option.shape.gpus * len(berths), seat.usd_per_h, floor=self.replicas < self.floor)
        refusal = self.purse.refusal(more)
        if refusal is not None and not (self.claims and make_room(self, more)):
            self.note(refusal)
            return False
        self.put_back(seat)
        for berth in berths:
            if berth.pace > 1.0:
                self.note(why(ReasonCode.SLOW_NODE, berth.instance_id, ratio=berth.pace, rps=seat.rps))
        return True

    def put_back(self, seat: Seat) -> None:
        """Seat it without asking for any limit."""
        self.seats.append(seat)
        self._count(seat, 1)

    def take_back(self, seat: Seat) -> None:
        """Undo one `give`."""
        self.seats.remove(seat)
        self._count(seat, -1)

    def _count(self, seat: Seat, sign: int) -> None:
        for berth in seat.berths:
            berth.seats += sign
            berth.free_gpus -= sign * seat.option.shape.gpus
        self.purse.gpus += sign * seat.option.shape.gpus * len(seat.berths)
        self.purse.usd_per_h += sign * seat.usd_per_h
        self.rps += sign * seat.rps
        self.steady += sign * seat.steady

    def note(self, reason: Reason) -> None:
        """Keep a reason once."""
        if all(reason.code is not other.code or reason.subject != other.subject for other in self.reasons):
            self.reasons.append(reason)
