"""Where replicas go: onto instances owned, onto instances coming, and what to order when both are full.

Pure; may not do I/O or read a clock. Services are served in order of priority. Each first keeps the places it has (a
replica that stays costs nothing), then takes free GPUs of nodes in the cluster, then of instances still starting, then
orders. Offerings that refused lately are not asked: memory outranks price. TP never spans instances.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil

from policies.model import Service, Unit
from serve_apps.wire import app_name

from .beliefs import Beliefs, Breaker, OfferingBelief
from .capacity import Capacity
from .model import Demand, Offering, Shape
from .reasons import Reason, ReasonCode, why

CLOSING_S = 2400.0  # a Capacity Block takes no new work from 40 minutes before its end
SUNK = frozenset({"odcr", "block"})  # paid for whether used or not
PREEMPTIBLE = frozenset({"spot", "interruptible"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to serve a service: a variant's shape and what a replica of it carries."""

    shape: Shape
    capacity: Capacity

    @property
    def app(self) -> str:
        """The Serve application of this variant."""
        return app_name(self.shape.service, self.shape.variant)


@dataclass(slots=True, kw_only=True)
class Berth:
    """A usable instance and who is given its GPUs. `present` counts the replicas that are on it now, by application."""

    instance_id: str
    offering: Offering
    joined: bool
    launched_at_s: float
    present: dict[str, int]
    given: dict[str, int] = field(default_factory=dict)
    free_gpus: int = 0

    def __post_init__(self) -> None:
        self.free_gpus = self.offering.gpus

    @property
    def usd_per_gpu_h(self) -> float:
        """Price of one of its GPUs."""
        return self.offering.price_usd_per_h / max(1, self.offering.gpus)


@dataclass(slots=True, kw_only=True)
class Purse:
    """What a unit may still take in this plan. None means no limit."""

    unit: Unit
    gpus: int = 0
    usd_per_h: float = 0.0

    def refusal(self, gpus: int, usd_per_h: float) -> Reason | None:
        """The limit that one more replica would break, if any."""
        quota, budget = self.unit.quota_gpus, self.unit.budget_usd_per_h
        if quota is not None and self.gpus + gpus > quota:
            return why(ReasonCode.QUOTA_GPUS, self.unit.unit, quota_gpus=quota, wanted_gpus=self.gpus + gpus)
        if budget is not None and self.usd_per_h + usd_per_h > budget:
            planned = self.usd_per_h + usd_per_h
            return why(ReasonCode.BUDGET, self.unit.unit, budget_usd_per_h=budget, planned_usd_per_h=planned)
        return None


