"""Limits that contradict each other although each is allowed. Pure but for the time zone database; may not do other I/O
or read a clock.

Every check yields the keys it compared and what to do; the first key is the one reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from urllib.parse import urlsplit

from .clocks import is_zone
from .model import Event, Service, Unit
from .problems import Path

Finding = tuple[tuple[str, ...], Path, str]  # top-level keys compared, path to report, text
OWNED_MARKETS = ("on_demand", "odcr", "block")
MOST_LIMIT_S = 86_400.0
YEARS = (1970, 2200)  # of an event: far from the ends of what a date can hold, for its repetitions are worked out


def service_findings(service: Service) -> Iterator[Finding]:
    """Everything contradictory in one service."""
    for check in (_replicas, _idle, _slo, _markets, _overflow, _sacrifice, _variants, _events, _repeats):
        yield from check(service)


def unit_findings(unit: Unit) -> Iterator[Finding]:
    """Everything contradictory in one unit as a whole; its services are checked by `service_findings`."""
    if not unit.services:
        yield ("services",), ("services",), "is empty; give at least one service, or remove the file"
    for first, index, name in _twice(service.name for service in unit.services):
        text = f"the service {name} is named twice, also as item {first + 1} of the list; rename or remove one"
        yield ("services",), ("services", index, "name"), text
    yield from _api_keys(unit)
    floor_gpus = sum(service.min_replicas * _least_gpus(service) for service in unit.services)
    if unit.quota_gpus is not None and floor_gpus > unit.quota_gpus:
        text = f"is {unit.quota_gpus}, but min_replicas of the services need {floor_gpus} GPUs; raise it, or lower them"
        yield ("quota_gpus", "services"), ("quota_gpus",), text
    yield from _loans(unit)
    yield from _budgets(unit)


def house_findings(units: Sequence[Unit]) -> Iterator[tuple[int, Path, str]]:
    """Number of the unit, path and text of everything contradictory between units.

    A loan has no circle to go: only what a unit does not hold of its own share is lent, never what it borrows.
    """
    for number, unit in enumerate(units):
        if not isinstance(unit.borrows, bool) and unit.quota_gpus is not None:
            lent = sum(_lends(other) for other in units if other is not unit)
            if unit.borrows > lent:
                text = (
                    f"is {unit.borrows}, but all other units together lend at most {lent} GPUs; lower it, or lend more"
                )
                yield number, ("borrows",), text


def _lends(unit: Unit) -> int:
    """GPUs that a unit without any load lends."""
    quota = unit.quota_gpus or 0
    return (quota if unit.lends else 0) if isinstance(unit.lends, bool) else min(unit.lends, quota)


def _loans(unit: Unit) -> Iterator[Finding]:
    for key in ("lends", "borrows"):
        value = getattr(unit, key)
        if not isinstance(value, bool) and unit.quota_gpus is None:
            yield (key, "quota_gpus"), (key,), f"is {value} GPUs of no quota; give quota_gpus, or leave {key} out"
    if not isinstance(unit.lends, bool) and unit.quota_gpus is not None and unit.lends > unit.quota_gpus:
        text = f"is {unit.lends}, more than quota_gpus {unit.quota_gpus}; lower it, or write true"
        yield ("lends", "quota_gpus"), ("lends",), text


def _budgets(unit: Unit) -> Iterator[Finding]:
    hour, month = unit.budget_usd_per_h, unit.budget_usd_per_month
    if hour is not None and month is not None and hour > month:
        text = f"is {hour:g}, more than budget_usd_per_month {month:g} in a single hour; lower it, or raise the month's"
        yield ("budget_usd_per_h", "budget_usd_per_month"), ("budget_usd_per_h",), text


def _api_keys(unit: Unit) -> Iterator[Finding]:
    names = {service.name for service in unit.services}
    for first, index, _ in _twice(key.sha256 for key in unit.api_keys):
        text = f"is the key of item {first + 1} of the list, too; one key belongs to one tenant"
        yield ("api_keys",), ("api_keys", index, "sha256"), text
    for index, key in enumerate(unit.api_keys):
        if key.service is not None and key.service not in names:
            text = f"{key.service} is no service of this unit; known: {', '.join(sorted(names))}"
            yield ("api_keys", "services"), ("api_keys", index, "service"), text


def _replicas(service: Service) -> Iterator[Finding]:
    most = service.max_replicas
    for key in ("min_replicas", "warm_replicas", "on_demand_floor"):
        value = getattr(service, key)
        if value > most:
            yield (
                (key, "max_replicas"),
                (key,),
                f"is {value}, more than max_replicas {most}; lower it, or raise max_replicas",
            )


def _idle(service: Service) -> Iterator[Finding]:
    for key in ("min_replicas", "warm_replicas"):
        value = getattr(service, key)
        if service.scale_to_zero and value > 0:
            text = f"is true, but {key} is {value}; set {key}: 0, or scale_to_zero: false"
            yield ("scale_to_zero", key), ("scale_to_zero",), text


def _slo(service: Service) -> Iterator[Finding]:
    slo = service.slo
    for key in ("e2e_s", "deadline_s"):
        whole_s = getattr(slo, key)
        if whole_s is not None and slo.ttft_s is not None and whole_s < slo.ttft_s:
            text = f"is {whole_s:g}, less than ttft_s {slo.ttft_s:g}, which it includes; raise it, or lower ttft_s"
            yield ("slo",), ("slo", key), text
    if slo.e2e_s is not None and slo.deadline_s is not None and slo.deadline_s != slo.e2e_s:
        looser = "deadline_s" if slo.deadline_s > slo.e2e_s else "e2e_s"
        text = "is never what decides: e2e_s and deadline_s limit the same time; keep the smaller one"
        yield ("slo",), ("slo", looser), text
    if slo.ttft_s is not None and slo.ttft_s > MOST_LIMIT_S:
        yield ("slo",), ("slo", "ttft_s"), f"is {slo.ttft_s:g} s, more than a day; seconds are meant"
    if service.goal == "latency" and slo.ttft_s is None and slo.tpot_s is None and slo.e2e_s is None:
        yield ("slo", "goal"), ("slo",), "sets no limit although the goal is latency; give ttft_s, tpot_s or e2e_s"


def _markets(service: Service) -> Iterator[Finding]:
    if not service.markets:
        yield ("markets",), ("markets",), "is empty; name at least one market, or leave the key out"
    elif service.on_demand_floor and not set(service.markets) & set(OWNED_MARKETS):
        kinds = ", ".join(OWNED_MARKETS)
        text = f"is {service.on_demand_floor}, but markets allow none of {kinds}; add one, or set it to 0"
        yield ("on_demand_floor", "markets"), ("on_demand_floor",), text


def _overflow(service: Service) -> Iterator[Finding]:
    users = [key for key in ("sacrifice", "markets") if "overflow" in getattr(service, key)]
    if service.overflow is None:
        for key in users:
            yield (
                (key, "overflow"),
                (key,),
                "names overflow, but there is no overflow block; add one with its url, or drop it",
            )
    elif not users:
        text = "is never used; add overflow to sacrifice or markets, or remove the block"
        yield ("overflow", "sacrifice", "markets"), ("overflow",), text
    elif service.overflow.key_env is not None and service.overflow.key_file is not None:
        yield ("overflow",), ("overflow", "key_file"), "is given beside key_env; keep one of them"
    if service.overflow is not None and (text := _url_problem(service.overflow.url)):
        yield ("overflow",), ("overflow", "url"), text


def _url_problem(url: str) -> str:
    """What is wrong with an address beyond its first letters; its words are not repeated, they may hold a password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "has no usable host or port; write it like https://api.example.com/v1"
    if "@" in parts.netloc:
        return "holds a name or a password, which would be logged; remove it, and use key_env or key_file"
    if not host or not url.isprintable() or " " in url:
        return "has no usable host, or a character that no address has; write it like https://api.example.com/v1"
    if parts.query or parts.fragment:
        return "goes on after its path, where the gateway adds its own; end it with the path, like /v1"
    return ""


