"""What a policy promises and no hardware or no money can hold: limits that no variant meets, floors beyond a budget.

May not do I/O. Only `qm check` asks: the controller reports such promises and does what can be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from autoscaler.catalogue import Catalogue, Resolved
from autoscaler.catalogue.shapes import ShapeProblem
from autoscaler.core.capacity import capacity, mix_or_prior
from autoscaler.core.model import Shape
from autoscaler.core.reasons import Reason, ReasonCode
from policies.model import Market, Service, Unit

MONTH_H = 672.0  # of the shortest month
SOLD_AS: dict[Market, str] = {"odcr": "on_demand", "interruptible": "spot"}  # at whose price, where none is published
STEADY: set[Market] = {"on_demand", "odcr", "block"}


def broken_promises(found: Resolved) -> tuple[ShapeProblem, ...]:
    """Everything promised in vain, by unit and service."""
    shapes: dict[str, list[Shape]] = {}
    for shape in found.shapes:
        shapes.setdefault(shape.service, []).append(shape)
    prices = _prices(found.catalogue)
    rows: list[ShapeProblem] = []
    for unit in found.policy.units:
        rows += _floors(unit, shapes, found.catalogue, prices)
        for entry in unit.services:
            key = f"{unit.unit}/{entry.name}"
            rows += _unreachable(key, entry, shapes.get(key, []))
    return tuple(rows)


# ---- limits ---------------------------------------------------------------------------------------------------------
def _unreachable(key: str, entry: Service, shapes: list[Shape]) -> Iterator[ShapeProblem]:
    """The limit that even the best variant misses, for the requests that are assumed before any was seen."""
    misses = []
    for shape in shapes:
        request = mix_or_prior(0.0, 0.0, shape.timing)
        reasons = capacity(shape.timing, request, entry.slo, entry.goal).reasons
        reason = next((r for r in reasons if r.code is ReasonCode.UNREACHABLE_SLO), None)
        if reason is None:
            return
        misses.append((_distance(reason), shape.variant, reason, request))
    if not misses:
        return
    _, variant, reason, request = min(misses, key=lambda row: row[:2])
    numbers, of = dict(reason.numbers), f"{request.input_tokens:.0f} tokens in and {request.output_tokens:.0f} out"
    if reason.subject == "fraction":
        text = f"is {numbers['limit']:g}, but {variant} alone meets the limits for {numbers['floor']:.3g} of requests"
    else:
        text = f"is {numbers['limit_s']:g}, but {variant} alone needs {numbers['floor_s']:.3g} s for a request"
    remedy = "lower it" if reason.subject == "fraction" else "raise it"
    yield ShapeProblem(key, f"slo.{reason.subject}", f"{text} of {of}; {remedy}, or add a faster variant")


def _distance(reason: Reason) -> tuple[bool, float]:
    """How far a variant is from its promise: a fraction that is missed is nearer than a limit that never holds."""
    numbers = dict(reason.numbers)
    if reason.subject == "fraction":
        return False, numbers["limit"] - numbers["floor"]
    return True, numbers["floor_s"] / numbers["limit_s"]


# ---- money ----------------------------------------------------------------------------------------------------------
Prices = dict[tuple[str, str], float]  # USD an hour by instance type and market, the lowest of any region


def _prices(catalogue: Catalogue) -> Prices:
    lowest: Prices = {}
    rows = [(price.instance_type, price.market, price.usd_per_h) for price in catalogue.prices]
    for name, kind in catalogue.instance_types.items():
        rows.append((name, "on_demand", kind.on_demand_usd_per_h or inf))
        rows.append((name, "spot", kind.spot_usd_per_h or inf))
        rows.append((name, "block", kind.block_usd_per_h or inf))
    for name, market, usd_per_h in rows:
        lowest[name, market] = min(usd_per_h, lowest.get((name, market), inf))
    return lowest


def _floors(unit: Unit, shapes: dict[str, list[Shape]], catalogue: Catalogue, prices: Prices) -> Iterator[ShapeProblem]:
    """A budget below what the unit's floors cost at the lowest price that is known; an unknown one counts nothing."""
    least = 0.0
    for entry in unit.services:
        ways = shapes.get(f"{unit.unit}/{entry.name}", [])
        floor = 0 if entry.scale_to_zero else entry.min_replicas
        steady = min(entry.on_demand_floor, floor)
        least += steady * _replica_usd_per_h(ways, set(entry.markets) & STEADY, catalogue, prices)
        least += (floor - steady) * _replica_usd_per_h(ways, set(entry.markets), catalogue, prices)
    rows = (
        ("budget_usd_per_h", unit.budget_usd_per_h, least, "an hour"),
        ("budget_usd_per_month", unit.budget_usd_per_month, least * MONTH_H, "in the shortest month"),
    )
    for key, budget, usd, span in rows:
        if budget is not None and usd > budget:
            text = f"is {budget:g}, but min_replicas cost {usd:.6g} USD {span} at the lowest prices known"
            yield ShapeProblem(unit.unit, key, f"{text}; raise it, or lower them")


def _replica_usd_per_h(shapes: list[Shape], markets: set[Market], catalogue: Catalogue, prices: Prices) -> float:
    """The cheapest replica: its part of an instance's price; 0 where no price is known."""
    costs = [
        prices.get((shape.instance_type, SOLD_AS.get(market, market)), inf)
        * (shape.gpus * shape.nodes / max(1, catalogue.instance_types[shape.instance_type].gpus))
        for shape in shapes
        for market in markets
    ]
    least = min(costs, default=inf)
    return least if least < inf else 0.0
