"""Why a quantity in a plan has its value: a code fit for a metric label, and the numbers behind it.

Pure; may not do I/O. Every number named here is produced by the line of code that used it, so that replacing one by a
constant changes what an operator reads and fails a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ReasonCode(StrEnum):
    """One word for one cause. Values are metric labels: add, never rename."""

    FORECAST_QUANTILE = "forecast_quantile"  # arrival_rps, quantile, lead_s
    DECLARED_EVENT = "declared_event"  # expected_rps, load_factor, arrival_rps
    DECLARED_RATE = "declared_rate"  # expected_rps, seen_s, arrival_rps: few minutes seen, the policy's word counts
    TASKS_BEGUN = "tasks_begun"  # begun_rps, calls, arrival_rps: their calls are still to come
    BACKLOG = "backlog"  # queued, extra_rps
    PATIENT = "patient"  # queued, window_s, planned_rps
    KV_PRESSURE = "kv_pressure"  # kv_fraction, limit, extra_rps
    COVERAGE_BREACH = "coverage_breach"  # coverage, wanted
    FORECAST_FAILED = "forecast_failed"  # the last one, or what is seen where that is more
    NO_HISTORY = "no_history"  # samples
    METRICS_MISSING = "metrics_missing"  # held_replicas
    CAPACITY_PER_REPLICA = "capacity_per_replica"  # rps, slots, batch, pool, arrival_cv
    CALIBRATED = "calibrated"  # width, ticks, and the factor of each constant
    DRIFTED = "drifted"  # ratio, at_s
    SLOW_NODE = "slow_node"  # ratio, rps
    UNREACHABLE_SLO = "unreachable_slo"  # floor_s, limit_s; or floor, limit of a fraction
    LOADING_PROTECTED = "loading_protected"  # loading, age_s
    LOAD_EXPIRED = "load_expired"  # age_s, limit_s
    MIN_REPLICAS = "min_replicas"  # floor
    MAX_REPLICAS = "max_replicas"  # ceiling, wanted
    WARM_REPLICAS = "warm_replicas"  # warm
    QUOTA_GPUS = "quota_gpus"  # quota_gpus, wanted_gpus, and lent_gpus where others lend too little
    BUDGET = "budget"  # budget_usd_per_h, planned_usd_per_h
    BUDGET_MONTH = "budget_month"  # pace_usd_per_h, planned_usd_per_h
    HOLD_WINDOW = "hold_window"  # surplus_since_s, hold_s
    PLACED = "placed"  # placed, wanted
    WAITS_FOR_INSTANCE = "waits_for_instance"  # starting_gpus, missing_gpus
    CHEAPEST = "cheapest"  # usd_per_h, expected_usd, odds, offerings
    PROBE = "probe"  # odds
    HELD = "held"  # idle_s, limit_s
    PAID_ANYWAY = "paid_anyway"  # replicas that move there
    SMALLER_VARIANT = "smaller_variant"  # replicas, rps they carry
    COOLING_DOWN = "cooling_down"  # refusals, until_s
    BREAKER_OPEN = "breaker_open"  # strikes, until_s
    ONLY_COOLING_LEFT = "only_cooling_left"  # offerings
    STARTING_EXPIRED = "starting_expired"  # age_s, limit_s
    RECLAIM_NOTICE = "reclaim_notice"  # deadline_at_s
    OFFERING_ENDS = "offering_ends"  # ends_at_s
    SURPLUS = "surplus"  # idle_since_s, hold_s
    SURPLUS_STARTING = "surplus_starting"  # age_s
    EMPTY = "empty"  # drained_for_s
    DRAIN_DEADLINE = "drain_deadline"  # deadline_at_s
    LEFT_THE_CLUSTER = "left_the_cluster"  # gone_for_s
    PREEMPTED = "preempted"  # replicas, priority
    NOWHERE_TO_LAUNCH = "nowhere_to_launch"  # offerings
    ORDERED = "ordered"  # replicas, until_s
    BLIND = "blind"  # repeated_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A cause and its numbers, in the order they were used. `subject` names an offering, an instance or a limit's
    owner.
    """

    code: ReasonCode
    numbers: tuple[tuple[str, float], ...] = ()
    subject: str = ""


def why(code: ReasonCode, subject: str = "", /, **numbers: float) -> Reason:
    """A Reason from keyword numbers; every number becomes a float so that it reads back from the journal as it was."""
    return Reason(code=code, numbers=tuple((name, float(value)) for name, value in numbers.items()), subject=subject)
