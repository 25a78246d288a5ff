"""Orders sized candidates for a goal, finds the front of cost against latency, and picks variants for a policy file.

Pure; may not do I/O or read a clock. Candidates whose weights nobody publishes (to be quantised by the user) come after
those that need no such step, unless the user named precisions.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoscaler.catalogue import Catalogue
from policies.model import Goal

from .candidates import Candidate
from .wanted import Wanted

PASTED = 3
INTERRUPTED = ("under 5 %", "5 to 10 %", "10 to 15 %", "15 to 20 %", "more than 20 %")


def ranked(found: Sequence[Candidate], wanted: Wanted) -> tuple[Candidate, ...]:
    """Best first: latency by the mean time of a request, throughput by replicas, cost by price; ties by the others."""

    def key(row: Candidate) -> tuple[object, ...]:
        return (not _ready_made(row, wanted), *_order(row, wanted.goal), row.price_usd_per_h, row.variant.id)

    return tuple(sorted(found, key=key))


def _ready_made(row: Candidate, wanted: Wanted) -> bool:
    return row.published_weights or bool(wanted.precisions)


def _order(row: Candidate, goal: Goal) -> tuple[float, ...]:
    if goal == "latency":
        return row.e2e_s, row.usd_per_h
    if goal == "throughput":
        return row.replicas, row.usd_per_h, row.e2e_s
    return row.usd_per_h, row.e2e_s


def front(found: Sequence[Candidate], wanted: Wanted) -> frozenset[str]:
    """The variants that no other beats in both price and the mean time of a request; none that must be quantised."""
    best = float("inf")
    kept = set()
    rows = [row for row in found if _ready_made(row, wanted)] or found
    for row in sorted(rows, key=lambda row: (row.usd_per_h, row.e2e_s, row.variant.id)):
        if row.e2e_s < best:
            best = row.e2e_s
            kept.add(row.variant.id)
    return frozenset(kept)


def pasted(rows: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The best of different GPUs, so that one dry pool does not end the service; the best of all first."""
    chosen: list[Candidate] = []
    for row in [row for row in rows if row.published_weights] or rows:
        family = row.variant.instance_type.partition(".")[0]
        if family not in {each.variant.instance_type.partition(".")[0] for each in chosen}:
            chosen.append(row)
        if len(chosen) == PASTED:
            break
    return tuple(chosen)


def block(rows: Sequence[Candidate]) -> str:
    """The `variants:` block of a policy file."""
    lines = ["variants:"]
    for row in pasted(rows):
        variant = row.variant
        more = f", nodes_per_replica: {variant.nodes_per_replica}" if variant.nodes_per_replica > 1 else ""
        lines.append(
            f"  - {{id: {variant.id}, instance_type: {variant.instance_type}, tp: {variant.tp}, "
            f"precision: {variant.precision}{more}}}"
        )
    return "\n".join(lines)


def scarcity(instance_type: str, region: str, catalogue: Catalogue) -> tuple[str, float | None]:
    """(in words, 0 plenty to 1 hardly to be had); None where nothing was published of the type there."""
    words: list[str] = []
    figures: list[float] = []
    pools = catalogue.spot_pools.get(instance_type)
    pool = pools.regions.get(region) if pools is not None else None
    if pool is not None and pool.interrupted is not None:
        words.append(f"spot taken back {INTERRUPTED[pool.interrupted]} a month")
        figures.append(pool.interrupted / 4.0)
    if pool is not None and pool.zones is not None:
        without = pool.zones_without_spot or 0
        words.append(f"{without} of {pool.zones} zones without spot")
        figures.append(without / pool.zones)
    if catalogue.price(instance_type, region, "on_demand") is None:
        words.append("not sold on demand")
        figures.append(1.0)
    return "; ".join(words) or "nothing published", max(figures, default=None)
