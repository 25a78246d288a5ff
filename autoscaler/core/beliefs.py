"""What the controller believes: the fold of the journal so far.

Pure, frozen data; only `core.learn` makes new values. May not do I/O or read a clock. Mappings are plain dicts that
nobody changes in place; keys are offerings, instances, tokens, ``unit/service`` or application names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from policies.model import PolicySet
from serve_apps.timing import Timing

from .bursts import POISSON, Bursts
from .events import Forecast, Ordered
from .lifecycle import InstanceState
from .model import Offering, Plan, Shape
from .prompts import NONE, Prompts
from .series import SeriesBelief
from .tasks import NO_TASKS, Tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferingBelief:
    """Memory of one offering's answers. It is not asked again before `cool_until_s`, but for a probe.

    `taken` counts its instances that were taken away young, one after the other, the last at `taken_at_s`. `yes`, `no`
    and `lost` are decayed counts (core.odds) of grants, refusals and reclaims (each as the share of the instances there
    that it took) as of `counted_at_s`; `dry_since_s` is the first refusal since the last grant.
    """

    refusals_in_row: int = 0
    cool_until_s: float = 0.0
    last_refusal: str = ""
    last_refused_at_s: float = 0.0
    granted: int = 0
    refused: int = 0
    taken: int = 0
    taken_at_s: float = 0.0
    yes: float = 0.0
    no: float = 0.0
    lost: float = 0.0
    counted_at_s: float = 0.0
    dry_since_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceBelief:
    """One instance of ours. `missing_since_s` is set while a joined instance has no live node.

    `excused` instances may end without having joined, and nobody is to blame: given back unused, or reclaimed. `models`
    are those whose weights it has read. `moved_at_s` is when it was last seen to have got on, at `progress_bytes`.
    """

    instance_id: str
    offering: str
    token: str
    state: InstanceState
    since_s: float
    launched_at_s: float
    reclaim_at_s: float | None = None
    drain_deadline_at_s: float | None = None
    missing_since_s: float | None = None
    joined: bool = False
    excused: bool = False
    models: tuple[str, ...] = ()
    progress_bytes: float = 0.0
    moved_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """Instances of one type that ended, one after another, without joining. None is launched before `open_until_s`."""

    strikes: int = 0
    open_until_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IntentBelief:
    """A launch call whose outcome is not known: `count` instances may or may not be coming."""

    token: str
    offering: str
    count: int
    tried_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Load of one service between two ticks: requests/s, prefill tokens/s, decode tokens/s."""

    at_s: float
    arrival_rps: float
    prefill_tps: float
    decode_tps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceBelief:
    """One service's recent load, its token mix, and the demand it was planned for (for the hold window)."""

    history: tuple[Sample, ...] = ()
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    queued: float = 0.0
    kv_fraction: float | None = None  # of the fullest ready engine
    blind_why: str = ""
    bursts: Bursts = POISSON
    prompts: Prompts = NONE
    tasks: Tasks = NO_TASKS
    planned: tuple[tuple[float, float], ...] = ()  # (at_s, demanded requests/s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A replica seen loading, so that its load time can be measured when it is ready. `source` of its weights:
    ``network`` or ``local``.
    """

    app: str
    since_s: float
    instance_id: str = ""
    source: str = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The constant that moved (`calibrate.CONSTANTS`) for all engines of an application, and by what factor."""

    constant: str
    ratio: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The iteration law of one application as its engines show it (core.calibrate).

    `factors` multiply the constants of `prior`, in the order of `calibrate.CONSTANTS`; `cov` is their covariance, row
    by row. What decisions use follows them in steps: `timing` is `prior` with factors applied, the widths are relative
    standard deviations, of a decode step at twice the load last seen and of a prefill. `ticks` counts the observations
    since learning began, or began anew. `rise` and `fall` are the drift test's sums for decode and prefill; `before`
    are the factors in force at its alarm, until what moved is known.
    """

    prior: Timing
    timing: Timing
    factors: tuple[float, ...]
    cov: tuple[float, ...]
    width: float
    prefill_width: float
    ticks: int = 0
    rise: tuple[float, float] = (0.0, 0.0)
    fall: tuple[float, float] = (0.0, 0.0)
    before: tuple[float, ...] = ()
    drift: Drift | None = None


class Pace(NamedTuple):
    """An instance whose engines seem to lag behind others of their applications: the mean log of the ratio of their
    token times over `ticks` observations. `slow` once that was clear, until it keeps up again.
    """

    log_ratio: float
    ticks: int
    slow: bool


class Spend(NamedTuple):
    """What a unit has spent in `month` (like ``2026-12``) up to `at_s`, and what it spends an hour since then."""

    month: str
    usd: float
    usd_per_h: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """Everything `decide` may know besides the observation and the policy. Lead samples are seconds, newest last.

    `defect`: why the last event that could not be learnt could not, until an observation is learnt again (core.learn).
    """

    at_s: float = 0.0
    run_id: str = ""
    policy: PolicySet | None = None
    digest: str = ""
    policy_refused: bool = False  # the policy in force is not the one that was last written
    shapes: tuple[Shape, ...] = ()
    offers: dict[str, Offering] = field(default_factory=dict)
    unlisted: tuple[str, ...] = ()  # of the offers, those that are kept for what runs there: nothing is launched there
    offerings: dict[str, OfferingBelief] = field(default_factory=dict)
    instances: dict[str, InstanceBelief] = field(default_factory=dict)
    intents: dict[str, IntentBelief] = field(default_factory=dict)
    breakers: dict[str, Breaker] = field(default_factory=dict)  # by instance type
    services: dict[str, ServiceBelief] = field(default_factory=dict)
    boot_s: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by instance type
    load_s: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by coldstart.load_key
    loading: dict[str, Loading] = field(default_factory=dict)  # by replica
    fresh: dict[str, float] = field(default_factory=dict)  # by replica: ready since, while it may be warming up
    calibrations: dict[str, Calibration] = field(default_factory=dict)  # by application
    paces: dict[str, Pace] = field(default_factory=dict)  # by instance
    turn: int = 0  # which part of a large fleet is read next
    forecasts: dict[str, Forecast] = field(default_factory=dict)  # by service
    series: SeriesBelief = field(default_factory=SeriesBelief)
    orders: dict[str, Ordered] = field(default_factory=dict)  # by verb and subject
    spent: dict[str, Spend] = field(default_factory=dict)  # by unit with a monthly budget
    last_plan: Plan | None = None
    defect: str = ""


EMPTY = Beliefs()
