"""What single keys of a scenario do not show: references that lead nowhere, traces that are absent. Looks for files
only; may not read a trace or a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from autoscaler.core.learn import family
from chaos.faults import INSTANT, KINDS
from chaos.scenario_format import Fault, Recorded, Supply
from policies.problems import Path, suggestion

if TYPE_CHECKING:
    from chaos.scenario import Scenario

Finding = tuple[Path, str]
MAX_TICKS = 5_000_000


def findings(scenario: Scenario) -> Iterator[Finding]:
    """Path and text of everything that does not fit together."""
    for check in (_times, _demand, _offerings, _pools, _loads, _quotas, _faults):
        yield from check(scenario)


def _times(scenario: Scenario) -> Iterator[Finding]:
    example = "write it like 2024-05-13T00:00:00Z"
    try:
        if datetime.fromisoformat(scenario.start_at).tzinfo is None:
            yield ("start_at",), f'"{scenario.start_at}" has no time zone; {example}'
    except ValueError:
        yield ("start_at",), f'"{scenario.start_at}" is not a date and time; {example}'
    if scenario.tick_s > scenario.duration_s:
        yield ("tick_s",), f"is {scenario.tick_s:g}, longer than duration_s {scenario.duration_s:g}; lower it"
    if scenario.duration_s / scenario.tick_s > MAX_TICKS:
        yield ("tick_s",), f"gives more than {MAX_TICKS:,} ticks; raise it, or lower duration_s"


def _demand(scenario: Scenario) -> Iterator[Finding]:
    known = [key for key, _, _ in scenario.policy_set.services()]
    if not scenario.demand:
        yield ("demand",), "is empty, so nothing would happen; give a row: {service: UNIT/SERVICE, synthetic: …}"
    for index, row in enumerate(scenario.demand):
        if row.service not in known:
            yield ("demand", index, "service"), f"{row.service} is in no policy; {suggestion(row.service, known)}"
        if row.trace is not None and row.synthetic is None and scenario.file(row.trace) is None:
            yield ("demand", index, "trace"), _absent(row.trace)


def _absent(trace: str) -> str:
    where = "is neither beside the scenario nor in $QM_DATA"
    return f"{trace} {where}; set QM_DATA, correct the path, or declare a synthetic stand-in"


def _offerings(scenario: Scenario) -> Iterator[Finding]:
    catalogue = scenario.catalogue_set
    for index, row in enumerate(scenario.supply):
        if row.id in (other.id for other in scenario.supply[:index]):
            yield ("supply", index, "id"), f"{row.id} is given twice; rename one"
        if row.market == "overflow":
            continue
        if row.instance_type not in catalogue.instance_types:
            near = suggestion(row.instance_type, catalogue.instance_types)
            remedy = near if near.startswith("did") else "correct it, or add it under catalogue"
            yield ("supply", index, "instance_type"), f"{row.instance_type} is not in the catalogue; {remedy}"
        elif row.price_usd_per_h is None and not scenario.price(row.id):
            text = f"is missing and the catalogue has none for {row.instance_type} {row.market}; add it"
            yield ("supply", index, "price_usd_per_h"), text


def _pools(scenario: Scenario) -> Iterator[Finding]:
    for index, row in enumerate(scenario.supply):
        path: Path = ("supply", index, "count")
        if not isinstance(row.count, Recorded):
            continue
        if row.count.synthetic is None and scenario.file(row.count.trace) is None:
            yield (*path, "trace"), _absent(row.count.trace)


def _loads(scenario: Scenario) -> Iterator[Finding]:
    known = sorted({variant.id for _, _, service in scenario.policy_set.services() for variant in service.variants})
    for index, row in enumerate(scenario.supply):
        for name in row.load_s if isinstance(row.load_s, dict) else ():
            if name not in known:
                yield ("supply", index, "load_s", name), f"{name} is a variant of no service; {suggestion(name, known)}"


def _quotas(scenario: Scenario) -> Iterator[Finding]:
    exact = {instance.family for instance in scenario.catalogue_set.instance_types.values()}
    families = sorted(exact | {family(name) for name in exact})
    for index, quota in enumerate(scenario.quotas):
        if quota.family not in families:
            yield ("quotas", index, "family"), f"{quota.family} is no family; {suggestion(quota.family, families)}"
        if (quota.family, quota.market) in ((other.family, other.market) for other in scenario.quotas[:index]):
            text = f"{quota.family} {quota.market} has a quota already; keep one"
            yield ("quotas", index), text


def _faults(scenario: Scenario) -> Iterator[Finding]:
    services = [key for key, _, _ in scenario.policy_set.services()]
    pools = sorted({word for row in scenario.supply for word in _words(row)})
    for index, fault in enumerate(scenario.faults):
        kind = KINDS.get(fault.kind)
        if kind is None:
            yield ("faults", index, "kind"), f"{fault.kind} is no kind of fault; {suggestion(fault.kind, KINDS)}"
            continue
        known = {"pools": pools, "services": services, "whole": []}[kind.aim]
        if fault.target != "*" and fault.target not in known:
            remedy = suggestion(fault.target, ["*", *known])
            yield ("faults", index, "target"), f"{fault.target} is nothing that {fault.kind} can act on; {remedy}"
        yield from (((("faults", index), text)) for text in _figures(fault))


def _figures(fault: Fault) -> Iterator[str]:
    kind = KINDS[fault.kind]
    if fault.value is not None and not kind.least <= fault.value <= kind.most:
        yield f"value {fault.value:g} must be from {kind.least:g} to {kind.most:g} ({kind.value}); correct it"
    if fault.kind not in INSTANT and fault.for_s <= 0:
        yield f"for_s is missing: {fault.kind} lasts; add it"
    if fault.kind in INSTANT and fault.for_s > 0:
        yield f"for_s has no meaning: {fault.kind} happens once; remove it"


def _words(row: Supply) -> tuple[str, ...]:
    """Everything a fault may call the offering by."""
    words = (row.id, row.zone, row.region, row.instance_type, row.market, row.pool, row.reservation)
    return tuple(word for word in words if word)
