"""What the journal holds: every fact the controller learnt and every step it took, in order.

Pure data; may not do I/O. Beliefs are a fold of these events (`core.learn`), so an event that is not here did not
happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from policies.model import PolicySet

from .model import Observation, Plan, Shape

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A controller started (or a segment began): who writes, and the software whose arithmetic the plans depend on."""

    at_s: float
    run_id: str
    schema_version: int
    versions: tuple[tuple[str, str], ...]
    kind: Literal["opened"] = "opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A policy came into force, with the engine shapes that the catalogue gives for it."""

    at_s: float
    policy: PolicySet
    shapes: tuple[Shape, ...]
    digest: str
    kind: Literal["configured"] = "configured"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRefused:
    """A changed policy was not taken; the one in force stays."""

    at_s: float
    problems: tuple[str, ...]
    kind: Literal["policy_refused"] = "policy_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one tick saw."""

    at_s: float
    observation: Observation
    kind: Literal["observed"] = "observed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One service's forecast of its largest arrival rate in [`lead_s`, `lead_s + commitment_s`] from `at_s`; pairs are
    (quantile, requests/s).

    `member` carries the most weight; `coverage` is what its .95 quantile covered of late (None: not known yet), and
    `breached` says that this was too little and the widest honest band is used. Tokens a request are those expected at
    the end of the lead, 0 where nothing is known. `failed`: why this is an earlier forecast and not a new one.
    """

    service: str
    lead_s: float
    quantiles: tuple[tuple[float, float], ...]
    member: str
    commitment_s: float = 0.0
    coverage: float | None = None
    breached: bool = False
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasted:
    """Forecasts made since the last tick."""

    at_s: float
    forecasts: tuple[Forecast, ...]
    kind: Literal["forecasted"] = "forecasted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A decision, durable before any of it is acted on."""

    at_s: float
    plan: Plan
    kind: Literal["planned"] = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFailed:
    """A plan broke an invariant and none of it was acted on."""

    at_s: float
    plan_id: str
    violations: tuple[str, ...]
    kind: Literal["check_failed"] = "check_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTried:
    """About to ask `offering` for `count` instances. Durable before the call."""

    at_s: float
    intent: str
    token: str
    offering: str
    count: int
    kind: Literal["launch_tried"] = "launch_tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchGranted:
    """The cloud accepted; it may have given fewer than asked."""

    at_s: float
    intent: str
    token: str
    offering: str
    instance_ids: tuple[str, ...]
    kind: Literal["launch_granted"] = "launch_granted"


RefusalClass = Literal["no_capacity", "quota", "misconfigured", "refused", "not_found", "throttled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRefused:
    """The cloud said no, in its own word (`code`) and in ours (`error`)."""

    at_s: float
    intent: str
    token: str
    offering: str
    error: RefusalClass
    code: str
    kind: Literal["launch_refused"] = "launch_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAmbiguous:
    """Nobody knows whether the call took effect; only a later observation can settle it."""

    at_s: float
    intent: str
    token: str
    offering: str
    why: str
    kind: Literal["launch_ambiguous"] = "launch_ambiguous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Acted:
    """A drain, terminate or publish was accepted. Completion is only ever concluded from a later observation.

    `detail` is what a terminated instance that never joined said last on its console.
    """

    at_s: float
    action: str
    verb: Literal["publish", "drain", "terminate"]
    target: str
    detail: str = ""
    kind: Literal["acted"] = "acted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActFailed:
    """A drain, terminate or publish was not accepted; the next tick decides again."""

    at_s: float
    action: str
    verb: Literal["publish", "drain", "terminate"]
    target: str
    error: str
    kind: Literal["act_failed"] = "act_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """An operator's order, in force until `until_s` (core.orders). `subject` is a service, or an instance to drain.

    `replicas` is what a floor asks for (0 lifts it).
    """

    at_s: float
    who: str
    why: str
    verb: Literal["freeze", "unfreeze", "floor", "drain"]
    subject: str
    until_s: float
    replicas: int = 0
    kind: Literal["ordered"] = "ordered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All beliefs as JSON (`core.snapshot`) at the start of a segment: a restart folds from here."""

    at_s: float
    beliefs_json: str
    kind: Literal["snapshot"] = "snapshot"


Event = Annotated[
    Opened
    | Configured
    | PolicyRefused
    | Observed
    | Forecasted
    | Planned
    | CheckFailed
    | LaunchTried
    | LaunchGranted
    | LaunchRefused
    | LaunchAmbiguous
    | Acted
    | ActFailed
    | Ordered
    | Snapshot,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of the journal. `seq` counts from 1 without gaps over all segments."""

    seq: int
    event: Event


RECORD: TypeAdapter[Record] = TypeAdapter(Record)
EVENT: TypeAdapter[Event] = TypeAdapter(Event)
PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)
