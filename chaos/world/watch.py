"""What a run shows while it runs, once a tick: the material of the HTML report and of a progress bar. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSample:
    """One service since the last sample, or now.

    `arrived`, `finished`, `shed` and `attainment` (None without any that ended) are of the time since the last sample;
    `forecast` pairs are (quantile, requests/s) for `lead_s` ahead, empty when the controller says none.
    """

    service: str
    arrived: int
    finished: int
    shed: int
    queued: int
    running: int
    ready: int
    coming: int
    target: int
    attainment: float | None
    forecast: tuple[tuple[float, float], ...]
    lead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferingSample:
    """One offering now: instances by state, what the pool can hold in all, the price."""

    offering: str
    market: str
    ready: int
    starting: int
    draining: int
    size: int
    price_usd_per_h: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One tick. `cost_usd` and `refused` (launch calls) count from the start."""

    at_s: float
    services: tuple[ServiceSample, ...]
    offerings: tuple[OfferingSample, ...]
    cost_usd: float
    refused: int
    violations: int


class Watch(Protocol):
    """Whoever wants to see a run. May not change anything."""

    def sample(self, sample: Sample) -> None:
        """One more tick."""
        ...
