"""What keeps the plan still: hold windows in seconds.

Pure; may not do I/O or read a clock. Capacity is held through lulls of about the time that it would take to get it
back: releasing sooner bets on a forecast over a time in which a mistake could not be mended. The level of a load falls
as soon as a lull begins and is back only when it has looked back past its end; so a hold is a lull and a look-back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

from forecasting.baselines import LEVEL_WINDOW_S
from policies.model import Goal

from .reasons import Reason, ReasonCode, why

HOLD_LEADS: dict[Goal, float] = {"latency": 1.5, "throughput": 1.0, "cost": 0.5}
HOLD_MAX_S = 3600.0


def hold_s(lead_s: float, goal: Goal) -> float:
    """How long a lower demand must last before capacity is released: lulls of `HOLD_LEADS` leads are bridged."""
    return min(LEVEL_WINDOW_S + HOLD_LEADS[goal] * lead_s, HOLD_MAX_S)


def held_rps(
    planned: Sequence[tuple[float, float]], rps: float, lead_s: float, goal: Goal, now_s: float
) -> tuple[float, tuple[Reason, ...]]:
    """The largest demand of `planned` (at_s, requests/s; oldest first) within the hold window, and the reason when that
    is above the present one.
    """
    window_s = hold_s(lead_s, goal)
    first = bisect_right(planned, now_s - window_s, key=itemgetter(0))
    highest, at_s = max(map(itemgetter(1, 0), planned[first:]), default=(rps, now_s))
    if highest <= rps:
        return rps, ()
    return highest, (why(ReasonCode.HOLD_WINDOW, held_rps=highest, hold_s=window_s, since_s=now_s - at_s),)
