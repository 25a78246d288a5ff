"""The report of a run: what users got, what it cost, and what went wrong.

Pure arithmetic over outcomes and facts; may not read a clock, a file or a network. `Report` is the contract of
``qm simulate --json`` and, with `live`, of ``qm up --json``; ``qm schema report`` prints it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from policies.model import Goal, PolicySet, Slo

from .facts import Facts

MIN_TOKENS_FOR_TPOT = 2


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Ttft(_Part):
    """Percentiles of the time to the first token, seconds; None when no request had one."""

    p50: float | None
    p95: float | None
    p99: float | None


class Tpot(_Part):
    """Percentiles of the time per output token after the first, seconds; None when nothing could be measured."""

    p50: float | None
    p95: float | None


class ServiceReport(_Part):
    """One service. `slo_attainment` = requests within every limit ÷ requests offered; shed and failed are misses."""

    requests: int
    slo_attainment: float | None
    fraction: float
    priority: int
    goal: Goal
    ttft_s: Ttft
    tpot_s: Tpot
    shed: int
    overflowed: int
    failed: int
    cold_start_misses: int
    tokens: int


class Launches(_Part):
    """Launch calls. `refused` counts by class of error."""

    attempted: int
    granted: int
    refused: dict[str, int]


class CostBy(_Part):
    """The cost split two ways, USD; each adds up to the whole."""

    unit: dict[str, float]
    market: dict[str, float]


class Violation(_Part):
    """A broken invariant (a missed SLO is a result, not a violation)."""

    at_s: float
    kind: str
    detail: str


class Reclaim(_Part):
    """A reclaim notice. `empty_at_s` is when the instance was first seen without replicas; None: never."""

    deadline_at_s: float
    empty_at_s: float | None


class Live(_Part):
    """What only a real run has. `nodes_used` and `pools_used` held the `max_ready_replicas`, all at one moment."""

    engine: Literal["vllm", "sim"]
    max_ready_replicas: int
    nodes_used: int
    pools_used: int
    refused_then_granted_same_tick: int
    reclaims: tuple[Reclaim, ...]
    failed_requests: int
    leaked_instances: int
    leaked_processes: int


class Report(_Part):
    """A run. Seconds, USD, hours by name; `first_refusal_to_each_rung_s` maps a rung of the ladder to seconds."""

    scenario: str
    controller: str
    seed: int
    duration_s: float
    wall_s: float
    requests: int
    cost_usd: float
    cost_usd_by: CostBy
    services: dict[str, ServiceReport]
    launches: Launches
    first_refusal_to_each_rung_s: dict[str, float]
    direction_changes: int
    priority_inversion_s: float
    idle_reservation_h: float
    violations: tuple[Violation, ...]
    live: Live | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one request got. `at_s` is when it was first sent; times count from there, waits and retries included.

    `ttft_s` and `tpot_s` are None when there was no first token, or fewer than two.
    """

    service: str
    at_s: float
    state: Literal["ok", "shed", "failed"]
    e2e_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    overflowed: bool = False
    error: str = ""


def meets(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request was within every limit of `slo`. TPOT is not tested below two output tokens."""
    if outcome.state != "ok":
        return False
    tpot_s = outcome.tpot_s if outcome.output_tokens >= MIN_TOKENS_FOR_TPOT else None
    pairs = (
        (slo.ttft_s, outcome.ttft_s),
        (slo.tpot_s, tpot_s),
        (slo.e2e_s, outcome.e2e_s),
        (slo.deadline_s, outcome.e2e_s),
    )
    return all(limit is None or seen is None or seen <= limit for limit, seen in pairs)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear-interpolation percentile, or None of nothing."""
    return float(np.percentile(values, percent)) if values else None


def service_report(outcomes: Sequence[Outcome], goal: Goal, priority: int, slo: Slo, cold: int) -> ServiceReport:
    """One service's line from its outcomes; `cold` = those that missed while no replica was ready."""
    ttft_s = [seen.ttft_s for seen in outcomes if seen.ttft_s is not None]
    tpot_s = [seen.tpot_s for seen in outcomes if seen.tpot_s is not None]
    met = sum(meets(seen, slo) for seen in outcomes)
    return ServiceReport(
        requests=len(outcomes),
        slo_attainment=met / len(outcomes) if outcomes else None,
        fraction=slo.fraction,
        priority=priority,
        goal=goal,
        ttft_s=Ttft(p50=percentile(ttft_s, 50), p95=percentile(ttft_s, 95), p99=percentile(ttft_s, 99)),
        tpot_s=Tpot(p50=percentile(tpot_s, 50), p95=percentile(tpot_s, 95)),
        shed=sum(seen.state == "shed" for seen in outcomes),
        overflowed=sum(seen.overflowed for seen in outcomes),
        failed=sum(seen.state == "failed" for seen in outcomes),
        cold_start_misses=cold,
        tokens=sum(seen.input_tokens + seen.output_tokens for seen in outcomes),
    )


def services_report(outcomes: Iterable[Outcome], policy: PolicySet, facts: Facts) -> dict[str, ServiceReport]:
    """Every service of the policy, most important first."""
    by_service: dict[str, list[Outcome]] = {key: [] for key, _, _ in policy.services()}
    for seen in outcomes:
        by_service[seen.service].append(seen)
    return {
        key: service_report(
            by_service[key],
            service.goal,
            service.priority,
            service.slo,
            sum(facts.was_cold(key, seen.at_s) and not meets(seen, service.slo) for seen in by_service[key]),
        )
        for key, _, service in policy.services()
    }


def build(
    *,
    scenario: str,
    controller: str,
    seed: int,
    duration_s: float,
    wall_s: float,
    outcomes: Sequence[Outcome],
    policy: PolicySet,
    facts: Facts,
    violations: Sequence[Violation] = (),
    live: Live | None = None,
) -> Report:
    """The whole report. `violations` are added to those that the journal's facts show."""
    found = tuple(Violation(at_s=at_s, kind=kind, detail=detail) for at_s, kind, detail in facts.violations)
    cost_by = CostBy(unit=facts.cost_by_unit(), market=facts.cost_by_market())
    return Report(
        scenario=scenario,
        controller=controller,
        seed=seed,
        duration_s=duration_s,
        wall_s=wall_s,
        requests=len(outcomes),
        cost_usd=sum(cost_by.market.values()),
        cost_usd_by=cost_by,
        services=services_report(outcomes, policy, facts),
        launches=Launches(attempted=facts.attempted, granted=facts.granted, refused=_sorted(facts.refused)),
        first_refusal_to_each_rung_s=dict(facts.rungs_s),
        direction_changes=facts.direction_changes,
        priority_inversion_s=facts.priority_inversion_s,
        idle_reservation_h=facts.idle_reservation_h,
        violations=found + tuple(violations),
        live=live,
    )


def live_part(engine: Literal["vllm", "sim"], facts: Facts, failed: int, instances: int, processes: int) -> Live:
    """The `live` part: what the journal shows, and what was counted after the run."""
    reclaims = tuple(Reclaim(deadline_at_s=deadline, empty_at_s=empty) for deadline, empty in facts.reclaims())
    return Live(
        engine=engine,
        max_ready_replicas=facts.peak.replicas,
        nodes_used=facts.peak.nodes,
        pools_used=facts.peak.pools,
        refused_then_granted_same_tick=facts.refused_then_granted,
        reclaims=reclaims,
        failed_requests=failed,
        leaked_instances=instances,
        leaked_processes=processes,
    )


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))
