"""Whose GPUs: what each unit may take, what units lend each other, and who gives way to whom.

May not do I/O or read a clock. The company is the root of the tree, units are below it, services are its leaves.
`quota_gpus` is a unit's nominal share, and within it the unit buys. What a unit does not hold of its share it lends,
within `lends`; beyond its share a unit uses what is there anyway, within `borrows` and what others lend, and buys
nothing. A plan is made within the shares first, and loans come after: so all units together never hold more than the
sum of their shares, nobody's bill grows by what others leave, and what is lent comes back when its owner asks for it.
Money is not lent.

When a limit binds, whoever is more deserving takes the place: the more important service, and among equals the one that
is served the smaller part of its demand, measured by the fraction it promises. Floors go last. `Tree` and `Purse`
change while one plan is made and live no longer than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from policies.model import Unit

from .reasons import Reason, ReasonCode, why

if TYPE_CHECKING:
    from .berths import Need, Seat

MOVE_WORTH = 0.1  # of a promise: for less, equals do not take a place whose successor has to load first
FLOOR_LEVEL = -1.0


class More(NamedTuple):
    """What one more replica takes. `floor`: the policy wants it whatever it costs a month."""

    gpus: int
    usd_per_h: float
    floor: bool = False


NOTHING = More(0, 0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class Tree:
    """All units of one plan. `lending` from when everything within the shares has its place."""

    purses: list[Purse] = field(default_factory=list)
    lending: bool = False

    def lacking(self, purse: Purse, gpus: int) -> int:
        """GPUs that would be held on loan and that nobody lends, were `purse` to take `gpus` more."""
        borrowed = lent = 0
        for each in self.purses:
            held = each.gpus + (gpus if each is purse else 0)
            borrowed += each.over(held)
            lent += each.lends(held)
        return max(0, borrowed - lent)

    def needs(self) -> Iterator[Need]:
        """Every service."""
        for purse in self.purses:
            yield from purse.needs


@dataclass(slots=True, kw_only=True, eq=False)
class Purse:
    """What a unit holds in this plan, of GPUs and of money. None means no limit.

    `pace_usd_per_h` is the rate at which what is left of the month's budget lasts for what is left of the month; only
    floors may exceed it.
    """

    unit: Unit
    tree: Tree = field(default_factory=Tree)
    pace_usd_per_h: float | None = None
    gpus: int = 0
    usd_per_h: float = 0.0
    needs: list[Need] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree.purses.append(self)

    def over(self, held: int) -> int:
        """GPUs beyond the unit's share, of `held`."""
        quota = self.unit.quota_gpus
        return 0 if quota is None else max(0, held - quota)

    @property
    def borrows_now(self) -> bool:
        """Whether the unit's next GPU is, or its last one was, beyond its share."""
        return self.tree.lending and self.over(self.gpus + 1) > 0

    def lends(self, held: int) -> int:
        """GPUs of the unit's share that others may hold while it holds `held`."""
        quota = self.unit.quota_gpus
        if quota is None:
            return 0
        return min(limit_gpus(self.unit.lends, quota), max(0, quota - held))

    def refusal(self, more: More) -> Reason | None:
        """The limit that one more replica would break, if any."""
        return self._quota(more.gpus) or self._budget(more.usd_per_h, floor=more.floor)

    def _quota(self, gpus: int) -> Reason | None:
        quota, held = self.unit.quota_gpus, self.gpus + gpus
        borrowed = self.over(held)
        if quota is None or not (borrowed or self.tree.lending):
            return None
        if borrowed > (limit_gpus(self.unit.borrows, borrowed) if self.tree.lending else 0):
            return why(ReasonCode.QUOTA_GPUS, self.unit.unit, quota_gpus=quota, wanted_gpus=held)
        lacking = self.tree.lacking(self, gpus)
        if lacking:
            lent = max(0, borrowed - lacking)
            return why(ReasonCode.QUOTA_GPUS, self.unit.unit, quota_gpus=quota, wanted_gpus=held, lent_gpus=lent)
        return None

    def _budget(self, usd_per_h: float, *, floor: bool) -> Reason | None:
        budget, pace, planned = self.unit.budget_usd_per_h, self.pace_usd_per_h, self.usd_per_h + usd_per_h
        if budget is not None and planned > budget:
            return why(ReasonCode.BUDGET, self.unit.unit, budget_usd_per_h=budget, planned_usd_per_h=planned)
        if pace is not None and planned > pace and not floor and usd_per_h > 0.0:
            return why(ReasonCode.BUDGET_MONTH, self.unit.unit, pace_usd_per_h=pace, planned_usd_per_h=planned)
        return None