def _sacrifice(service: Service) -> Iterator[Finding]:
    if "smaller_variant" in service.sacrifice and len(service.variants) < 2:
        text = "names smaller_variant, but there are not two variants; add a variant, or drop it"
        yield ("sacrifice", "variants"), ("sacrifice",), text
    if not service.sacrifice:
        yield ("sacrifice",), ("sacrifice",), "is empty; name at least one of queue, smaller_variant, overflow, shed"
    elif "shed" in service.sacrifice[:-1]:
        index = service.sacrifice.index("shed")
        text = f"shed stands before {service.sacrifice[index + 1]}, which would never be tried; move shed to the end"
        yield ("sacrifice",), ("sacrifice", index), text


def _variants(service: Service) -> Iterator[Finding]:
    if not service.variants:
        yield ("variants",), ("variants",), "is empty; give at least one variant"
    for first, index, name in _twice(variant.id for variant in service.variants):
        text = f"the variant {name} is named twice, also as item {first + 1} of the list; rename or remove one"
        yield ("variants",), ("variants", index, "id"), text
    if not service.instance_types:
        return
    keys, used = ("instance_types", "variants"), {variant.instance_type for variant in service.variants}
    for index, name in enumerate(service.instance_types):
        if name not in used:
            yield keys, ("instance_types", index), f"{name} is used by no variant; add a variant for it, or remove it"
    for index, variant in enumerate(service.variants):
        if variant.instance_type not in service.instance_types:
            text = f"{variant.instance_type} is not in instance_types; add it there, or remove the variant"
            yield keys, ("variants", index, "instance_type"), text


