"""How much load each service must be ready for, from the end of the time it takes to get capacity.

Pure; may not do I/O or read a clock. The lead is measured (boots and loads seen, at P90) with the catalogue's priors
until then. A backlog is demand only at the rate that clears it within one lead: counting it whole is how others ask
for forty replicas where eight are needed.

The long forecaster speaks once it has been tested on enough windows; until then, and while the last minute lies above
its band, the short forecast does. A band that covered too little of late is replaced by the widest one. A forecaster
that fails leaves its service's last forecast in force.
"""

from __future__ import annotations

from dataclasses import replace

from forecasting.baselines import LEVEL_WINDOW_S, short_forecast
from policies.model import Goal, PolicySet, Service

from .beliefs import Beliefs, ServiceBelief
from .capacity import KV_FILL
from .coldstart import boot_s, load_s
from .declared import begun, with_event, with_prior
from .defects import defect
from .events import Forecast
from .model import Demand
from .patience import window_s
from .reasons import Reason, ReasonCode, why
from .restrain import held_rps
from .series import QUANTILES, LongForecast, long_forecast, mix_ahead, rate_before, seen_s

QUANTILE: dict[Goal, float] = {"latency": 0.95, "throughput": 0.8, "cost": 0.5}
FORECAST_QUANTILES = (0.5, 0.8, 0.95)
TESTED_WINDOWS = 30.0  # realised windows, none overlapping, before the long forecaster is believed
BREACH = 0.85  # recent coverage of the .95 quantile below which its band is not believed
AWAKE = 0.05  # of the mean rate: a silent service whose median forecast is below this sleeps on
LEAP = 1.5  # times what the last minutes support: growth learnt at a tenth of the load says little of a crowd
SHORT, WIDEST, LAST = "level_trend", "widest", "last_value"


def lead_s(beliefs: Beliefs, service: str) -> float:
    """The shortest way to more capacity of a service that its variants offer: boot + load, at P90 each."""
    ways = [boot_s(beliefs, s) + load_s(beliefs, s) for s in beliefs.shapes if s.service == service]
    return min(ways, default=0.0)


def forecast(beliefs: Beliefs, now_s: float) -> tuple[Forecast, ...]:
    """One forecast per service with any recent sample, in the order of the services' keys. Never raises."""
    rows = (_made(beliefs, service, now_s) for service in sorted({shape.service for shape in beliefs.shapes}))
    return tuple(row for row in rows if row is not None)


def _made(beliefs: Beliefs, service: str, now_s: float) -> Forecast | None:
    try:
        return _forecast(beliefs, service, now_s)
    except Exception as error:
        return _last(beliefs, service, defect(error))


def _forecast(beliefs: Beliefs, service: str, now_s: float) -> Forecast | None:
    known = beliefs.services.get(service, ServiceBelief())
    lead = lead_s(beliefs, service)
    rates = [(row.at_s, row.arrival_rps) for row in known.history]
    short = short_forecast(rates, now_s, lead, FORECAST_QUANTILES)
    if not short:
        return None
    inputs, outputs = mix_ahead(beliefs.series, service, lead)
    row = Forecast(service=service, lead_s=lead, quantiles=short, member=SHORT)
    row = replace(row, input_tokens=inputs, output_tokens=outputs)
    return _with_long(row, long_forecast(beliefs.series, service, lead))


def _last(beliefs: Beliefs, service: str, failed: str) -> Forecast:
    """The forecast in force, never below the last rate seen: while forecasts fail, capacity grows or is held."""
    unknown = Forecast(service=service, lead_s=0.0, quantiles=tuple((q, 0.0) for q in FORECAST_QUANTILES), member=LAST)
    before = beliefs.forecasts.get(service, unknown)
    history = beliefs.services.get(service, ServiceBelief()).history
    seen = history[-1].arrival_rps if history else 0.0
    return replace(before, quantiles=tuple((q, max(rps, seen)) for q, rps in before.quantiles), failed=failed)


def _with_long(short: Forecast, long: LongForecast | None) -> Forecast:
    """The long forecast where it may speak, never below what is seen already."""
    if long is None or long.windows < TESTED_WINDOWS:
        return short
    rates = dict(zip(QUANTILES, long.rates, strict=True))
    now = dict(short.quantiles)
    if now[0.5] <= 0.0 and rates[0.5] < AWAKE * long.mean:
        return short  # silence is not amplified by what the band allows, only by what is expected
    said = {q: rates[q] for q in FORECAST_QUANTILES}
    member, breached = long.member, long.coverage < BREACH
    most = LEAP * now[0.95]
    if breached:
        said = {q: max(rates[0.99], now[q]) if q > 0.5 else rate for q, rate in said.items()}
        member = WIDEST
    elif now[0.5] > rates[0.95]:
        said = {q: max(rate, now[q]) for q, rate in said.items()}
        member = SHORT
    if most > 0.0:
        said = {q: min(rate, most) for q, rate in said.items()}
    return replace(
        short,
        quantiles=tuple(said.items()),
        member=member,
        commitment_s=long.commitment_s,
        coverage=long.coverage,
        breached=breached,
    )


