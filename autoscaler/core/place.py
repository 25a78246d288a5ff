"""Where replicas go: onto instances owned, onto instances coming, and what to order when both are full.

Pure; may not do I/O or read a clock. Services are served in order of priority. Each first keeps the places it has (a
replica that stays costs nothing), then takes free GPUs of nodes in the cluster, then of instances still starting, then
orders. Offerings that refused lately are not asked: memory outranks price. TP never spans instances; a replica of
several nodes takes as many instances of one zone, all or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, inf

from .beliefs import Beliefs, Breaker, OfferingBelief
from .berths import CLOSING_S, PREEMPTIBLE, SUNK, Berth, Need, Option, Seat
from .model import Offering
from .reasons import Reason, ReasonCode, why
from .shares import MOVE_WORTH, gives_way, victims

STILLNESS = 0.05  # of the demand: what metrics and learnt constants vary by from tick to tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Instances to ask for: how many, where (best first), for whom and why."""

    service: str
    variant: str
    count: int
    alternates: tuple[str, ...]
    reasons: tuple[Reason, ...]


def place(needs: tuple[Need, ...], shelf: list[Berth], beliefs: Beliefs, now_s: float) -> tuple[Order, ...]:
    """Seat every need, most important first; returns what to order for that.

    `shelf` is sorted by preference, and berths to be launched are added to it.
    """
    shelf.sort(key=_preference)
    for need in needs:
        _keep(need, shelf)
    orders: list[Order] = []
    for need in needs:
        orders += _supply(need, shelf, beliefs, now_s)
    for need in needs:
        _preempt(need, needs, shelf)
    for need in needs:
        _borrow(need, needs, shelf)
    for need in needs:
        need.claims = False
        orders += _upgrade(need, shelf, beliefs, now_s)
    needed = [need.replicas for need in needs]
    for need in needs:
        _linger(need, shelf)
    for need, count in zip(needs, needed, strict=True):
        orders += _return(need, need.replicas - count, shelf, beliefs, now_s)
    return tuple(orders)


def _preference(berth: Berth) -> tuple[bool, bool, float, int, float, str]:
    """In the cluster first, then paid for anyway, cheap, busy (so that the others empty), old."""
    busy = sum(map(len, berth.present.values()))
    return (not berth.joined, not berth.sunk, berth.usd_per_gpu_h, -busy, berth.launched_at_s, berth.instance_id)


def _steady_first(need: Need, shelf: list[Berth]) -> list[Berth]:
    """The shelf, with markets that are not taken back in front while the on-demand floor is unmet."""
    if need.entry.on_demand_floor == 0:
        return shelf
    return sorted(shelf, key=lambda berth: berth.offering.market in PREEMPTIBLE)


def _keep(need: Need, shelf: list[Berth]) -> None:
    """A replica that is there goes only when the demand has fallen clearly below what needs it: noise moves nothing.

    Those that serve are kept before those that load, wherever they are, and of these the better variants.
    """
    standing = list(_present(need, _steady_first(need, shelf), shelf))
    for option, group, _ in sorted(standing, key=lambda row: (not row[2], row[0].tier)):
        if need.missing(option, STILLNESS) and _all_fit(need, option, group) and not need.give(option, group):
            return


def _supply(need: Need, shelf: list[Berth], beliefs: Beliefs, now_s: float) -> list[Order]:
    """Places for what is missing: free GPUs, then launches; in smaller variants where no better one can be had."""
    orders: list[Order] = []
    for tier in sorted({option.tier for option in need.options}):
        if tier and (not need.short or _comes_in_time(need, beliefs, now_s)):
            break
        need.using = need.up_to(tier)
        _grow(need, shelf)
        while (order := _order(need, shelf, beliefs, now_s)) is not None:
            orders.append(order)
    return orders


def _comes_in_time(need: Need, beliefs: Beliefs, now_s: float) -> bool:
    """Whether what its next replicas may be can be there before its queue has waited too long for it."""
    waits = [
        max(0.0, _shut_until_s(offering, beliefs) - now_s) + option.lead_s
        for option in need.using
        for offering in beliefs.offers.values()
        if offering.instance_type == option.shape.instance_type and need.allows(offering)
    ]
    return min(waits, default=inf) < need.queue_s


def _upgrade(need: Need, shelf: list[Berth], beliefs: Beliefs, now_s: float) -> list[Order]:
    """Begin to move from smaller variants back to the best: load that first, leave when it serves (`_keep`)."""
    lesser = [seat for seat in need.seats if seat.option.tier]
    if not lesser:
        return []
    carried, reached = sum(seat.rps for seat in lesser), need.using
    need.note(why(ReasonCode.SMALLER_VARIANT, lesser[0].option.shape.variant, replicas=len(lesser), rps=carried))
    need.using = need.up_to(0)
    need.rps -= carried
    _grow(need, shelf)
    order = _order(need, shelf, beliefs, now_s)
    need.rps += carried
    need.using = reached
    return [] if order is None else [order]


def _borrow(need: Need, ranked: tuple[Need, ...], shelf: list[Berth]) -> None:
    """Beyond its unit's share: on what is paid for anyway, or what others keep for themselves."""
    need.purse.tree.lending = True
    if not (need.short and need.purse.borrows_now):
        return
    kept = [berth for berth in shelf if berth.sunk or berth.seats]
    _stay(need, [berth for berth in kept if berth.free_gpus], lambda option: need.missing(option) > 0)
    _grow(need, kept)
    _preempt(need, ranked, kept)


