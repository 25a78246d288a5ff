"""The question of `qm recommend`: which model, what traffic, within which limits. Pure; may not do I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from autoscaler.catalogue.model import Precision
from autoscaler.core.bursts import POISSON, observe
from autoscaler.core.capacity import INPUT_CV, Mix
from autoscaler.core.events import Configured, Observed, Record
from autoscaler.core.model import Measured, Missing, ServiceLoad
from policies.model import Goal, Service, Slo
from serve_apps.timing import Timing

Z99 = NormalDist().inv_cdf(0.99)
PLANNED_QUANTILE = 0.95  # of the recorded rates: the replicas to have without an autoscaler


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Requests per second, tokens a request, limits, what may be bought. `law` replaces the catalogue's constants."""

    model: str
    goal: Goal
    rps: float
    mix: Mix
    input_p99: float
    prefix_share: float
    slo: Slo
    region: str
    market: str
    max_usd_per_h: float
    types: tuple[str, ...]
    precisions: tuple[Precision, ...] = ()
    tp: int | None = None
    law: Timing | None = None

    @property
    def context_p99(self) -> float:
        """Tokens of a request with the longest prompt in a hundred."""
        return self.input_p99 + self.mix.output_tokens


def input_spread(mean: float, p99: float | None) -> tuple[float, float]:
    """(coefficient of variation, 99th percentile) of prompts: lognormal through both figures, or the usual spread.

    No lognormal has a 99th percentile above exp(z²/2) = 15 times its mean; beyond that the widest is taken.
    """
    if p99 is None:
        sigma = math.sqrt(math.log1p(INPUT_CV**2))
        return INPUT_CV, mean * math.exp(Z99 * sigma - sigma * sigma / 2.0)
    room = max(0.0, Z99**2 - 2.0 * math.log(p99 / mean))
    sigma = Z99 - math.sqrt(room)
    return math.sqrt(math.expm1(sigma * sigma)), p99


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a journal says of one service: its policy entry, and the traffic it saw, with the variation of its gaps."""

    service: Service
    rps: float
    input_tokens: float
    output_tokens: float
    arrival_cv: float
    ticks: int


def recorded(records: Iterable[Record], service: str | None) -> Recorded | str:
    """The traffic of `service` (unit/service; the only one when None), or what is wrong, in words.

    The rate is a high quantile over the ticks; tokens a request are totals over totals. Ticks without a measured rate
    do not count.
    """
    known: dict[str, Service] = {}
    loads: dict[str, list[tuple[float, ServiceLoad]]] = {}
    for record in records:
        event = record.event
        if isinstance(event, Configured):
            known |= {key: entry for key, _, entry in event.policy.services()}
        if isinstance(event, Observed) and not isinstance(event.observation.loads, Missing):
            for load in event.observation.loads:
                loads.setdefault(load.service, []).append((event.at_s, load))
    names = ", ".join(sorted(known)) or "none"
    if service is None and len(known) != 1:
        return f"holds several services; say --service, one of {names}"
    key = service if service is not None else next(iter(known))
    if key not in known:
        return f"holds no service {key}; it has {names}"
    rows = [row for _, load in loads.get(key, []) if (row := _rates(load)) is not None]
    if not sum(row[0] for row in rows):
        return f"saw no traffic of {key}; give --rps, --input-tokens and --output-tokens"
    arrived, prefill, decode = (sum(row[at] for row in rows) for at in range(3))
    rps, cv = _quantile([row[0] for row in rows]), _arrival_cv(loads[key])
    return Recorded(known[key], rps, prefill / arrived, decode / arrived, cv, len(rows))


def _arrival_cv(loads: Sequence[tuple[float, ServiceLoad]]) -> float:
    """As the controller follows it (`core.bursts`)."""
    known = POISSON
    seen: list[tuple[float, float]] = []
    for at_s, load in loads:
        if not isinstance(load.arrival_rps, Missing):
            rps = load.arrival_rps.value if isinstance(load.arrival_rps, Measured) else 0.0
            known = observe(known, seen[-2:], at_s, rps)
            seen.append((at_s, rps))
    return known.arrival_cv


def _rates(load: ServiceLoad) -> tuple[float, float, float] | None:
    signals = (load.arrival_rps, load.prefill_tps, load.decode_tps)
    values = [signal.value for signal in signals if isinstance(signal, Measured)]
    return (values[0], values[1], values[2]) if len(values) == len(signals) else None


def _quantile(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(PLANNED_QUANTILE * len(ordered)) - 1)]
