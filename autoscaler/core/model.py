"""The nouns of the decision: what is observed, what is believed of engine shapes, and what a plan says.

Pure, frozen data. May not do I/O, read a clock, draw a random number or import an adapter. Instants are UTC seconds,
identifiers are strings with one spelling each (`serve_apps.wire`). Everything here is written to the journal as JSON
and read back to equal values, so a field is a float, int, str, bool, tuple or another class of this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policies.model import Market
from serve_apps.timing import Timing

from .reasons import Reason


# ---- signals: NaN dies in the adapter -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A number seen at `at_s`."""

    value: float
    at_s: float
    kind: Literal["measured"] = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Seen, and there was nothing: permits scale-down."""

    at_s: float
    kind: Literal["idle"] = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Not seen: freezes scale-down of what it concerns."""

    why: str
    kind: Literal["missing"] = "missing"


Signal = Measured | Idle | Missing
_UNSEEN = Missing(why="not exported")


# ---- observation ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """One service's load since the last observation, summed over gateways. Rates are of offered (not served) load.

    Signals: requests/s, prefill tokens/s, decode tokens/s, requests waiting, requests running in engines, tokens/s (in
    and out) of what an overflow endpoint served, requests/s that began a task (core.tasks), requests/s that ended
    (answered, shed or failed), and those of them that were answered within every limit.
    """

    service: str
    arrival_rps: Signal
    prefill_tps: Signal
    decode_tps: Signal
    queued: Signal
    running: Signal
    overflow_tps: Signal = _UNSEEN
    tasks_rps: Signal = _UNSEEN
    ended_rps: Signal = _UNSEEN
    met_rps: Signal = _UNSEEN


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What one engine says of itself: requests running, requests waiting, fraction of its KV cache in use.

    The rest are means since the previous observation, from which the iteration law can be read. Over `steps` decode
    steps (time without work does not count): seconds per output token, sequences decoding in a step, KV tokens
    resident. Over `samples` requests whose prefill ended: seconds from their admission to their first token, and the
    prompt tokens that no prefix cache held.
    """

    replica_id: str
    running: Signal
    waiting: Signal
    kv_fraction: Signal
    tpot_s: Signal = _UNSEEN
    prefill_s: Signal = _UNSEEN
    input_tokens: Signal = _UNSEEN
    batch: Signal = _UNSEEN
    kv_tokens: Signal = _UNSEEN
    steps: float = 0.0
    samples: float = 0.0


ReplicaState = Literal["pending", "loading", "ready", "draining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One engine. `instance_id` is empty while Ray has found no place for it (state `pending`); `also_on` names the
    other instances of one that spans several.
    """

    replica_id: str
    service: str
    variant: str
    instance_id: str
    state: ReplicaState
    since_s: float
    also_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A Ray node that belongs to an instance of ours."""

    node_id: str
    instance_id: str
    alive: bool
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingView:
    """What Ray and Serve say. `targets` pairs every application of ours with its current target number of replicas."""

    at_s: float
    replicas: tuple[Replica, ...]
    nodes: tuple[Node, ...]
    targets: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offering:
    """A place to get instances, from `starts_at_s` to `ends_at_s` where it has such limits (a Capacity Block).

    `pool` names what fails together; equal pools are refused together.
    """

    offering: str
    pool: str
    instance_type: str
    zone: str
    market: Market
    gpus: int
    price_usd_per_h: float
    region: str = ""
    reservation: str = ""
    starts_at_s: float | None = None
    ends_at_s: float | None = None


CloudState = Literal["pending", "running", "terminating", "terminated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudInstance:
    """An instance as the cloud lists it. `token` is the idempotency token of the launch call that made it.

    `reclaim_at_s` is the instant of a reclaim notice, by which the instance must be empty. `progress_bytes` is what its
    node has received and read so far, None where nobody says.
    """

    instance_id: str
    offering: str
    token: str
    state: CloudState
    launched_at_s: float
    reclaim_at_s: float | None = None
    state_reason: str = ""
    progress_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudView:
    """What the cloud says: every offering, and every instance of ours that it still lists."""

    at_s: float
    offerings: tuple[Offering, ...]
    instances: tuple[CloudInstance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything one tick saw. A port that failed is Missing with its reason; nothing is ever guessed in its place."""

    at_s: float
    loads: tuple[ServiceLoad, ...] | Missing
    serving: ServingView | Missing
    cloud: CloudView | Missing
    engines: tuple[EngineLoad, ...] | Missing = ()


# ---- engine shapes --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is known beforehand of one variant of one service: its place, its timing constants and a prior for its load.

    `source` names where the constants come from (a measurement, or the roofline fallback), `uncertainty` is their
    relative standard deviation. `weights_s` is the part of `load_prior_s` that reads the weights from the network.
    """

    service: str
    variant: str
    instance_type: str
    gpus: int
    nodes: int
    timing: Timing
    load_prior_s: float
    boot_prior_s: float
    source: str
    model: str = ""
    uncertainty: float = 0.0
    weights_s: float = 0.0


# ---- plan -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Load a service must be ready for at the end of its lead, at quantile `quantile`.

    `unheld_rps` is what this tick asks for; `arrival_rps` is the largest such figure of the hold window, which is
    planned for. `replicas_floor` is the number of replicas that may not be undercut (policy, or blindness).
    """

    service: str
    quantile: float
    lead_s: float
    unheld_rps: float
    arrival_rps: float
    replicas_floor: int
    prefill_tps: float
    decode_tps: float
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Replicas of one variant: `wanted` with a place now or coming, `replicas` published (placeable now, high
    first).
    """

    service: str
    variant: str
    wanted: int
    replicas: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """An intent to own `count` more instances, with the offerings to try, best first, within one tick."""

    id: str
    service: str
    variant: str
    count: int
    alternates: tuple[str, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Take an instance out of service by `deadline_at_s`; requests in flight finish first."""

    id: str
    instance_id: str
    deadline_at_s: float
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Give an instance back. Only ever for one that is empty, past its deadline, or never joined."""

    id: str
    instance_id: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """An instance that nobody needs since `since_s` and that is kept because it could not be had again."""

    instance_id: str
    since_s: float
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Admission figures for one variant of a service: what one ready replica carries."""

    service: str
    variant: str
    ready: int
    max_concurrency_per_replica: int
    capacity_rps_per_replica: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Replicas wanted that nothing owned or starting can hold, and when help is expected (None: unknown)."""

    service: str
    replicas: int
    expected_at_s: float | None
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One tick's decision. Every quantity carries its reasons; `id` is ``run/seq``."""

    id: str
    at_s: float
    demands: tuple[Demand, ...]
    targets: tuple[Target, ...]
    launches: tuple[Launch, ...]
    drains: tuple[Drain, ...]
    terminates: tuple[Terminate, ...]
    routes: tuple[Route, ...]
    shortfalls: tuple[Shortfall, ...]
    holds: tuple[Hold, ...] = ()