def _linger(need: Need, shelf: list[Berth]) -> None:
    """Replicas stay where the instance is paid for whether used or not and nobody else was given its place."""
    sunk = [berth for berth in shelf if berth.sunk and berth.free_gpus]
    _stay(need, sunk, lambda _: need.replicas < need.entry.max_replicas)


def _stay(need: Need, shelf: list[Berth], wanted: Callable[[Option], bool]) -> None:
    """Seat replicas that are on the shelf now and have no seat, as long as they are wanted."""
    seated = Counter((seat.option.app, seat.berths[0].instance_id) for seat in need.seats)
    for option, group, _ in _present(need, shelf, shelf):
        key = (option.app, group[0].instance_id)
        if seated[key]:
            seated[key] -= 1
        elif wanted(option) and _all_fit(need, option, group):
            need.give(option, group)


def _return(need: Need, moving: int, shelf: list[Berth], beliefs: Beliefs, now_s: float) -> list[Order]:
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
    open_now, _ = _ranked_offers(need, beliefs, now_s)
    paid = [row for row in open_now if row[3].market in SUNK]
    return [_order_paid(need, leaving - moving, paid)] if paid else []


def _order_paid(need: Need, replicas: int, paid: list[tuple[float, str, Option, Offering]]) -> Order:
    """Instances of reservations for so many replicas; nobody is seated on them before they are there."""
    _, _, option, offering = paid[0]
    return Order(
        service=need.demand.service,
        variant=option.shape.variant,
        count=ceil(replicas * option.shape.nodes / (offering.gpus // option.shape.gpus)),
        alternates=tuple(dict.fromkeys(row[3].offering for row in paid)),
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
    for berth in _steady_first(need, [berth for berth in shelf if berth.free_gpus]):
        for option in need.using:
            while need.missing(option) and (group := _group(need, option, berth, shelf)):
                if not need.give(option, group):
                    return


def _group(need: Need, option: Option, lead: Berth, shelf: list[Berth]) -> tuple[Berth, ...]:
    """Berths for one replica of `option` led from `lead`; empty when there are none."""
    if not _fits(need, option, lead):
        return ()
    if option.shape.nodes == 1:
        return (lead,)
    others = [b for b in shelf if b is not lead and b.offering.zone == lead.offering.zone and _fits(need, option, b)]
    group = (lead, *others[: option.shape.nodes - 1])
    return group if len(group) == option.shape.nodes else ()


def _fits(need: Need, option: Option, berth: Berth) -> bool:
    shape, offering = option.shape, berth.offering
    return shape.instance_type == offering.instance_type and shape.gpus <= berth.free_gpus and need.allows(offering)


def _all_fit(need: Need, option: Option, group: tuple[Berth, ...]) -> bool:
    return all(_fits(need, option, berth) for berth in group)


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
        for option in need.using:
            fitting = offering.gpus // option.shape.gpus
            if offering.instance_type != option.shape.instance_type or fitting == 0 or not need.allows(offering):
                continue
            if not open_for_work(offering, option.lead_s, now_s):
                continue
            if _shut_until_s(offering, beliefs) > now_s:
                cooling[offering.offering] = None
                continue
            price = 0.0 if offering.market in SUNK else offering.price_usd_per_h
            usd_per_h = ceil(need.missing(option) * option.shape.nodes / fitting) * price
            open_now.append((usd_per_h, offering.offering, option, offering))
    return sorted(open_now, key=lambda row: row[:2]), tuple(cooling)


def open_for_work(offering: Offering, lead_s: float, now_s: float) -> bool:
    """Whether the offering exists now, and for so long that its successor need not be ordered yet."""
    if offering.starts_at_s is not None and now_s < offering.starts_at_s:
        return False
    return offering.ends_at_s is None or now_s <= offering.ends_at_s - CLOSING_S - lead_s


def _fill(need: Need, option: Option, offering: Offering, shelf: list[Berth], now_s: float) -> int:
    """Seat the missing replicas on instances yet to be launched; returns how many instances that takes.

    A replica of several nodes uses what is free in the zone first. Stops where the on-demand floor is met, because from
    there on other markets are open.
    """
    count = 0
    to_floor = need.steady < need.entry.on_demand_floor
    room = [b for b in shelf if b.offering.zone == offering.zone and _fits(need, option, b)]
    while need.missing(option) and to_floor == (need.steady < need.entry.on_demand_floor):
        room = [berth for berth in room if _fits(need, option, berth)]
        fresh = [
            Berth(
                instance_id=f"{need.demand.service}+{len(shelf) + n}",
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
        shelf += fresh
        count += len(fresh)
    return count


def _preempt(need: Need, ranked: tuple[Need, ...], shelf: list[Berth]) -> None:
    """As the last resort, GPUs in the cluster of those that give way to this one."""
    for victim, spare in victims(need, ranked) if need.short else ():
        left = victim.replicas - spare
        for option in need.using:
            while need.missing(option) and _evict(need, option, victim, victim.replicas - left, shelf):
                pass
        if not need.short:
            return


def _evict(need: Need, option: Option, victim: Need, spare: int, shelf: list[Berth]) -> bool:
    """Swap the fewest of the victim's replicas, `spare` at most, for one of ours, in one zone; all or nothing."""
    rooms = []
    for berth in shelf:
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