@dataclass(slots=True, kw_only=True)
class Need:
    """One service's demand while it is being placed."""

    demand: Demand
    entry: Service
    purse: Purse
    options: tuple[Option, ...]
    rps: float = 0.0
    replicas: int = 0
    steady: int = 0  # replicas on markets that are not taken back
    reasons: list[Reason] = field(default_factory=list)

    def missing(self, option: Option) -> int:
        """Replicas of `option` still needed, within the policy's bounds."""
        by_rate = ceil(max(0.0, self.demand.arrival_rps - self.rps) / option.capacity.rps - 1e-9)
        wanted = max(by_rate, self.demand.replicas_floor - self.replicas)
        return max(0, min(wanted, self.entry.max_replicas - self.replicas))

    @property
    def short(self) -> bool:
        """Whether any replica is still needed."""
        return any(self.missing(option) for option in self.options)

    def allows(self, offering: Offering) -> bool:
        """Whether the policy lets this service use the offering for its next replica."""
        entry = self.entry
        return (
            offering.market in entry.markets
            and (not entry.zones or offering.zone in entry.zones)
            and (not entry.instance_types or offering.instance_type in entry.instance_types)
            and not (offering.market in PREEMPTIBLE and self.steady < entry.on_demand_floor)
        )

    def give(self, option: Option, berth: Berth) -> bool:
        """Put one replica on the berth; False (with the reason noted) when a limit of its unit forbids it."""
        gpus = option.shape.gpus
        refusal = self.purse.refusal(gpus, gpus * berth.usd_per_gpu_h)
        if refusal is not None:
            self.note(refusal)
            return False
        self.purse.gpus += gpus
        self.purse.usd_per_h += gpus * berth.usd_per_gpu_h
        self._count(option, berth, 1)
        return True

    def take_back(self, option: Option, berth: Berth) -> None:
        """Undo one `give`."""
        self.purse.gpus -= option.shape.gpus
        self.purse.usd_per_h -= option.shape.gpus * berth.usd_per_gpu_h
        self._count(option, berth, -1)

    def _count(self, option: Option, berth: Berth, sign: int) -> None:
        berth.given[option.app] = berth.given.get(option.app, 0) + sign
        berth.free_gpus -= sign * option.shape.gpus
        self.rps += sign * option.capacity.rps
        self.replicas += sign
        self.steady += sign * (berth.offering.market not in PREEMPTIBLE)

    def note(self, reason: Reason) -> None:
        """Keep a reason once."""
        if all(reason.code is not other.code or reason.subject != other.subject for other in self.reasons):
            self.reasons.append(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Instances to ask for: how many, where (best first), for whom and why."""

    service: str
    variant: str
    count: int
    alternates: tuple[str, ...]
    reasons: tuple[Reason, ...]


def place(
    needs: Iterable[Need], berths: list[Berth], beliefs: Beliefs, now_s: float
) -> tuple[tuple[Order, ...], tuple[Need, ...]]:
    """Give every need (most important first) its places; returns the orders and the needs as they stand.

    `berths` is sorted by preference, and berths to be launched are added to it.
    """
    ranked = tuple(needs)
    berths.sort(key=_preference)
    shelf = berths
    for need in ranked:
        _keep(need, shelf)
    orders: list[Order] = []
    for need in ranked:
        _grow(need, shelf)
        while (order := _order(need, shelf, beliefs, now_s)) is not None:
            orders.append(order)
    for need in ranked:
        _preempt(need, ranked, shelf)
    return tuple(orders), ranked


def _preference(berth: Berth) -> tuple[bool, float, int, float, str]:
    """In the cluster first, then cheap, then busy (so that the others empty), then old."""
    busy = sum(berth.present.values())
    return (not berth.joined, berth.usd_per_gpu_h, -busy, berth.launched_at_s, berth.instance_id)


def _steady_first(need: Need, shelf: list[Berth]) -> list[Berth]:
    """The shelf, with markets that are not taken back in front while the on-demand floor is unmet."""
    if need.entry.on_demand_floor == 0:
        return shelf
    return sorted(shelf, key=lambda berth: berth.offering.market in PREEMPTIBLE)


def _keep(need: Need, shelf: list[Berth]) -> None:
    mine = {option.app for option in need.options}
    for berth in _steady_first(need, [berth for berth in shelf if not mine.isdisjoint(berth.present)]):
        for option in need.options:
            for _ in range(berth.present.get(option.app, 0)):
                if need.missing(option) and _fits(need, option, berth) and not need.give(option, berth):
                    return


def _grow(need: Need, shelf: list[Berth]) -> None:
    if not need.short:
        return
    for berth in _steady_first(need, [berth for berth in shelf if berth.free_gpus]):
        for option in need.options:
            while need.missing(option) and _fits(need, option, berth):
                if not need.give(option, berth):
                    return


def _fits(need: Need, option: Option, berth: Berth) -> bool:
    shape, offering = option.shape, berth.offering
    return shape.instance_type == offering.instance_type and shape.gpus <= berth.free_gpus and need.allows(offering)


def _order(need: Need, shelf: list[Berth], beliefs: Beliefs, now_s: float) -> Order | None:
    """What to launch for a need that owned and starting instances cannot hold; its replicas are placed on it at
    once.
    """
    if not need.short:
        return None
    open_now, cooling = _ranked_offers(need, beliefs, now_s)
    if not open_now:
        need.note(_nowhere(cooling, beliefs, now_s))
        return None
    usd_per_h, _, option, offering = open_now[0]
    count = _fill(need, option, offering, shelf, now_s)
    if count == 0:
        return None
    cheapest = why(ReasonCode.CHEAPEST, offering.offering, usd_per_h=usd_per_h, offerings=len(open_now))
    skipped = tuple(_shut(name, beliefs, now_s) for name in cooling)
    alternates = tuple(dict.fromkeys(row[3].offering for row in open_now))
    return Order(
        service=need.demand.service,
        variant=option.shape.variant,
        count=count,
        alternates=alternates,
        reasons=(cheapest, *skipped),
    )


def _ranked_offers(
    need: Need, beliefs: Beliefs, now_s: float
) -> tuple[list[tuple[float, str, Option, Offering]], tuple[str, ...]]:
    """Open offerings by the $/h that would meet the need, and the names of those that are cooling down."""
    open_now: list[tuple[float, str, Option, Offering]] = []
    cooling: dict[str, None] = {}
    for offering in sorted(beliefs.offers.values(), key=lambda o: o.offering):
        for option in need.options:
            fitting = offering.gpus // option.shape.gpus
            if offering.instance_type != option.shape.instance_type or fitting == 0 or not need.allows(offering):
                continue
            if offering.ends_at_s is not None and now_s > offering.ends_at_s - CLOSING_S:
                continue
            if _shut_until_s(offering, beliefs) > now_s:
                cooling[offering.offering] = None
                continue
            price = 0.0 if offering.market in SUNK else offering.price_usd_per_h
            usd_per_h = ceil(need.missing(option) / fitting) * price
            open_now.append((usd_per_h, offering.offering, option, offering))
    return sorted(open_now, key=lambda row: row[:2]), tuple(cooling)


def _fill(need: Need, option: Option, offering: Offering, shelf: list[Berth], now_s: float) -> int:
    """Put the missing replicas on instances yet to be launched; returns how many instances that takes.

    Stops where the on-demand floor is met, because from there on other markets are open.
    """
    count = 0
    to_floor = need.steady < need.entry.on_demand_floor
    while need.missing(option) and to_floor == (need.steady < need.entry.on_demand_floor):
        berth = Berth(
            instance_id=f"{need.demand.service}+{len(shelf)}",
            offering=offering,
            joined=False,
            launched_at_s=now_s,
            present={},
        )
        while need.missing(option) and _fits(need, option, berth) and need.give(option, berth):
            pass
        if not berth.given:
            break
        shelf.append(berth)
        count += 1
    return count


def _preempt(need: Need, ranked: tuple[Need, ...], shelf: list[Berth]) -> None:
    """As the last resort, GPUs in the cluster of the least important services that matter less than this one."""
    for victim in reversed(ranked):
        if victim.entry.priority >= need.entry.priority or not need.short:
            return
        if victim.replicas:
            _take_from(need, victim, shelf)


def _take_from(need: Need, victim: Need, shelf: list[Berth]) -> None:
    theirs = {option.app for option in victim.options}
    for berth in shelf:
        if berth.joined and not theirs.isdisjoint(berth.given):
            for option in need.options:
                while need.missing(option) and _evict(need, option, victim, berth):
                    pass


def _evict(need: Need, option: Option, victim: Need, berth: Berth) -> bool:
    """Swap as many of the victim's replicas on the berth as one of ours needs; all or nothing."""
    loser = next((o for o in victim.options if berth.given.get(o.app, 0)), None)
    if loser is None or berth.offering.instance_type != option.shape.instance_type or not need.allows(berth.offering):
        return False
    lacking = option.shape.gpus - berth.free_gpus
    swaps = ceil(lacking / loser.shape.gpus)
    if swaps > berth.given[loser.app]:
        return False
    for _ in range(swaps):
        victim.take_back(loser, berth)
    if not need.give(option, berth):
        for _ in range(swaps):
            victim.give(loser, berth)
        return False
    victim.note(why(ReasonCode.PREEMPTED, need.demand.service, replicas=swaps, priority=need.entry.priority))
    return True


def _nowhere(cooling: tuple[str, ...], beliefs: Beliefs, now_s: float) -> Reason:
    if not cooling:
        return why(ReasonCode.NOWHERE_TO_LAUNCH, offerings=0)
    until_s = min(_shut_until_s(beliefs.offers[name], beliefs) for name in cooling)
    return why(ReasonCode.ONLY_COOLING_LEFT, offerings=len(cooling), until_s=until_s, wait_s=until_s - now_s)


def _shut_until_s(offering: Offering, beliefs: Beliefs) -> float:
    """Until when the offering is not asked: it refused, or instances of its type do not get up."""
    cooling = beliefs.offerings.get(offering.offering, OfferingBelief()).cool_until_s
    return max(cooling, beliefs.breakers.get(offering.instance_type, Breaker()).open_until_s)


def _shut(name: str, beliefs: Beliefs, now_s: float) -> Reason:
    kind = beliefs.offers[name].instance_type
    breaker = beliefs.breakers.get(kind, Breaker())
    if breaker.open_until_s > now_s:
        return why(ReasonCode.BREAKER_OPEN, kind, strikes=breaker.strikes, until_s=breaker.open_until_s)
    belief = beliefs.offerings[name]
    return why(ReasonCode.COOLING_DOWN, name, refusals=belief.refusals_in_row, until_s=belief.cool_until_s)
