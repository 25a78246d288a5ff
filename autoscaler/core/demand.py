"""How much load each service must be ready for, at the end of the time it takes to get capacity.

Pure; may not do I/O or read a clock. The lead is measured (boots and loads seen, at P90) with the catalogue's priors
until then. A backlog is demand only at the rate that clears it within one lead: counting it whole is how others ask
for forty replicas where eight are needed.
"""

from __future__ import annotations

from datetime import datetime

from forecasting.baselines import short_forecast
from policies.model import Goal, PolicySet, Service

from .beliefs import Beliefs, ServiceBelief
from .capacity import KV_FILL
from .coldstart import boot_s, load_s
from .events import Forecast
from .model import Demand
from .reasons import Reason, ReasonCode, why
from .restrain import held_rps

QUANTILE: dict[Goal, float] = {"latency": 0.95, "throughput": 0.8, "cost": 0.5}
FORECAST_QUANTILES = (0.5, 0.8, 0.95)


def lead_s(beliefs: Beliefs, service: str) -> float:
    """The shortest way to more capacity of a service that its variants offer: boot + load, at P90 each."""
    ways = [boot_s(beliefs, s) + load_s(beliefs, s) for s in beliefs.shapes if s.service == service]
    return min(ways, default=0.0)


def forecast(beliefs: Beliefs, now_s: float) -> tuple[Forecast, ...]:
    """One forecast per service with any recent sample, in the order of the services' keys."""
    made = []
    for service in sorted({shape.service for shape in beliefs.shapes}):
        known = beliefs.services.get(service, ServiceBelief())
        lead = lead_s(beliefs, service)
        rates = [(row.at_s, row.arrival_rps) for row in known.history]
        quantiles = short_forecast(rates, now_s, lead, FORECAST_QUANTILES)
        if quantiles:
            made.append(Forecast(service=service, lead_s=lead, quantiles=quantiles, member="level_trend"))
    return tuple(made)


def demands(policy: PolicySet, beliefs: Beliefs, replicas_now: dict[str, int], now_s: float) -> tuple[Demand, ...]:
    """Demand of every service, most important first. `replicas_now` (by service) is the floor of a blind service."""
    return tuple(_demand(key, entry, beliefs, replicas_now.get(key, 0), now_s) for key, _, entry in policy.services())


def _demand(service: str, entry: Service, beliefs: Beliefs, replicas_now: int, now_s: float) -> Demand:
    known = beliefs.services.get(service, ServiceBelief())
    lead = lead_s(beliefs, service)
    quantile = QUANTILE[entry.goal]
    rps, reasons = _rps(service, entry, beliefs, known, quantile, lead, now_s)
    held, hold_reasons = held_rps(known.planned, rps, lead, entry.goal, now_s)
    floor, floor_reasons = _floor(entry, known, replicas_now)
    return Demand(
        service=service,
        quantile=quantile,
        lead_s=lead,
        unheld_rps=rps,
        arrival_rps=held,
        replicas_floor=floor,
        prefill_tps=held * known.input_tokens,
        decode_tps=held * known.output_tokens,
        reasons=(*reasons, *hold_reasons, *floor_reasons),
    )


def _rps(
    service: str, entry: Service, beliefs: Beliefs, known: ServiceBelief, quantile: float, lead: float, now_s: float
) -> tuple[float, tuple[Reason, ...]]:
    made = beliefs.forecasts.get(service)
    reasons: tuple[Reason, ...]
    if known.blind_why and known.planned:
        rps = known.planned[-1][1]  # what was last planned for: a blind service is neither grown nor shrunk
        return rps, (why(ReasonCode.METRICS_MISSING, known.blind_why, held_rps=rps),)
    if made is None:
        rps, reasons = 0.0, (why(ReasonCode.NO_HISTORY, samples=len(known.history)),)
    else:
        rps = dict(made.quantiles)[quantile]
        reasons = (why(ReasonCode.FORECAST_QUANTILE, arrival_rps=rps, quantile=quantile, lead_s=made.lead_s),)
    if known.queued > 0.0:
        extra = known.queued / max(lead, 1.0)
        rps, reasons = rps + extra, (*reasons, why(ReasonCode.BACKLOG, queued=known.queued, extra_rps=extra))
    if known.kv_fraction is not None and known.kv_fraction > KV_FILL:
        extra = rps * (known.kv_fraction / KV_FILL - 1.0)
        numbers = {"kv_fraction": known.kv_fraction, "limit": KV_FILL, "extra_rps": extra}
        rps, reasons = rps + extra, (*reasons, why(ReasonCode.KV_PRESSURE, **numbers))
    for event in entry.events:
        starts_at_s = datetime.fromisoformat(event.starts_at).timestamp()
        if starts_at_s - lead <= now_s < starts_at_s + event.lasts_s:
            rps += event.expected_rps
            reasons = (*reasons, why(ReasonCode.DECLARED_EVENT, event.name, expected_rps=event.expected_rps))
    return rps, reasons


def _floor(entry: Service, known: ServiceBelief, replicas_now: int) -> tuple[int, tuple[Reason, ...]]:
    """Replicas that no forecast may undercut."""
    floor = 0 if entry.scale_to_zero else entry.min_replicas
    reasons: list[Reason] = [why(ReasonCode.MIN_REPLICAS, floor=floor)] if floor else []
    if entry.warm_replicas > floor:
        floor = entry.warm_replicas
        reasons.append(why(ReasonCode.WARM_REPLICAS, warm=floor))
    if known.blind_why and replicas_now > floor:
        floor = min(replicas_now, entry.max_replicas)
        reasons.append(why(ReasonCode.METRICS_MISSING, known.blind_why, held_replicas=floor))
    return floor, tuple(reasons)
