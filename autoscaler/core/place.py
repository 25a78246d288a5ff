"""Where replicas go: onto instances owned, onto instances coming, and what to order when both are full.

Pure; may not do I/O or read a clock. Services are served in order of priority. Each first keeps the places it has (a
replica that stays costs nothing), then takes free GPUs of nodes in the cluster, then of instances still starting, then
orders. Offerings that refused lately are not asked: memory outranks price. TP never spans instances; a replica of
several nodes takes as many instances of one zone, all or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil

from .beliefs import Beliefs
from .berths import PREEMPTIBLE, SUNK, Berth, Need, Option, Seat
from .hold import Scarcity, held
from .model import Hold, Offering
from .odds import PROBE, Odds
from .rank import Bid, bids, canary, comes_in_s, nowhere, why_shut
from .reasons import Reason, ReasonCode, why
from .shares import MOVE_WORTH, More, gives_way, victims

STILLNESS = 0.05  # of the demand: what metrics and learnt constants vary by from tick to tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Instances to ask for: how many, where (best first), for whom and why."""

    service: str
    variant: str
    count: int
    alternates: tuple[str, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """What a placement asks for: instances to order, and instances that nobody needs and that are kept."""

    orders: tuple[Order, ...]
    holds: tuple[Hold, ...] = ()


class Shelf:
    """The instances with room and those to be launched, by type: a need looks only at what it can use."""

    def __init__(self, berths: Iterable[Berth]) -> None:
        self._by_kind: dict[str, list[Berth]] = {}
        self.size = 0
        self.add(berths)

    def add(self, berths: Iterable[Berth]) -> None:
        """More of them."""
        for berth in berths:
            self._by_kind.setdefault(berth.offering.instance_type, []).append(berth)
            self.size += 1

    def near(self, need: Need) -> list[Berth]:
        """Those of the need's types."""
        return [berth for kind in need.gpus_per_rps for berth in self._by_kind.get(kind, ())]


def place(needs: tuple[Need, ...], berths: Iterable[Berth], beliefs: Beliefs, now_s: float) -> Placed:
    """Seat every need, most important first; returns what to order for that, and what is held."""
    odds, shelf = Odds(beliefs, now_s), Shelf(berths)
    for need in needs:
        _keep(need, shelf.near(need))
    orders: list[Order] = []
    lacking = [need.lacking() for need in needs]
    waiting: Counter[str] = Counter()
    for mine in lacking:
        waiting.update(mine)
    for need, mine in zip(needs, lacking, strict=True):
        waiting.subtract(mine)
        need.waiting = waiting
        orders += _supply(need, needs, shelf, beliefs, odds, now_s)
    for need in needs:
        _preempt(need, needs, shelf)
    for need in needs:
        _borrow(need, needs, shelf)
    probes = (_probe(need, beliefs, odds, now_s) for need in needs)
    orders += [order for order in probes if order is not None]
    for need in needs:
        need.claims = False
        orders += _upgrade(need, shelf, beliefs, odds, now_s)
    needed = [need.replicas for need in needs]
    holds: list[Hold] = []
    for need in needs:
        holds += _hold(need, shelf.near(need), beliefs, odds, now_s)
    for need in needs:
        _linger(need, shelf.near(need))
    for need, count in zip(needs, needed, strict=True):
        orders += _return(need, need.replicas - count, shelf.near(need), beliefs, odds, now_s)
    return Placed(tuple(orders), tuple(holds))


def _keep(need: Need, shelf: list[Berth]) -> None:
    """A replica that is there goes only when the demand has fallen clearly below what needs it: noise moves nothing.

    Those that serve are kept before those that load, wherever they are, and of these the better variants.
    """
    standing = list(_present(need, need.order(shelf), shelf))
    for option, group, _ in sorted(standing, key=lambda row: (not row[2], row[0].tier)):
        shaky = any(berth.offering.market in PREEMPTIBLE for berth in group)
        fits = all(_fits(need, option, berth, stands=True) for berth in group)
        if fits and need.missing(option, STILLNESS, shaky=shaky) and not need.give(option, group):
            return


def _supply(
    need: Need, ranked: tuple[Need, ...], shelf: Shelf, beliefs: Beliefs, odds: Odds, now_s: float
) -> list[Order]:
    """Places for what is missing: free GPUs; where the unit has no more, those of who gives way (that is a load, where
    an order is a boot as well); then launches. In smaller variants where no better one can be had.
    """
    orders: list[Order] = []
    for tier in sorted({option.tier for option in need.options}):
        if tier and (not need.short or comes_in_s(need, beliefs, now_s) < need.queue_s):
            break
        need.using = need.up_to(tier)
        _grow(need, shelf.near(need) if need.short else [])
        if need.short and _full(need):
            _preempt(need, ranked, shelf)
        while (order := _order(need, shelf, beliefs, odds, now_s)) is not None:
            orders.append(order)
    return orders


def _upgrade(need: Need, shelf: Shelf, beliefs: Beliefs, odds: Odds, now_s: float) -> list[Order]:
    """Begin to move from smaller variants back to the best: load that first, leave when it serves (`_keep`)."""
    lesser = [seat for seat in need.seats if seat.option.tier]
    if not lesser:
        return []
    carried, reached = sum(seat.rps for seat in lesser), need.using
    need.note(why(ReasonCode.SMALLER_VARIANT, lesser[0].option.shape.variant, replicas=len(lesser), rps=carried))
    need.using = need.up_to(0)
    need.rps -= carried
    _grow(need, shelf.near(need))
    order = _order(need, shelf, beliefs, odds, now_s)
    need.rps += carried
    need.using = reached
    return [] if order is None else [order]


def _borrow(need: Need, ranked: tuple[Need, ...], shelf: Shelf) -> None:
    """Beyond its unit's share: on what is paid for anyway, or what others keep for themselves."""
    need.purse.tree.lending = True
    if not (need.short and need.purse.borrows_now):
        return
    kept = [berth for berth in shelf.near(need) if berth.sunk or berth.seats]
    _stay(need, [berth for berth in kept if berth.free_gpus], lambda option: need.missing(option) > 0)
    _grow(need, kept)
    _preempt(need, ranked, Shelf(kept))


def _hold(need: Need, shelf: list[Berth], beliefs: Beliefs, odds: Odds, now_s: float) -> list[Hold]:
    """Replicas stay on instances that nobody else was given while the hold rule says so."""
    free = [berth for berth in shelf if berth.joined and not berth.sunk and not berth.seats]
    idle: dict[tuple[str, ...], list[tuple[Option, tuple[Berth, ...]]]] = {}
    for option, group, _ in _present(need, need.order(free), free):
        idle.setdefault(tuple(berth.instance_id for berth in group), []).append((option, group))
    if not idle:
        return []
    scarcity = Scarcity(need, odds, now_s)
    before = beliefs.last_plan.holds if beliefs.last_plan is not None else ()
    since_s = {row.instance_id: row.since_s for row in before}
    holds: list[Hold] = []
    for rows in idle.values():
        option, group = rows[0]
        usd_per_h = sum(berth.offering.price_usd_per_h for berth in group)
        limit_s = scarcity.hold_s(group[0].offering, sum(o.capacity.rps for o, _ in rows), usd_per_h)
        kept = held(need, group, since_s, limit_s, now_s)
        room = need.replicas < need.entry.max_replicas and _all_fit(need, option, group)
        if kept and room and need.give(option, group):  # its neighbours stay with it (_linger)
            holds += kept
    return holds


def _linger(need: Need, shelf: list[Berth]) -> None:
    """Replicas stay where the instance stays anyway and nobody else was given their GPUs."""
    staying = [berth for berth in shelf if berth.free_gpus and (berth.sunk or berth.seats)]
    _stay(need, staying, lambda _: need.replicas < need.entry.max_replicas)


def _stay(need: Need, shelf: list[Berth], wanted: Callable[[Option], bool]) -> None:
    """Seat replicas that are on the shelf now and have no seat, as long as they are wanted."""
    seated = Counter((seat.option.app, seat.berths[0].instance_id) for seat in need.seats)
    for option, group, _ in _present(need, need.order(shelf), shelf):
        key = (option.app, group[0].instance_id)
        if seated[key]:
            seated[key] -= 1
        elif wanted(option) and _all_fit(need, option, group):
            need.give(option, group)


def _return(need: Need, moving: int, shelf: list[Berth], beliefs: Beliefs, odds: Odds, now_s: float) -> list[Order]:
    """Begin to move from what is paid by use to what is paid for anyway: load there first, leave when that serves.

    A successor is one replica more than the demand until it is ready; then `_keep` prefers it, and the other goes.
    `moving` of them are on their way.
    """
    leaving = sum(not seat.sunk for seat in need.seats)
    sunk = [berth for berth in shelf if berth.sunk and berth.joined and berth.free_gpus]
    for berth in sunk:
        for option in need.options:
            while moving < leaving and need.replicas < need.entry.max_replicas:
                group = _group(need, option, berth, sunk)
                if not group or not need.give(option, group):
                    break
                moving += 1
    coming = any(berth.sunk and not berth.joined for berth in shelf)
    if moving >= leaving or coming or need.replicas >= need.entry.max_replicas:
        return []
    if not any(offering.market in SUNK for kind in need.gpus_per_rps for offering in odds.offers(kind)):
        return []
    open_now, _ = bids(need, beliefs, odds, now_s)
    # A reservation that refused is full of ours where any runs there: it is not asked again like one that is dry.
    ours = {berth.offering.offering for berth in shelf}
    paid = [
        bid
        for bid in open_now
        if bid.offering.market in SUNK and (bid.offering.offering not in ours or odds.ended(bid.offering) >= PROBE)
    ]
    return [_order_paid(need, leaving - moving, paid)] if paid else []


def _order_paid(need: Need, replicas: int, paid: list[Bid]) -> Order:
    """Instances of reservations for so many replicas; nobody is seated on them before they are there."""
    option, offering = paid[0].option, paid[0].offering
    return Order(
        service=need.demand.service,
        variant=option.shape.variant,
        count=ceil(replicas * option.shape.nodes / (offering.gpus // option.shape.gpus)),
        alternates=tuple(dict.fromkeys(bid.offering.offering for bid in paid)),
        reasons=(why(ReasonCode.PAID_ANYWAY, offering.offering, replicas=replicas),),
    )


def _present(need: Need, leads: list[Berth], shelf: list[Berth]) -> Iterator[tuple[Option, tuple[Berth, ...], bool]]:
    """The replicas of `need` that are wholly on the shelf now, with their berths and whether they serve, led from
    `leads` in that order.
    """
    by_id: dict[str, Berth] = {}
    mine = {option.app for option in need.options}
    for berth in leads:
        if mine.isdisjoint(berth.present):
            continue
        for option in need.options:
            for number, others in enumerate(berth.present.get(option.app, ())):
                if others and not by_id:
                    by_id = {one.instance_id: one for one in shelf}
                group = (berth, *(by_id[other] for other in others if other in by_id))
                if len(group) == 1 + len(others):
                    yield option, group, number < berth.ready.get(option.app, 0)


def _grow(need: Need, shelf: list[Berth]) -> None:
    if not need.short:
        return
    refused: set[str] = set()  # beyond a limit of its unit: a smaller one may be within
    for berth in need.order([berth for berth in shelf if berth.free_gpus]):
        for option in need.using:
            while option.app not in refused and need.missing(option) and (group := _group(need, option, berth, shelf)):
                if not need.give(option, group):
                    refused.add(option.app)


def _group(need: Need, option: Option, lead: Berth, shelf: list[Berth]) -> tuple[Berth, ...]:
    """Berths for one replica of `option` led from `lead`; empty when there are none."""
    if not _fits(need, option, lead):
        return ()
    if option.shape.nodes == 1:
        return (lead,)
    others = [b for b in shelf if b is not lead and b.offering.zone == lead.offering.zone and _fits(need, option, b)]
    group = (lead, *others[: option.shape.nodes - 1])
    return group if len(group) == option.shape.nodes else ()


def _fits(need: Need, option: Option, berth: Berth, *, stands: bool = False) -> bool:
    shape, offering = option.shape, berth.offering
    holds = shape.instance_type == offering.instance_type and shape.gpus <= berth.free_gpus
    return holds and need.allows(offering, stands=stands)


def _all_fit(need: Need, option: Option, group: tuple[Berth, ...]) -> bool:
    return all(_fits(need, option, berth) for berth in group)


def _order(need: Need, shelf: Shelf, beliefs: Beliefs, odds: Odds, now_s: float) -> Order | None:
    """What to launch for a need that owned and starting instances cannot hold; its replicas are placed on it at
    once.
    """
    if not need.short:
        return None
    open_now, shut = bids(need, beliefs, odds, now_s)
    if not open_now:
        need.note(nowhere(shut, beliefs, now_s))
        return None
    refused: set[str] = set()  # beyond a limit of its unit: a smaller one may be within
    for best in open_now:
        count = 0 if best.option.app in refused else _fill(need, best.option, best.offering, shelf, now_s)
        if count:
            break
        refused.add(best.option.app)
    else:
        return None
    open_now = [bid for bid in open_now if bid.option.app not in refused]
    cheapest = why(
        ReasonCode.CHEAPEST,
        best.offering.offering,
        usd_per_h=best.usd_per_h,
        expected_usd=best.usd,
        odds=odds.grant(best.offering),
        offerings=len(open_now),
    )
    skipped = tuple(why_shut(offering, beliefs, now_s) for offering in shut)
    alternates = tuple(dict.fromkeys(bid.offering.offering for bid in open_now))
    return Order(
        service=need.demand.service,
        variant=best.option.shape.variant,
        count=count,
        alternates=alternates,
        reasons=(cheapest, *skipped),
    )


def _probe(need: Need, beliefs: Beliefs, odds: Odds, now_s: float) -> Order | None:
    """One instance of a pool that cools, when all do and the need waits. Nobody counts on it before it is granted."""
    if need.pressing < 1.0 or not need.short or not need.options:
        return None
    open_now, shut = bids(need, beliefs, odds, now_s)
    asked = canary(need, shut, beliefs, odds, now_s) if not open_now else None
    if asked is None:
        return None
    option = next(option for option in need.using if option.shape.instance_type == asked.instance_type)
    reason = why(ReasonCode.PROBE, asked.offering, odds=odds.ended(asked))
    service, variant = need.demand.service, option.shape.variant
    return Order(service=service, variant=variant, count=1, alternates=(asked.offering,), reasons=(reason,))


def _fill(need: Need, option: Option, offering: Offering, shelf: Shelf, now_s: float) -> int:
    """Seat the missing replicas on instances yet to be launched; returns how many instances that takes.

    A replica of several nodes uses what is free in the zone first. Stops where the on-demand floor is met, because from
    there on other markets are open.
    """
    count = 0
    to_floor = need.steady < need.entry.on_demand_floor
    room = [b for b in shelf.near(need) if b.offering.zone == offering.zone and _fits(need, option, b)]
    while need.missing(option) and to_floor == (need.steady < need.entry.on_demand_floor):
        room = [berth for berth in room if _fits(need, option, berth)]
        fresh = [
            Berth(
                instance_id=f"{need.demand.service}+{shelf.size + n}",
                offering=offering,
                joined=False,
                launched_at_s=now_s,
                present={},
            )
            for n in range(option.shape.nodes - len(room))
        ]
        group = (*room, *fresh)[: option.shape.nodes]
        if not _all_fit(need, option, group) or not need.give(option, group):
            break
        room += fresh
        shelf.add(fresh)
        count += len(fresh)
    return count


def _preempt(need: Need, ranked: tuple[Need, ...], shelf: Shelf) -> None:
    """GPUs in the cluster of those that give way to this one."""
    kinds = {option.shape.instance_type for option in need.using}
    near = need.purse.needs if _full(need) else ranked  # in a full unit another unit's GPUs are of no use
    for victim, spare in victims(need, near) if need.short else ():
        if kinds.isdisjoint(victim.gpus_per_rps):
            continue
        left = victim.replicas - spare
        for option in need.using:
            while need.missing(option) and _evict(need, option, victim, victim.replicas - left, shelf):
                pass
        if not need.short:
            return


def _full(need: Need) -> bool:
    """Whether its unit's share has no room for even the smallest replica."""
    least = min((option.shape.gpus * option.shape.nodes for option in need.using), default=0)
    return need.purse.refusal(More(least, 0.0)) is not None


def _evict(need: Need, option: Option, victim: Need, spare: int, shelf: Shelf) -> bool:
    """Swap the fewest of the victim's replicas, `spare` at most, for one of ours, in one zone; all or nothing."""
    rooms = []
    theirs = sorted({berth for seat in victim.seats for berth in seat.berths}, key=lambda berth: berth.instance_id)
    for berth in theirs if option.shape.nodes == 1 else shelf.near(need):
        if berth.joined and berth.offering.instance_type == option.shape.instance_type and need.allows(berth.offering):
            losers = _losers(need, option, victim, berth)
            if losers is not None:
                rooms.append((berth, losers))
    rooms.sort(key=lambda row: len(row[1]))
    for lead, _ in rooms:
        chosen = [row for row in rooms if row[0].offering.zone == lead.offering.zone][: option.shape.nodes]
        losing = list(dict.fromkeys(seat for _, losers in chosen for seat in losers))
        if len(chosen) == option.shape.nodes and 0 < len(losing) <= spare:
            return _swap(need, option, victim, tuple(berth for berth, _ in chosen), losing)
    return False


def _losers(need: Need, option: Option, victim: Need, berth: Berth) -> list[Seat] | None:
    """Replicas of the victim whose going makes room for one of `option` on the berth; None when that cannot be."""
    lacking = option.shape.gpus - berth.free_gpus
    losers: list[Seat] = []
    for seat in victim.seats:
        if lacking <= 0:
            break
        if berth in seat.berths and gives_way(victim, seat, need, MOVE_WORTH):
            losers.append(seat)
            lacking -= seat.option.shape.gpus
    return losers if lacking <= 0 else None


def _swap(need: Need, option: Option, victim: Need, berths: tuple[Berth, ...], losing: list[Seat]) -> bool:
    for seat in losing:
        victim.take_back(seat)
    if not need.give(option, berths):
        for seat in losing:
            victim.put_back(seat)
        return False
    victim.note(why(ReasonCode.PREEMPTED, need.demand.service, replicas=len(losing), priority=need.entry.priority))
    return True
