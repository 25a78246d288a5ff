"""The policy format: what a business unit wants, as frozen and strict models.

Intent only: no gains, cadences or thresholds of the controller. Pure data: may not import YAML, a clock, or anything
that does I/O (`policies.load` reads files). Every limit carries its unit in its name. Docs: docs/policies.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Goal = Literal["latency", "throughput", "cost"]
Market = Literal["on_demand", "spot", "odcr", "block", "interruptible", "overflow"]
Sacrifice = Literal["queue", "shed", "smaller_variant", "overflow"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=40)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Replicas = Annotated[int, Field(ge=0, le=10_000)]
Loan = bool | Annotated[int, Field(ge=0)]  # whether, or at most so many GPUs
PositiveSeconds = Annotated[float, Field(gt=0.0)]


class Strict(BaseModel):
    """Unknown keys and wrong types are errors; values never change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Slo(Strict):
    """Limits on each request (any subset) and the fraction of requests that must meet all of them.

    tpot = (last token − first token) / (output tokens − 1), not tested below two output tokens.
    """

    ttft_s: PositiveSeconds | None = None
    tpot_s: PositiveSeconds | None = None
    e2e_s: PositiveSeconds | None = None
    deadline_s: PositiveSeconds | None = None
    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95


class Variant(Strict):
    """One engine shape that can serve a service."""

    id: Name
    instance_type: Annotated[str, Field(min_length=1)]
    tp: Annotated[int, Field(ge=1, le=64)] = 1
    precision: Literal["bf16", "fp16", "fp8", "int8", "int4", "fp4"] = "bf16"
    nodes_per_replica: Annotated[int, Field(ge=1, le=16)] = 1
    role: Literal["both", "prefill", "decode"] = "both"


class Overflow(Strict):
    """An OpenAI-compatible endpoint used when own capacity cannot come in time.

    `model` is the name it knows (None: the service's model). Its API key is never written here: `key_env` names a
    variable in the gateway's environment, `key_file` a file on the gateway's machine; neither means it asks for none.
    """

    url: Annotated[str, Field(pattern=r"^https?://")]
    usd_per_1m_tokens: Annotated[float, Field(ge=0.0)]
    rpm: Annotated[int, Field(gt=0)]
    model: Annotated[str, Field(min_length=1)] | None = None
    key_env: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")] | None = None
    key_file: Annotated[str, Field(pattern=r"^/")] | None = None


class Event(Strict):
    """Load known in advance. `starts_at` is ISO 8601 with an offset; the load is multiplied by `load_factor` (a holiday
    has less than 1) and `expected_rps` is added. It repeats at the same time of day: of `zone`'s wall clock where one
    is named (IANA), else at the same offset from UTC. `clock_changes` are that zone's, (instant, offset from then on)
    in seconds since 1970, worked out when the file is read: whoever plans looks nothing up.
    """

    name: Name
    starts_at: str
    lasts_s: PositiveSeconds
    expected_rps: Annotated[float, Field(ge=0.0)] = 0.0
    load_factor: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    repeats: Literal["once", "daily", "weekdays", "weekly"] = "once"
    zone: str | None = None
    clock_changes: tuple[tuple[float, float], ...] = Field(default=(), json_schema_extra={"readOnly": True})


class Service(Strict):
    """One policy entry: a model served for one purpose."""

    name: Name
    model: Annotated[str, Field(min_length=1)]
    goal: Goal
    priority: Annotated[int, Field(ge=0, le=1000)] = 100
    slo: Slo = Slo()
    min_replicas: Replicas = 1
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] = 8
    warm_replicas: Replicas = 0
    markets: tuple[Market, ...] = ("odcr", "block", "interruptible", "spot", "on_demand")
    zones: tuple[str, ...] = ()
    instance_types: tuple[str, ...] = ()
    variants: tuple[Variant, ...]
    on_demand_floor: Replicas = 0
    scale_to_zero: bool = False
    expected_rps: Annotated[float, Field(ge=0.0)] = 0.0
    events: tuple[Event, ...] = ()
    revision: str = "1"
    sacrifice: tuple[Sacrifice, ...] = ("queue", "shed")
    overflow: Overflow | None = None
    preemption_grace_s: Annotated[float, Field(ge=0.0)] = 120.0


class ApiKey(Strict):
    """One key of the unit's callers, as its SHA-256. `service` is what it calls when a request names no other."""

    tenant: Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    service: Name | None = None


class Unit(Strict):
    """One business unit: who pays, what it may use, and its services. Without `api_keys` anybody may call them."""

    unit: Name
    owner: str
    budget_usd_per_h: Annotated[float, Field(gt=0.0)] | None = None
    budget_usd_per_month: Annotated[float, Field(gt=0.0)] | None = None
    quota_gpus: Annotated[int, Field(ge=0)] | None = None
    lends: Loan = True
    borrows: Loan = True
    api_keys: tuple[ApiKey, ...] = ()
    services: tuple[Service, ...]


class PolicySet(Strict):
    """All units in force, in the order of their names. Empty `zones` and `instance_types` of a service mean any."""

    units: tuple[Unit, ...]

    def services(self) -> tuple[tuple[str, Unit, Service], ...]:
        """``(unit/service, unit, service)`` for every service, most important first, ties by key."""
        rows = [(f"{unit.unit}/{service.name}", unit, service) for unit in self.units for service in unit.services]
        return tuple(sorted(rows, key=lambda row: (-row[2].priority, row[0])))
