"""What the runs mean: means with intervals, regret, who dominates whom. `Scoreboard` is the contract of `--json`.

Pure arithmetic over reports; may not run anything, read a file or a clock. Intervals are 95 % bootstrap intervals of
the mean over seeds; the seeds drawn are the same for every controller of a scenario (paired), because all of them met
the same arrivals, boots and outages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from chaos.report import Report

Floats = npt.NDArray[np.float64]

RESAMPLES = 2000
DOMINATES_AT = 0.98  # a peer dominates with an attainment as high as ours at this part of our cost, or less
CLAIM_FROM = 0.8  # attainment from which a peer's is worth comparing with


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Interval(_Part):
    """Mean over seeds and its 95 % paired-bootstrap interval."""

    mean: float
    low: float
    high: float


class Row(_Part):
    """One controller at one knob on one scenario, over `seeds`.

    `knob`: multiplier of a peer's default, `slo.fraction` for ours, None = as it comes. `attainment_top`: of the
    services of the highest priority. `regret_lb1`: cost ÷ `lb1_usd` − 1, both at this row's own attainment.
    `refused_per_grant`: refused launch calls ÷ granted ones (None: none was granted).
    """

    scenario: str
    controller: str
    knob: float | None
    seeds: tuple[int, ...]
    attainment_top: Interval
    attainment_by_priority: dict[str, float]
    fraction: float
    cost_usd: Interval
    lb1_usd: float | None
    regret_lb1: float | None
    refused_per_grant: float | None
    direction_changes: float
    priority_inversion_s: float
    cold_start_misses: float
    idle_reservation_h: float


class Point(_Part):
    """One knob of a sweep: means over the sweep's seeds."""

    scenario: str
    controller: str
    knob: float | None
    attainment_top: float
    cost_usd: float


class Dominated(_Part):
    """A peer whose attainment for the top priority is as high as ours, at 0.98 of our cost or less."""

    scenario: str
    controller: str
    knob: float | None


class Claim(_Part):
    """Against the best peer (highest attainment, if >= 0.8; then cheapest), with our knob chosen on the sweep's seeds.

    `cheaper`: 1 − our cost ÷ its cost where we attain as much (knob `cheaper_knob`); `fewer_misses`: its misses ÷ ours
    where we cost as much (knob `fewer_knob`). None where no knob of ours does.
    """

    scenario: str
    peer: str
    cheaper: Interval | None
    cheaper_knob: float | None
    fewer_misses: Interval | None
    fewer_knob: float | None


class Failure(_Part):
    """A run that gave no report."""

    scenario: str
    controller: str
    knob: float | None
    seed: int
    error: str


class Broken(_Part):
    """A run's violations of one kind."""

    scenario: str
    controller: str
    seed: int
    kind: str
    count: int


class Scoreboard(_Part):
    """Everything `qm bench` measured. `spent_s`: seconds of one core by controller, whenever the run was made; `older`:
    runs that another version of the code made.
    """

    seeds: tuple[int, ...]
    sweep_seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    dominated_by: tuple[Dominated, ...]
    claims: tuple[Claim, ...]
    sweeps: tuple[Point, ...]
    failures: tuple[Failure, ...]
    violations: tuple[Broken, ...]
    spent_s: dict[str, float]
    older: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Series:
    """One controller at one knob, seed by seed; arrays of shape (seeds,). `lb1_usd` nan where there is no bound."""

    scenario: str
    controller: str
    knob: float | None
    reports: tuple[Report, ...]
    lb1_usd: Floats

    @property
    def top(self) -> Floats:
        """Attainment of the highest priority's services."""
        return np.array([attainment(report, highest(report)) for report in self.reports])

    @property
    def cost_usd(self) -> Floats:
        """Cost."""
        return np.array([report.cost_usd for report in self.reports])


def highest(report: Report) -> int:
    """The highest priority among the services."""
    return max(service.priority for service in report.services.values())


def attainment(report: Report, priority: int) -> float:
    """Requests within every limit ÷ requests, over the services of that priority; 1 without requests."""
    rows = [service for service in report.services.values() if service.priority == priority]
    requests = sum(service.requests for service in rows)
    return sum((service.slo_attainment or 0.0) * service.requests for service in rows) / requests if requests else 1.0


def met(report: Report) -> dict[str, int]:
    """Requests within every limit, by service."""
    return {key: round((each.slo_attainment or 0.0) * each.requests) for key, each in report.services.items()}


def resamples(scenario: str, seeds: int) -> npt.NDArray[np.int64]:
    """Which seeds each resample draws, shape (RESAMPLES, seeds): the same for every controller of a scenario."""
    drawn: npt.NDArray[np.int64] = np.random.default_rng([seeds, crc32(scenario.encode())]).integers(
        0, seeds, (RESAMPLES, seeds)
    )
    return drawn