def mix(beliefs: Beliefs, service: str) -> tuple[float, float]:
    """(input, output) tokens a request to be ready for: as seen, or as forecast where that is longer. 0 is unknown."""
    known = beliefs.services.get(service, ServiceBelief())
    made = beliefs.forecasts.get(service)
    if made is None:
        return known.input_tokens, known.output_tokens
    return max(known.input_tokens, made.input_tokens), max(known.output_tokens, made.output_tokens)


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
    inputs, outputs = mix(beliefs, service)
    return Demand(
        service=service,
        quantile=quantile,
        lead_s=lead,
        unheld_rps=rps,
        arrival_rps=held,
        replicas_floor=floor,
        prefill_tps=held * inputs,
        decode_tps=held * outputs,
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
        reasons = (
            why(ReasonCode.FORECAST_QUANTILE, made.member, arrival_rps=rps, quantile=quantile, lead_s=made.lead_s),
        )
        if made.breached:
            reasons = (*reasons, why(ReasonCode.COVERAGE_BREACH, coverage=made.coverage or 0.0, wanted=0.95))
        if made.failed:
            reasons = (*reasons, why(ReasonCode.FORECAST_FAILED, made.failed))
    patient_s = window_s(entry, lead)
    if patient_s is not None:
        rps = known.queued / patient_s
        return rps, (*reasons, why(ReasonCode.PATIENT, queued=known.queued, window_s=patient_s, planned_rps=rps))
    if known.tasks.ahead_rps > rps:
        rps = known.tasks.ahead_rps
        numbers = {"begun_rps": known.tasks.begun_rps, "calls": known.tasks.calls, "arrival_rps": rps}
        reasons = (*reasons, why(ReasonCode.TASKS_BEGUN, **numbers))
    if known.queued > 0.0:
        extra = known.queued / max(lead, 1.0)
        rps, reasons = rps + extra, (*reasons, why(ReasonCode.BACKLOG, queued=known.queued, extra_rps=extra))
    if known.kv_fraction is not None and known.kv_fraction > KV_FILL:
        extra = rps * (known.kv_fraction / KV_FILL - 1.0)
        numbers = {"kv_fraction": known.kv_fraction, "limit": KV_FILL, "extra_rps": extra}
        rps, reasons = rps + extra, (*reasons, why(ReasonCode.KV_PRESSURE, **numbers))
    return _declared(service, entry, beliefs, rps, reasons, now_s)


def _declared(
    service: str, entry: Service, beliefs: Beliefs, rps: float, reasons: tuple[Reason, ...], now_s: float
) -> tuple[float, tuple[Reason, ...]]:
    """What the policy says of the load, beside what is forecast of it."""
    made, lead = beliefs.forecasts.get(service), lead_s(beliefs, service)
    level = dict(made.quantiles)[0.5] if made is not None else 0.0
    seen = seen_s(beliefs.series, service)
    expected = with_prior(entry.expected_rps, rps, level, seen)
    if expected > rps:
        numbers = {"expected_rps": entry.expected_rps, "seen_s": seen, "arrival_rps": expected}
        rps, reasons = expected, (*reasons, why(ReasonCode.DECLARED_RATE, **numbers))
    for event in entry.events:
        start = begun(event, now_s, lead)
        if start is not None:
            before = rate_before(beliefs.series, service, start)
            rps = with_event(event, rps, _now_rps(beliefs, service), before, now_s - start)
            numbers = {"expected_rps": event.expected_rps, "load_factor": event.load_factor, "arrival_rps": rps}
            reasons = (*reasons, why(ReasonCode.DECLARED_EVENT, event.name, **numbers))
    return rps, reasons


def _now_rps(beliefs: Beliefs, service: str) -> float:
    """The mean of the last minute's samples; 0 before any."""
    history = beliefs.services.get(service, ServiceBelief()).history
    last = [row.arrival_rps for row in history if row.at_s > history[-1].at_s - LEVEL_WINDOW_S]
    return sum(last) / len(last) if last else 0.0


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