def limit_gpus(allowed: bool | int, most: int) -> int:
    """The GPUs that a policy's `lends` or `borrows` allows: none, any (`most`), or a number."""
    return (most if allowed else 0) if isinstance(allowed, bool) else min(allowed, most)


# ---- who gives way --------------------------------------------------------------------------------------------------
def level(need: Need, without: Seat | None = None) -> float:
    """How much of its promise a service is given: the share of its demand that is carried ÷ the fraction promised.

    `without` leaves one of its places out. Below its floor nobody is less served.
    """
    seats = need.replicas - (without is not None)
    if seats < need.floor:
        return FLOOR_LEVEL
    rps = need.rps - (without.rps if without is not None else 0.0)
    demand = need.demand.arrival_rps
    return (rps / demand if demand > 0.0 else 1.0) / need.entry.slo.fraction


def gives_way(holder: Need, seat: Seat, claimant: Need, margin: float = 0.0) -> bool:
    """Whether `holder` must leave `seat` to `claimant`.

    Who lives within its share leaves nothing to a unit that would hold more than its own. Otherwise the more important
    service takes it. Among equals the place goes to whom it is worth more: its owner without it would still be better
    served than the claimant is now, by `margin`. A tie goes to the first by name, so that the order of asking never
    matters.
    """
    if holder is claimant:
        return False
    if claimant.purse.borrows_now and not holder.purse.over(holder.purse.gpus):
        return False
    if holder.entry.priority != claimant.entry.priority:
        return holder.entry.priority < claimant.entry.priority
    kept, wanted = level(holder, seat), level(claimant) + margin
    return kept > wanted or (kept == wanted and claimant.demand.service < holder.demand.service)


def make_room(claimant: Need, more: More) -> bool:
    """Takes back the fewest places of who gives way, until the limits of the claimant's unit admit one more replica.

    Within the unit anyone may have to; of another unit only who holds more than its share. All or nothing: False, and
    nothing has changed, when that does not help.
    """
    taken: list[tuple[Need, Seat]] = []
    for holder, seat in _candidates(claimant):
        if not gives_way(holder, seat, claimant):
            continue
        holder.take_back(seat)
        taken.append((holder, seat))
        if claimant.purse.refusal(more) is None:
            _spare(claimant, taken, more)
            for holder, _ in taken:
                _note(holder, claimant, sum(each is holder for each, _ in taken))
            return True
    for holder, seat in reversed(taken):
        holder.put_back(seat)
    return False


def _candidates(claimant: Need) -> list[tuple[Need, Seat]]:
    """Places that may be taken for a limit, the least worth keeping first: beyond floors, of the least important, of
    the best served, and those that do not serve yet.
    """
    rows = []
    priority = claimant.entry.priority
    purses = [purse for purse in claimant.purse.tree.purses if purse is claimant.purse or purse.over(purse.gpus)]
    for holder in [holder for purse in purses for holder in purse.needs if holder.seats]:
        if holder is claimant or holder.entry.priority > priority:  # who is more important never gives way
            continue
        for number, seat in enumerate(holder.seats):
            protected = number < holder.floor
            key = (protected, holder.entry.priority, -level(holder), seat.joined, holder.demand.service, -number)
            rows.append((key, holder, seat))
    rows.sort(key=lambda row: row[0])
    return [(holder, seat) for _, holder, seat in rows]


def _spare(claimant: Need, taken: list[tuple[Need, Seat]], more: More) -> None:
    """Gives back what was taken in vain."""
    for row in taken[:-1]:
        holder, seat = row
        holder.put_back(seat)
        if holder.purse.refusal(NOTHING) is None and claimant.purse.refusal(more) is None:
            taken.remove(row)
        else:
            holder.take_back(seat)


def _note(holder: Need, claimant: Need, replicas: int) -> None:
    priority = claimant.entry.priority
    holder.note(why(ReasonCode.PREEMPTED, claimant.demand.service, replicas=replicas, priority=priority))


def victims(claimant: Need, ranked: Sequence[Need]) -> Iterator[tuple[Need, int]]:
    """Who may have to leave GPUs to `claimant`, the least important first, and how many replicas of each: first what
    is beyond the floors, then the floors of who is less important. `ranked` is most important first.
    """
    lower = [need for need in reversed(ranked) if need is not claimant]
    for holder in lower:
        if holder.entry.priority <= claimant.entry.priority and holder.replicas > holder.floor:
            yield holder, holder.replicas - holder.floor
    for holder in lower:
        if holder.entry.priority < claimant.entry.priority and holder.replicas:
            yield holder, holder.replicas
