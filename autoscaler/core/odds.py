"""The chance that a pool has an instance to give, now or within a horizon, and what its instances' lives are like.

Pure; may not do I/O or read a clock. An outage that has lasted `a` ends within `h` with h/(a + s + h): the longer a
pool is dry, the less likely it opens soon. That is the Lomax law of shape 1, which fits the outages of nine spot zones
of AWS in 2022 and 2023 with s about 1,200 s. A pool that answered otherwise is judged by its own answers, each worth
half after half an hour, shrunk to those of its type and market in its zone, then its region, then to the market's
prior. Zones fail together: given that one is dry, another of its region is half as likely to be open as else, one
elsewhere .87 times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

from policies.model import Market

from .beliefs import Beliefs, InstanceBelief, OfferingBelief
from .berths import PREEMPTIBLE, SUNK
from .lifecycle import InstanceState
from .model import CloudView, Offering
from .units import SECONDS_PER_HOUR

OUTAGE_SCALE_S = 1200.0
HALF_LIFE_S = 1800.0
LOST_HALF_LIFE_S = 21_600.0  # reclaims are rarer than answers: a pool's temper is that of its last hours
YOUNG_S = 1800.0  # an instance that is taken away younger than this was hardly worth its boot
TAKEN_IN_ROW_S = 7200.0
TAKE_TOGETHER_S = 60.0
TAKEN_FREE = 1  # once is weather
TAKEN_BASE_S = 240.0
TAKEN_CAP_S = 3600.0
PRIOR_ANSWERS = 2.0  # a level's own answers count in full against so many of the level above
SIBLING, STRANGER = 0.5, 0.87  # P(open | another zone is dry) / P(open): medians over the traces' pairs of zones
# Spot zones of those traces were open .17 to .90 of the time; what is sold at the full price is there more often, and
# what is reserved is there but for what already runs in it.
PRIOR: dict[Market, float] = {"spot": 0.7, "interruptible": 0.7, "on_demand": 0.9, "odcr": 0.97, "block": 0.97}
PROBE = 0.5  # an answer is worth a call that nobody waits for when it may as well be the other one


def offered(beliefs: Beliefs, cloud: CloudView) -> dict[str, Any]:
    """`Beliefs.offers` and `unlisted` after a listing: an offering that it lacks, because its price is not known or its
    reservation is gone, stays known while instances of ours run there, and they stay where they are.
    """
    listed = {row.offering: row for row in cloud.offerings}
    held = {i.offering for i in beliefs.instances.values() if i.state is not InstanceState.GONE}
    left = tuple(sorted(name for name in held & beliefs.offers.keys() if name not in listed))
    return {"offers": listed | {name: beliefs.offers[name] for name in left}, "unlisted": left}


@dataclass(frozen=True, slots=True)
class Answers:
    """Decayed counts of a pool's answers."""

    granted: float = 0.0
    refused: float = 0.0

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.granted + other.granted, self.refused + other.refused)

    def mean(self, prior: float) -> float:
        """The share of grants, shrunk to `prior`."""
        return (self.granted + PRIOR_ANSWERS * prior) / (self.granted + self.refused + PRIOR_ANSWERS)


_NONE = Answers()


def opens(dry_s: float, within_s: float) -> float:
    """The chance that an outage of age `dry_s` ends within `within_s`."""
    return max(0.0, within_s) / (dry_s + OUTAGE_SCALE_S + max(0.0, within_s))


def counted(
    known: OfferingBelief, at_s: float, *, granted: float = 0.0, refused: float = 0.0, lost: float = 0.0
) -> OfferingBelief:
    """The memory with one more answer, or with a share `lost` of what we have there; older ones decay to now."""
    kept = _kept(known, at_s)
    kept_lost = known.lost * _faded(at_s - known.counted_at_s, LOST_HALF_LIFE_S)
    return replace(
        known, yes=kept.granted + granted, no=kept.refused + refused, lost=kept_lost + lost, counted_at_s=at_s
    )


def reclaimed(beliefs: Beliefs, instance: InstanceBelief, at_s: float) -> Beliefs:
    """A pool takes an instance back, as a share of what we have there. One that takes what it gave again and again is
    left alone, longer each time.
    """
    asked = beliefs.offers.get(instance.offering)
    if asked is None or asked.market not in PREEMPTIBLE:
        return beliefs
    offerings = dict(beliefs.offerings)
    here = sum(row.offering == asked.offering and not row.reclaim_at_s for row in beliefs.instances.values())
    known = offerings.get(asked.offering, OfferingBelief())
    offerings[asked.offering] = counted(known, at_s, lost=1.0 / max(1, here))
    if at_s - instance.launched_at_s <= YOUNG_S:
        for offer in sorted(beliefs.offers.values(), key=lambda row: row.offering):
            if offer.pool == asked.pool:
                offerings[offer.offering] = _rested(offerings.get(offer.offering, OfferingBelief()), at_s)
    return replace(beliefs, offerings=offerings)


def _rested(known: OfferingBelief, at_s: float) -> OfferingBelief:
    if known.taken and at_s - known.taken_at_s < TAKE_TOGETHER_S:
        return known  # several at once are one event
    taken = known.taken + 1 if at_s - known.taken_at_s < TAKEN_IN_ROW_S else 1
    rest_s = min(TAKEN_BASE_S * 2.0 ** (taken - TAKEN_FREE - 1), TAKEN_CAP_S) if taken > TAKEN_FREE else 0.0
    until_s = max(known.cool_until_s, at_s + rest_s) if rest_s else known.cool_until_s
    return replace(known, taken=taken, taken_at_s=at_s, cool_until_s=until_s)


