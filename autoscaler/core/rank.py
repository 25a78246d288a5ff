"""In which order a need asks the offerings: by what it is expected to cost, waiting and losses included.

Pure; may not do I/O or read a clock. The cost of an offering is its price while the instances are kept, and what is
missed meanwhile. A miss is worth f/(1 − f) of the price of serving it, f the fraction of requests that the policy wants
within their limits: that is the weight at which capacity for the f quantile is the cheapest (the newsvendor's). What is
missed: until it serves, the lead beyond the shortest one, and a call's time for each refusal that is to be expected;
and the start of a successor beyond the notice, as often as instances there are taken back. So a spot pool that is
reclaimed again and again loses to what costs more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from .beliefs import Beliefs, Breaker, OfferingBelief
from .berths import CLOSING_S, SUNK, Need, Option
from .model import Offering
from .odds import Odds
from .reasons import Reason, ReasonCode, why
from .restrain import HOLD_LEADS
from .units import SECONDS_PER_HOUR

KEPT_S = 3600.0  # what is bought stays until demand falls, and a day's demand hardly halves within an hour
CALL_S = 2.0  # of one launch call that is refused: AWS takes one or two seconds for it
NOTICE_S = 120.0  # from a reclaim notice to the end
CANARY = 0.1  # the chance to have opened at which a pool that cools is asked again while a need waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Bid:
    """One way to meet a need: a variant on an offering. `usd` is the expected cost, `usd_per_h` the price alone."""

    usd: float
    usd_per_h: float
    option: Option
    offering: Offering


def bids(need: Need, beliefs: Beliefs, odds: Odds, now_s: float) -> tuple[list[Bid], tuple[Offering, ...]]:
    """What may be asked, the best first, and the offerings that are left alone for now."""
    shut: dict[str, Offering] = {}
    rows: list[tuple[Option, Offering, float]] = []
    for option, offering in ways(need, odds, now_s):
        if shut_until_s(offering, beliefs) > now_s:
            shut[offering.offering] = offering
        else:
            rows.append((option, offering, _price_usd_per_h(need, option, offering)))
    if not rows:
        return [], tuple(shut.values())
    fair = min((usd for _, _, usd in rows if usd > 0.0), default=0.0)
    first_s = min(option.lead_s for option, _, _ in rows)
    made = [
        Bid(
            usd=_usd(need, row[0], row[1], odds, row[2], fair, first_s),
            usd_per_h=row[2],
            option=row[0],
            offering=row[1],
        )
        for row in rows
    ]
    return sorted(made, key=lambda bid: (bid.usd, bid.offering.offering)), tuple(shut.values())


def _price_usd_per_h(need: Need, option: Option, offering: Offering) -> float:
    """Of the whole instances that it takes, less the GPUs left over that those who are served later lack."""
    if offering.market in SUNK:
        return 0.0
    nodes = need.missing(option) * option.shape.nodes
    whole = ceil(nodes / (offering.gpus // option.shape.gpus))
    left = whole * offering.gpus - nodes * option.shape.gpus
    shared = min(left, need.waiting[offering.instance_type]) / offering.gpus
    return (whole - shared) * offering.price_usd_per_h


def ways(need: Need, odds: Odds, now_s: float) -> Iterator[tuple[Option, Offering]]:
    """Every variant of a need on every offering that the policy allows, that holds it and that is open for work."""
    for option in need.using:
        for offering in odds.offers(option.shape.instance_type):
            if (
                offering.gpus >= option.shape.gpus
                and need.allows(offering)
                and open_for_work(offering, option.lead_s, now_s)
            ):
                yield option, offering


def _usd(
    need: Need, option: Option, offering: Offering, odds: Odds, usd_per_h: float, fair_usd_per_h: float, first_s: float
) -> float:
    """Expected cost of the time that it is kept: an hour, or its lead and the hold window that follows a mistake."""
    kept_s = max(KEPT_S, option.lead_s * (1.0 + HOLD_LEADS[need.entry.goal]))
    late_s = need.pressing * (option.lead_s - first_s) + CALL_S * (1.0 - odds.grant(offering))
    late_s += odds.lost_per_h(offering) / SECONDS_PER_HOUR * kept_s * max(0.0, option.lead_s - NOTICE_S)
    return (usd_per_h * kept_s + need.miss_weight * fair_usd_per_h * late_s) / SECONDS_PER_HOUR


def open_for_work(offering: Offering, lead_s: float, now_s: float) -> bool:
    """Whether the offering exists now, and for so long that its successor need not be ordered yet."""
    if offering.starts_at_s is not None and now_s < offering.starts_at_s:
        return False
    return offering.ends_at_s is None or now_s <= offering.ends_at_s - CLOSING_S - lead_s


def canary(need: Need, shut: tuple[Offering, ...], beliefs: Beliefs, odds: Odds, now_s: float) -> Offering | None:
    """Of pools that all cool while a need waits, the one most likely to have opened since it was asked, if any is
    likely enough. So they are asked in turns, and the more rarely the longer they have been dry.
    """
    if need.pressing < 1.0:
        return None
    dry = [
        offering
        for offering in shut
        if _dry(beliefs, offering) and beliefs.breakers.get(offering.instance_type, Breaker()).open_until_s <= now_s
    ]
    best = max(dry, key=lambda offering: (odds.ended(offering), offering.offering), default=None)
    return best if best is not None and odds.ended(best) >= CANARY else None


def _dry(beliefs: Beliefs, offering: Offering) -> bool:
    known = beliefs.offerings.get(offering.offering)
    return known is not None and known.dry_since_s is not None


def _dry_s(beliefs: Beliefs, offering: Offering, now_s: float) -> float:
    since_s = beliefs.offerings.get(offering.offering, OfferingBelief()).dry_since_s
    return now_s - since_s if since_s is not None else 0.0


def comes_in_s(need: Need, beliefs: Beliefs, now_s: float) -> float:
    """The shortest time until what its next replicas may be can be there, were it granted when it may be asked. A pool
    that has been dry for long is not expected sooner than once more that long.
    """
    waits = [
        max(0.0, shut_until_s(offering, beliefs) - now_s, _dry_s(beliefs, offering, now_s)) + option.lead_s
        for option in need.using
        for name, offering in beliefs.offers.items()
        if offering.instance_type == option.shape.instance_type
        and need.allows(offering)
        and name not in beliefs.unlisted
    ]
    return min(waits, default=inf)


# ---- reasons --------------------------------------------------------------------------------------------------------
def shut_until_s(offering: Offering, beliefs: Beliefs) -> float:
    """Until when the offering is not asked: it refused, or instances of its type do not get up."""
    cooling = beliefs.offerings.get(offering.offering, OfferingBelief()).cool_until_s
    return max(cooling, beliefs.breakers.get(offering.instance_type, Breaker()).open_until_s)


def nowhere(shut: tuple[Offering, ...], beliefs: Beliefs, now_s: float) -> Reason:
    """Why nothing can be ordered."""
    if not shut:
        return why(ReasonCode.NOWHERE_TO_LAUNCH, offerings=0)
    until_s = min(shut_until_s(offering, beliefs) for offering in shut)
    return why(ReasonCode.ONLY_COOLING_LEFT, offerings=len(shut), until_s=until_s, wait_s=until_s - now_s)


def why_shut(offering: Offering, beliefs: Beliefs, now_s: float) -> Reason:
    """Why this one is not asked."""
    kind = offering.instance_type
    breaker = beliefs.breakers.get(kind, Breaker())
    if breaker.open_until_s > now_s:
        return why(ReasonCode.BREAKER_OPEN, kind, strikes=breaker.strikes, until_s=breaker.open_until_s)
    belief = beliefs.offerings[offering.offering]
    return why(ReasonCode.COOLING_DOWN, offering.offering, refusals=belief.refusals_in_row, until_s=belief.cool_until_s)