def interval(scenario: str, top: Floats, bottom: Floats | None = None) -> Interval:
    """Of mean(top), or of mean(top) ÷ mean(bottom); arrays of shape (seeds,)."""
    drawn = resamples(scenario, len(top))
    values = top[drawn].mean(axis=1)
    mean = float(top.mean())
    if bottom is not None:
        values = values / bottom[drawn].mean(axis=1)
        mean /= float(bottom.mean())
    low, high = np.quantile(values, (0.025, 0.975))
    return Interval(mean=mean, low=float(low), high=float(high))


def row(series: Series) -> Row:
    """The figures of one row."""
    reports = series.reports
    refused = sum(sum(report.launches.refused.values()) for report in reports)
    granted = sum(report.launches.granted for report in reports)
    first, cost = reports[0], series.cost_usd
    priorities = sorted({service.priority for service in first.services.values()}, reverse=True)
    bound = float(series.lb1_usd.mean())
    known = bool(np.isfinite(bound) and bound > 0.0)
    return Row(
        scenario=series.scenario,
        controller=series.controller,
        knob=series.knob,
        seeds=tuple(report.seed for report in reports),
        attainment_top=interval(series.scenario, series.top),
        attainment_by_priority={str(p): float(np.mean([attainment(r, p) for r in reports])) for p in priorities},
        fraction=max(each.fraction for each in first.services.values() if each.priority == priorities[0]),
        cost_usd=interval(series.scenario, cost),
        lb1_usd=bound if known else None,
        regret_lb1=float(cost.mean()) / bound - 1.0 if known else None,
        refused_per_grant=refused / granted if granted else None,
        direction_changes=float(np.mean([report.direction_changes for report in reports])),
        priority_inversion_s=float(np.mean([report.priority_inversion_s for report in reports])),
        cold_start_misses=float(np.mean([sum(s.cold_start_misses for s in r.services.values()) for r in reports])),
        idle_reservation_h=float(np.mean([report.idle_reservation_h for report in reports])),
    )


def best_knob(points: Sequence[Point], fraction: float) -> Point:
    """The best point in hindsight: the cheapest within the objective, else the one that attains most."""
    within = [point for point in points if point.attainment_top >= fraction]
    if within:
        return min(within, key=lambda point: (point.cost_usd, -point.attainment_top, point.knob or 1.0))
    return min(points, key=lambda point: (-point.attainment_top, point.cost_usd, point.knob or 1.0))


def dominates(peer_top: float, peer_usd: float, our_top: float, our_usd: float) -> bool:
    """Whether a peer's point dominates ours."""
    return peer_top >= our_top and peer_usd <= DOMINATES_AT * our_usd


def best_peer(rows: Sequence[Row]) -> Row | None:
    """The row with the highest attainment, then the lowest cost; None when it attains less than CLAIM_FROM."""
    ranked = sorted(rows, key=lambda one: (-one.attainment_top.mean, one.cost_usd.mean, one.controller))
    return ranked[0] if ranked and ranked[0].attainment_top.mean >= CLAIM_FROM else None


def as_good(curve: Sequence[Point], top: float) -> Point | None:
    """Our cheapest point that attains at least `top`."""
    able = [point for point in curve if point.attainment_top >= top]
    return min(able, key=lambda point: point.cost_usd) if able else None


def as_cheap(curve: Sequence[Point], cost_usd: float) -> Point | None:
    """Our best point that costs at most `cost_usd`."""
    able = [point for point in curve if point.cost_usd <= cost_usd]
    return max(able, key=lambda point: point.attainment_top) if able else None


def claim(peer: Series, equal: Series | None, cheap: Series | None) -> Claim:
    """What the best peer would have to answer. A run without misses of ours counts as half a miss a seed."""
    cheaper = fewer = None
    if equal is not None:
        ratio = interval(peer.scenario, equal.cost_usd, peer.cost_usd)
        cheaper = Interval(mean=1.0 - ratio.mean, low=1.0 - ratio.high, high=1.0 - ratio.low)
    if cheap is not None:
        least = 0.5 / max(1, max(report.requests for report in cheap.reports))
        fewer = interval(peer.scenario, 1.0 - peer.top, np.maximum(1.0 - cheap.top, least))
    return Claim(
        scenario=peer.scenario,
        peer=peer.controller,
        cheaper=cheaper,
        cheaper_knob=equal.knob if equal else None,
        fewer_misses=fewer,
        fewer_knob=cheap.knob if cheap else None,
    )


def point(scenario: str, controller: str, knob: float | None, reports: Sequence[Report]) -> Point:
    """One point of a sweep."""
    return Point(
        scenario=scenario,
        controller=controller,
        knob=knob,
        attainment_top=float(np.mean([attainment(report, highest(report)) for report in reports])),
        cost_usd=float(np.mean([report.cost_usd for report in reports])),
    )


def bound_usd(bounds: Sequence[Mapping[str, object]], report: Report) -> float:
    """The best of several bounds at what the report met, USD; nan without bounds."""
    from chaos.bounds.lower import Bound, best

    return best([Bound(**each) for each in bounds], met(report)) if bounds else float("nan")  # type: ignore[arg-type]