def _events(service: Service) -> Iterator[Finding]:
    for first, index, name in _twice(event.name for event in service.events):
        text = f"the event {name} is named twice, also as item {first + 1} of the list; rename or remove one"
        yield ("events",), ("events", index, "name"), text
    for index, event in enumerate(service.events):
        text = _date_problem(event)
        if text:
            yield ("events",), ("events", index, "starts_at"), text
        if event.zone is not None and not is_zone(event.zone):
            text = f'"{event.zone}" is no time zone; write one like Europe/Berlin, or leave it out'
            yield ("events",), ("events", index, "zone"), text
        if event.clock_changes:
            yield ("events",), ("events", index, "clock_changes"), "is worked out from zone; remove it"


def _date_problem(event: Event) -> str:
    example = "write it like 2026-12-24T18:00:00+01:00"
    try:
        instant = datetime.fromisoformat(event.starts_at)
    except ValueError:
        return f'"{event.starts_at}" is not a date and time; {example}'
    if not YEARS[0] <= instant.year <= YEARS[1]:
        return f"is in the year {instant.year}, not between {YEARS[0]} and {YEARS[1]}; correct it"
    return f'"{event.starts_at}" has no time zone; {example}' if instant.tzinfo is None else ""


def _repeats(service: Service) -> Iterator[Finding]:
    for key in ("markets", "zones", "instance_types", "sacrifice"):
        for _, index, value in _twice(getattr(service, key)):
            yield (key,), (key, index), f"{value} is listed twice; remove one"


def _twice(names: Iterable[str]) -> Iterator[tuple[int, int, str]]:
    """First index, index and name of every name that came before."""
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            yield first[name], index, name
        first.setdefault(name, index)


def _least_gpus(service: Service) -> int:
    """GPUs of the smallest variant."""
    return min((variant.tp * variant.nodes_per_replica for variant in service.variants), default=0)