def given_back(beliefs: Beliefs, instance: InstanceBelief) -> Beliefs:
    """An instance has ended: a reservation that refused was full of ours, and has room again."""
    offer = beliefs.offers.get(instance.offering)
    known = beliefs.offerings.get(instance.offering)
    if offer is None or offer.market not in SUNK or known is None or known.dry_since_s is None:
        return beliefs
    fresh = replace(known, refusals_in_row=0, cool_until_s=0.0, dry_since_s=None)
    return replace(beliefs, offerings=beliefs.offerings | {instance.offering: fresh})


def _kept(known: OfferingBelief, at_s: float) -> Answers:
    share = _faded(at_s - known.counted_at_s, HALF_LIFE_S)
    return Answers(known.yes * share, known.no * share)


def _faded(age_s: float, half_life_s: float) -> float:
    return exp(-log(2.0) * max(0.0, age_s) / half_life_s)


class Odds:
    """Chances of all offerings at one instant."""

    def __init__(self, beliefs: Beliefs, now_s: float) -> None:
        self._now_s = now_s
        self._known = beliefs.offerings
        self._answers = {name: _kept(row, now_s) for name, row in beliefs.offerings.items() if row.yes or row.no}
        self._zone: dict[tuple[str, str, Market], Answers] = {}
        self._region: dict[tuple[str, str, Market], Answers] = {}
        self._dry: dict[str, list[Offering]] = {}
        self._grants: dict[str, float] = {}
        self._by_kind: dict[str, list[Offering]] = {}
        for row in sorted(beliefs.offers.values(), key=lambda row: row.offering):
            if row.offering in beliefs.unlisted:
                continue
            self._by_kind.setdefault(row.instance_type, []).append(row)
        for name, answers in self._answers.items():
            offer = beliefs.offers.get(name)
            if offer is None:
                continue
            for level, key in ((self._zone, _in_zone(offer)), (self._region, _in_region(offer))):
                level[key] = level.get(key, _NONE) + answers
            if self._known[name].dry_since_s is not None:
                self._dry.setdefault(offer.instance_type, []).append(offer)

    def offers(self, kind: str) -> list[Offering]:
        """Every offering of an instance type, by name."""
        return self._by_kind.get(kind, [])

    def grant(self, offer: Offering, within_s: float = 0.0) -> float:
        """That a launch there is granted when it is asked for `within_s` from now."""
        if within_s > 0.0:
            return self._grant(offer, within_s)
        if offer.offering not in self._grants:
            self._grants[offer.offering] = self._grant(offer, 0.0)
        return self._grants[offer.offering]

    def _grant(self, offer: Offering, within_s: float) -> float:
        prior = PRIOR.get(offer.market, PRIOR["on_demand"])
        known = self._known.get(offer.offering)
        if not self._answers:
            return prior
        region = self._region.get(_in_region(offer), _NONE).mean(prior)
        zone = self._zone.get(_in_zone(offer), _NONE).mean(region)
        chance = self._answers.get(offer.offering, _NONE).mean(zone)
        if known is not None and known.dry_since_s is not None:
            return chance * self.ended(offer, within_s)
        return chance * self._doubt(offer, within_s)

    def ended(self, offer: Offering, within_s: float = 0.0) -> float:
        """That its outage has ended since it was asked last; 1 where there is none."""
        known = self._known.get(offer.offering)
        if known is None or known.dry_since_s is None:
            return 1.0
        return opens(known.last_refused_at_s - known.dry_since_s, self._now_s + within_s - known.last_refused_at_s)

    def _doubt(self, offer: Offering, within_s: float) -> float:
        """What the driest pool of its type takes away from the odds."""
        doubt = 1.0
        for other in self._dry.get(offer.instance_type, ()):
            if other.pool != offer.pool and other.market == offer.market:
                share = SIBLING if other.region == offer.region else STRANGER
                still = 1.0 - self.ended(other, within_s)
                doubt = min(doubt, 1.0 - (1.0 - share) * still)
        return doubt

    def none_of(self, offers: Iterable[Offering], within_s: float) -> float:
        """That no pool of these grants anything within so long."""
        chance = 1.0
        seen: set[str] = set()
        for offer in offers:
            if offer.pool not in seen:
                seen.add(offer.pool)
                chance *= 1.0 - self.grant(offer, within_s)
        return chance

    def lost_per_h(self, offer: Offering) -> float:
        """How often an hour an instance there is taken back, by what was seen of late."""
        known = self._known.get(offer.offering)
        if known is None or not known.lost:
            return 0.0
        kept = known.lost * _faded(self._now_s - known.counted_at_s, LOST_HALF_LIFE_S)
        return kept * log(2.0) * SECONDS_PER_HOUR / LOST_HALF_LIFE_S

    def dry(self, offer: Offering) -> bool:
        """Whether the last answer of its pool was that it has nothing, and it is likelier than not still so."""
        return self.ended(offer) < 0.5


def _in_zone(offer: Offering) -> tuple[str, str, Market]:
    return offer.instance_type, offer.zone, offer.market


def _in_region(offer: Offering) -> tuple[str, str, Market]:
    return offer.instance_type, offer.region, offer.market
