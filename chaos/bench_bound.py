"""How far a decided fleet is from the cheapest one that serves as much: an integer program's dual bound, by HiGHS.

May not read a clock. Of one tick: instances per offering and replicas per variant are whole numbers; what a
replica carries, each unit's quota and the offerings that may be asked are the decision's own. Asked is the least price
of a fleet that gives every service as much of its demand as the decided one does. What the decision alone must mind is
left out (what runs already, that packing must be found without the program, odds, leads), so the bound is below
every fleet that can be had, and summed over ticks below every sequence of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from autoscaler.core.model import Offering, Plan, Shape
from policies.model import PolicySet

GAP = 1e-4  # HiGHS stops here; its dual bound is a bound all the same
LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What was decided: instances by offering, with those that could not have been asked (dry) left out of `open`."""

    plan: Plan
    policy: PolicySet
    shapes: Sequence[Shape]
    offerings: Sequence[Offering]
    open: frozenset[str]
    instances: Mapping[str, int]  # by offering

    @property
    def usd_per_h(self) -> float:
        """What it costs."""
        price = {row.offering: row.price_usd_per_h for row in self.offerings}
        return sum(count * price[name] for name, count in self.instances.items())


def least_usd_per_h(fleet: Fleet) -> float:
    """No fleet that serves as much costs less. Raises RuntimeError when HiGHS finds no bound."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    offerings = [row for row in fleet.offerings if row.offering in fleet.open or fleet.instances.get(row.offering)]
    columns = len(offerings) + len(fleet.shapes)
    prices = np.zeros(columns)
    prices[: len(offerings)] = [row.price_usd_per_h for row in offerings]
    rows, least, most = _rows(fleet, offerings, columns)
    with _quiet():
        found = milp(
            prices,
            constraints=LinearConstraint(np.array(rows), np.array(least), np.array(most)),
            bounds=Bounds(0.0, np.inf),
            integrality=np.ones(columns),
            options={"mip_rel_gap": GAP, "time_limit": LIMIT_S},
        )
    if found.mip_dual_bound is None:
        raise RuntimeError(f"HiGHS: {found.message}")
    return float(found.mip_dual_bound)


@contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS prints lines of its own to standard output, whatever it is told; they would be in the JSON."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _rows(
    fleet: Fleet, offerings: Sequence[Offering], columns: int
) -> tuple[list[np.ndarray], list[float], list[float]]:
    """Of each service at least what is served now, of each type no more GPUs than there are, of each unit its quota."""
    rows: list[np.ndarray] = []
    least: list[float] = []
    most: list[float] = []

    def add(row: np.ndarray, low: float, high: float) -> None:
        rows.append(row)
        least.append(low)
        most.append(high)

    first = len(offerings)
    carries = {(row.service, row.variant): row.capacity_rps_per_replica for row in fleet.plan.routes}
    wanted = {(row.service, row.variant): row.wanted for row in fleet.plan.targets}
    services = sorted({shape.service for shape in fleet.shapes})
    asked = {row.service: row.arrival_rps for row in fleet.plan.demands}
    for service in services:
        row = np.zeros(columns)
        served = 0.0
        for n, shape in enumerate(fleet.shapes):
            if shape.service == service:
                key = (service, shape.variant)
                row[first + n] = carries[key]
                served += carries[key] * wanted[key]
        add(row, min(served, asked[service]), np.inf)
    for kind in sorted({shape.instance_type for shape in fleet.shapes}):
        row = np.zeros(columns)
        for n, offering in enumerate(offerings):
            row[n] = -offering.gpus if offering.instance_type == kind else 0.0
        for n, shape in enumerate(fleet.shapes):
            row[first + n] = shape.gpus if shape.instance_type == kind else 0.0
        add(row, -np.inf, 0.0)
    for unit in fleet.policy.units:
        row = np.zeros(columns)
        for n, shape in enumerate(fleet.shapes):
            row[first + n] = shape.gpus if shape.service.split("/")[0] == unit.unit else 0.0
        add(row, -np.inf, np.inf if unit.quota_gpus is None else float(unit.quota_gpus))
    return rows, least, most
