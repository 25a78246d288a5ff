"""What each unit has spent this month, and the rate at which the rest of its budget lasts.

Pure; may not do I/O or read a clock. A unit pays for the GPUs that its replicas take, from their placement to their
end, at their part of the instance's price (a reservation's, too), and for tokens served by an endpoint elsewhere.
Months are those of UTC. While the cluster is not seen, what was last seen is paid on.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from policies.model import Unit

from .beliefs import Beliefs, Spend
from .model import Measured, Missing, Observation
from .units import SECONDS_PER_HOUR


def observe(beliefs: Beliefs, seen: Observation) -> Beliefs:
    """The sums after one more observation; only units with a monthly budget are summed."""
    units = [] if beliefs.policy is None else [u.unit for u in beliefs.policy.units if u.budget_usd_per_month]
    if not units:
        return beliefs if not beliefs.spent else replace(beliefs, spent={})
    rates = rates_usd_per_h(beliefs, seen)
    return replace(beliefs, spent={unit: _more(beliefs.spent.get(unit), unit, rates, seen.at_s) for unit in units})


def _more(before: Spend | None, unit: str, rates: dict[str, float] | None, at_s: float) -> Spend:
    month = month_of(at_s)
    before = before or Spend(month=month, usd=0.0, usd_per_h=0.0, at_s=at_s)
    usd = before.usd if before.month == month else 0.0
    usd += before.usd_per_h * max(0.0, at_s - before.at_s) / SECONDS_PER_HOUR
    return Spend(month=month, usd=usd, usd_per_h=before.usd_per_h if rates is None else rates.get(unit, 0.0), at_s=at_s)


def rates_usd_per_h(beliefs: Beliefs, seen: Observation) -> dict[str, float] | None:
    """USD an hour by unit now, of those that pay anything; None when the cluster is not seen."""
    if isinstance(seen.serving, Missing):
        return None
    gpus = {(shape.service, shape.variant): shape.gpus for shape in beliefs.shapes}
    rates: dict[str, float] = defaultdict(float)
    for replica in seen.serving.replicas:
        for instance_id in (replica.instance_id, *replica.also_on) if replica.instance_id else ():
            instance = beliefs.instances.get(instance_id)
            offer = beliefs.offers.get(instance.offering) if instance is not None else None
            if offer is not None:
                share = gpus.get((replica.service, replica.variant), 0) / max(1, offer.gpus)
                rates[replica.service.split("/")[0]] += share * offer.price_usd_per_h
    for unit, usd_per_h in _overflow(beliefs, seen):
        rates[unit] += usd_per_h
    return rates


def _overflow(beliefs: Beliefs, seen: Observation) -> list[tuple[str, float]]:
    """Unit and USD an hour of each service's tokens served elsewhere."""
    if beliefs.policy is None or isinstance(seen.loads, Missing):
        return []
    prices = {key: entry.overflow.usd_per_1m_tokens for key, _, entry in beliefs.policy.services() if entry.overflow}
    return [
        (load.service.split("/")[0], load.overflow_tps.value * SECONDS_PER_HOUR * prices[load.service] / 1e6)
        for load in seen.loads
        if load.service in prices and isinstance(load.overflow_tps, Measured)
    ]


def month_of(at_s: float) -> str:
    """The month of an instant, like ``2026-12``."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m")


def month_left_h(at_s: float) -> float:
    """Hours until the month ends, at least a minute's part of one."""
    now = datetime.fromtimestamp(at_s, UTC)
    following = (now.replace(day=1) + timedelta(days=32)).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return max(1.0 / 60.0, (following - now).total_seconds() / SECONDS_PER_HOUR)


def pace_usd_per_h(unit: Unit, beliefs: Beliefs, now_s: float) -> float | None:
    """The rate at which what is left of the month's budget lasts until the month ends; None without such a budget."""
    if unit.budget_usd_per_month is None:
        return None
    spent = beliefs.spent.get(unit.unit)
    usd = spent.usd if spent is not None and spent.month == month_of(now_s) else 0.0
    return max(0.0, unit.budget_usd_per_month - usd) / month_left_h(now_s)
