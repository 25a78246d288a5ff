"""Why the last launch went where it went: one launch's story, put together from the journal.

Pure: folds records with `core.learn`; may not read files or a clock, or decide anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from autoscaler.core.beliefs import EMPTY, Beliefs, OfferingBelief
from autoscaler.core.events import (
    Event,
    LaunchAmbiguous,
    LaunchGranted,
    LaunchRefused,
    LaunchTried,
    Ordered,
    Planned,
    Record,
)
from autoscaler.core.learn import learn
from autoscaler.core.model import Launch, Plan
from autoscaler.core.reasons import Reason, ReasonCode

FIRST_INSTANT_S = 1e8  # no duration is three years


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One offering of the launch's ladder as it stood before the tick, and what it answered in it.

    `outcome`: granted, refused, ambiguous, unanswered, not tried, or cooling down (then it was no alternate at all).
    """

    offering: str
    price_usd_per_h: float | None
    refusals_in_row: int
    cool_until_s: float
    last_refusal: str
    outcome: str
    asked: int
    granted: int
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One launch. `demand` and `reasons` are sentences of code and numbers; `remedies` say what would change it."""

    service: str
    variant: str
    plan_id: str
    at_s: float
    launch_id: str
    count: int
    granted: int
    demand: tuple[str, ...]
    reasons: tuple[str, ...]
    rungs: tuple[Rung, ...]
    remedies: tuple[str, ...]


@dataclass(slots=True)
class _Found:
    plan: Plan
    launch: Launch
    beliefs: Beliefs
    answers: list[Event] = field(default_factory=list)


def explain(records: Iterable[Record], service: str | None = None, at_s: float | None = None) -> Explanation | None:
    """The newest launch (of `service`, at or before `at_s`), or None when the journal holds none."""
    found: _Found | None = None
    beliefs = EMPTY
    for record in records:
        event = record.event
        if at_s is not None and event.at_s > at_s:
            break
        if isinstance(event, Planned):
            mine = [row for row in event.plan.launches if service in (None, row.service)]
            found = _Found(event.plan, mine[-1], beliefs) if mine else found
        elif (
            found is not None
            and isinstance(event, LaunchTried | LaunchGranted | LaunchRefused | LaunchAmbiguous)
            and event.intent == found.launch.id
        ):
            found.answers.append(event)
        beliefs = learn(beliefs, event)
    return _told(found) if found is not None else None


def _told(found: _Found) -> Explanation:
    launch = found.launch
    rungs = _rungs(found)
    demand = next((row for row in found.plan.demands if row.service == launch.service), None)
    target = next((t for t in found.plan.targets if (t.service, t.variant) == (launch.service, launch.variant)), None)
    return Explanation(
        service=launch.service,
        variant=launch.variant,
        plan_id=found.plan.id,
        at_s=found.plan.at_s,
        launch_id=launch.id,
        count=launch.count,
        granted=sum(rung.granted for rung in rungs),
        demand=tuple(
            words(reason) for reason in (*(demand.reasons if demand else ()), *(target.reasons if target else ()))
        ),
        reasons=tuple(words(reason) for reason in launch.reasons),
        rungs=rungs,
        remedies=(*_remedies(launch, rungs), *_limits(target.reasons if target else ())),
    )


def _rungs(found: _Found) -> tuple[Rung, ...]:
    """Alternates in the order of the plan, then the offerings that were left out because they cool down."""
    left_out = [r.subject for r in found.launch.reasons if r.code is ReasonCode.COOLING_DOWN and r.subject]
    return (
        *(_rung(found, offering, "not tried") for offering in found.launch.alternates),
        *(_rung(found, offering, "cooling down") for offering in left_out if offering not in found.launch.alternates),
    )


def _rung(found: _Found, offering: str, outcome: str) -> Rung:
    belief = found.beliefs.offerings.get(offering, OfferingBelief())
    offer = found.beliefs.offers.get(offering)
    asked = granted = 0
    code = ""
    for event in found.answers:
        if (
            not isinstance(event, LaunchTried | LaunchGranted | LaunchRefused | LaunchAmbiguous)
            or event.offering != offering
        ):
            continue
        match event:
            case LaunchTried():
                asked, outcome = event.count, "unanswered"
            case LaunchGranted():
                granted, outcome = len(event.instance_ids), "granted"
            case LaunchRefused():
                code, outcome = event.code, "refused"
            case LaunchAmbiguous():
                code, outcome = event.why, "ambiguous"
    return Rung(
        offering=offering,
        price_usd_per_h=offer.price_usd_per_h if offer is not None else None,
        refusals_in_row=belief.refusals_in_row,
        cool_until_s=belief.cool_until_s,
        last_refusal=belief.last_refusal,
        outcome=outcome,
        asked=asked,
        granted=granted,
        code=code,
    )


def _remedies(launch: Launch, rungs: tuple[Rung, ...]) -> tuple[str, ...]:
    """What would have sent it elsewhere, from what stood in its way."""
    lines = [
        f"{r.offering} would have been taken, had it not answered {r.code}" for r in rungs if r.outcome == "refused"
    ]
    lines += [
        f"{r.offering} is left out after {r.refusals_in_row} refusals ({r.last_refusal}): asked again after its rest"
        for r in rungs
        if r.outcome == "cooling down"
    ]
    if any(r.outcome == "ambiguous" for r in rungs):
        lines.append("an unanswered call stops the launch for this tick: the next listing shows whether it took effect")
    rest = [r for r in rungs if r.outcome == "not tried"]
    if rest:
        lines.append(
            f"{rest[0].offering} would be next: when those before it are refused, or when it is cheaper than they are"
        )
    missing = launch.count - sum(r.granted for r in rungs)
    if missing > 0 and not rest:
        lines.append(
            f"{missing} of {launch.count} stay missing: allow more markets, zones or instance types in the policy"
        )
    return tuple(lines)


_LIMITS = {
    ReasonCode.QUOTA_GPUS: "the share of unit {0} binds: raise its quota_gpus, or let other units lend more",
    ReasonCode.MAX_REPLICAS: "the service's ceiling binds: raise max_replicas",
    ReasonCode.BUDGET: "the hourly budget of unit {0} binds: raise budget_usd_per_h, or allow cheaper variants",
    ReasonCode.BUDGET_MONTH: "the rest of the month's budget of unit {0} binds: raise budget_usd_per_month, or wait",
    ReasonCode.PREEMPTED: "{0} took GPUs of this service: raise its priority, or the other's supply",
    ReasonCode.SMALLER_VARIANT: "{0} stands in for a better variant, which is taken again when it can be had",
}


def _limits(reasons: tuple[Reason, ...]) -> Iterator[str]:
    """What the policy itself kept from the service, and which of its words would change that."""
    for reason in reasons:
        if reason.code in _LIMITS:
            yield f"{_LIMITS[reason.code].format(reason.subject)} ({words(reason)})"


def words(reason: Reason) -> str:
    """``forecast_quantile: arrival_rps 12.3, quantile 0.95``: six significant digits, instants as UTC times."""
    numbers = ", ".join(f"{name} {_number(name, value)}" for name, value in reason.numbers)
    head = f"{reason.code.value} {reason.subject}".strip()
    return f"{head}: {numbers}" if numbers else head


def order_words(order: Ordered) -> str:
    """``freeze support/chat until 12-01 18:00 UTC, by ann: load test``."""
    count = f" of {order.replicas}" if order.verb == "floor" else ""
    end = f" until {datetime.fromtimestamp(order.until_s, UTC):%m-%d %H:%M UTC}" if order.verb != "unfreeze" else ""
    return f"{order.verb} {order.subject}{count}{end}, by {order.who}: {order.why}"


def _number(name: str, value: float) -> str:
    if name.endswith("_s") and value >= FIRST_INSTANT_S:
        return datetime.fromtimestamp(value, UTC).strftime("%H:%M:%S UTC")
    return f"{value:.6g}"
