"""The hold rule: what could not be had again is not given back for a lull.

Pure; may not do I/O or read a clock. An idle instance is kept while price × idle time < P(no pool gives one within the
lead) × what is missed until one does. A miss is worth f/(1 − f) of the price of serving (core.rank), and requests are
missed for as long as a dry pool stays dry, about `OUTAGE_SCALE_S`, less the time that they may wait:

    idle time < P × f/(1 − f) × (outage − wait) × (fair price of what idles there ÷ price of the instance).

How long the lull will be nobody knows, so it is held for as long as that, which costs at most twice what was best in
hindsight; and not at all while no pool that it may use is dry. What is given back goes to the pool it came from, which
is then as likely to give it again as any of its market.
"""

from __future__ import annotations

from .berths import SUNK, Berth, Need
from .model import Hold, Offering
from .odds import OUTAGE_SCALE_S, PRIOR, Odds
from .rank import ways
from .reasons import ReasonCode, why

HOLD_MOST_S = 21_600.0


class Scarcity:
    """What a need could get instead of what it has, at one instant."""

    def __init__(self, need: Need, odds: Odds, now_s: float) -> None:
        self._need, self._odds = need, odds
        found = list(ways(need, odds, now_s))
        self._offers = {offering.offering: offering for _, offering in found if offering.market not in SUNK}
        self._usd_per_rps = min(
            (
                offering.price_usd_per_h / offering.gpus * need.gpus_per_rps[offering.instance_type]
                for offering in self._offers.values()
            ),
            default=0.0,
        )
        slo = need.entry.slo
        limits = (limit for limit in (slo.ttft_s, slo.e2e_s, slo.deadline_s) if limit is not None)
        self._missed_s = max(0.0, OUTAGE_SCALE_S - min(limits, default=0.0))
        self.dry = any(odds.dry(offering) for offering in self._offers.values())

    def hold_s(self, offering: Offering, rps: float, usd_per_h: float) -> float:
        """How long instances of `offering` at that price are kept for the `rps` that idle there."""
        if not self.dry or usd_per_h <= 0.0:
            return 0.0
        others = [other for other in self._offers.values() if other.pool != offering.pool]
        lost = self._odds.none_of(others, self._need.demand.lead_s) * (1.0 - PRIOR[offering.market])
        worth = rps * self._usd_per_rps / usd_per_h
        return min(lost * self._need.miss_weight * self._missed_s * worth, HOLD_MOST_S)


def held(need: Need, berths: tuple[Berth, ...], since_s: dict[str, float], limit_s: float, now_s: float) -> list[Hold]:
    """The berths of one replica as held, since they were first; none when their time is over."""
    begun_s = min(since_s.get(berth.instance_id, now_s) for berth in berths)
    if now_s - begun_s >= limit_s:
        return []
    reason = why(ReasonCode.HELD, need.demand.service, idle_s=now_s - begun_s, limit_s=limit_s)
    return [Hold(instance_id=berth.instance_id, since_s=begun_s, reasons=(reason,)) for berth in berths]
