"""The scenario format as frozen and strict models: demand, supply, quotas, faults. Docs: docs/simulation.md.

Pure data and the drawing of durations from a generator that is passed in; may not read a file, a clock or an adapter.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag, model_validator

from chaos.faults import help_text
from policies.model import Market, Strict

MAX_DURATION_S = 366 * 86400.0
MAX_COUNT = 100_000
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Instants = Annotated[float, Field(ge=0.0, le=MAX_DURATION_S)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=60)]


class Dist(Strict):
    """A distribution of seconds, by its mean and coefficient of variation, cut off at `min` and `max`."""

    dist: Literal["lognormal", "constant", "uniform", "exponential", "gamma"]
    mean: Annotated[float, Field(ge=0.0, le=MAX_DURATION_S)]
    cv: Annotated[float, Field(ge=0.0, le=10.0)] | None = None
    min: NonNegative | None = None
    max: NonNegative | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Dist:
        if self.dist in ("constant", "exponential") and self.cv is not None:
            raise ValueError(f"cv has no meaning for {self.dist}; remove it")
        if self.min is not None and self.min > self.mean:
            raise ValueError(f"min {self.min:g} is more than mean {self.mean:g}; lower it")
        if self.max is not None and self.max < self.mean:
            raise ValueError(f"max {self.max:g} is less than mean {self.mean:g}; raise it")
        if self.dist == "uniform" and self._half_width_s() > self.mean:
            raise ValueError("cv is so large that the range begins below zero; use at most 0.577")
        return self

    @property
    def variation(self) -> float:
        """Coefficient of variation before the cuts; 0.3 where none is given."""
        fixed = {"constant": 0.0, "exponential": 1.0}
        return fixed.get(self.dist, 0.3 if self.cv is None else self.cv)

    @property
    def min_s(self) -> float:
        """The least that can be drawn."""
        low = {"constant": self.mean, "uniform": self.mean - self._half_width_s()}.get(self.dist, 0.0)
        return max(low, self.min or 0.0)

    def draw(self, rng: np.random.Generator) -> float:
        """One duration, seconds."""
        return min(max(self._raw(rng), self.min_s), self.max if self.max is not None else math.inf)

    def _raw(self, rng: np.random.Generator) -> float:
        if self.variation == 0.0 or self.mean == 0.0:
            return self.mean
        if self.dist == "lognormal":
            sigma2 = math.log1p(self.variation**2)
            return self.mean * math.exp(math.sqrt(sigma2) * rng.standard_normal() - sigma2 / 2)
        if self.dist == "uniform":
            return self.mean + self._half_width_s() * rng.uniform(-1.0, 1.0)
        shape = 1.0 / self.variation**2
        return float(rng.gamma(shape, self.mean / shape))

    def _half_width_s(self) -> float:
        return self.mean * self.variation * math.sqrt(3.0)


# ---- demand ---------------------------------------------------------------------------------------------------------
class Tokens(Strict):
    """Tokens of a request: lognormal with this mean and 99th percentile (the mean alone: as spread as Azure's)."""

    mean: Positive
    p99: Positive | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Tokens:
        if self.p99 is not None and not self.mean <= self.p99 <= 10 * self.mean:
            raise ValueError(f"p99 {self.p99:g} is not between mean {self.mean:g} and ten times that; correct it")
        return self


def _tokens_kind(value: Any) -> str:
    return "<number>" if isinstance(value, int | float) else "<tokens>"


TokensOrMean = Annotated[
    Annotated[Positive, Tag("<number>")] | Annotated[Tokens, Tag("<tokens>")], Discriminator(_tokens_kind)
]


def _law(given: float | Tokens | None) -> Tokens | None:
    """A bare number is the mean it is."""
    return Tokens(mean=given) if isinstance(given, int | float) else given


class Profile(Strict):
    """A rate over the day and the week. `rps`: mean of a weekday's requests (or tasks) per second.

    The tokens hold while this profile runs, where the demand itself states none: a stand-in is shaped like its trace.
    """

    rps: NonNegative
    input_tokens: TokensOrMean | None = None
    output_tokens: TokensOrMean | None = None
    prefix_share: Fraction = 0.0
    peak_to_mean: Annotated[float, Field(ge=1.0, le=2.0)] = 1.0
    peak_at_s: Annotated[float, Field(ge=0.0, lt=86400.0)] = 50_400.0
    weekend: Fraction = 1.0
    noise: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0

    def tokens(self) -> tuple[Tokens | None, Tokens | None]:
        """Tokens in and out while the profile runs, where it states them."""
        return _law(self.input_tokens), _law(self.output_tokens)


class Constant(Profile):
    """The same rate all the time, or the day that the keys of the profile describe."""

    kind: Literal["constant"]


class Diurnal(Profile):
    """A day and a week: one wave a day with its peak at `peak_at_s`, weekends at a fraction."""

    kind: Literal["diurnal"]
    peak_to_mean: Annotated[float, Field(ge=1.0, le=2.0)] = 1.75
    weekend: Fraction = 0.8


class Flash(Profile):
    """A crowd: `factor` times the rate within `ramp_s` from `at_s`, for `hold_s`, falling back over `decay_s`."""

    kind: Literal["flash"]
    at_s: Instants
    factor: Annotated[float, Field(gt=1.0, le=1000.0)] = 10.0
    ramp_s: Positive = 60.0
    hold_s: NonNegative = 900.0
    decay_s: Positive = 600.0


class Agents(Profile):
    """Tasks of `calls` dependent calls; each next prompt holds the last prompt, its answer and `grow_tokens` more."""

    kind: Literal["agents"]
    calls: tuple[Annotated[int, Field(ge=1, le=1000)], Annotated[int, Field(ge=1, le=1000)]] = (5, 10)
    think_s: NonNegative = 2.0
    grow_tokens: NonNegative = 400.0

    @model_validator(mode="after")
    def _agrees(self) -> Agents:
        if self.calls[0] > self.calls[1]:
            raise ValueError(f"calls {list(self.calls)} begins above its end; write the smaller number first")
        return self


class Rag(Profile):
    """Retrieval: long prompts. Without `input_tokens` beside it, 12,000 tokens in (P99 30,000) and 250 out."""

    kind: Literal["rag"]


class Bursts(Profile):
    """Work for about `on_s`, then silence for about `off_s` (both exponential), `rps` while there is work."""

    kind: Literal["bursts"]
    on_s: Positive
    off_s: Positive
    first_at_s: NonNegative = 0.0


Synthetic = Annotated[
    Constant | Diurnal | Flash | Agents | Rag | Bursts,
    Field(discriminator="kind"),
]


class Columns(Strict):
    """The names that the file uses. Rate rows have `requests` or `value`; request rows have neither."""

    time: str
    requests: str | None = None
    value: str | None = None
    input_tokens: str | None = None
    output_tokens: str | None = None
    session: str | None = None
    prefix_tokens: str | None = None

    def named(self) -> dict[str, str]:
        """Only what is given."""
        return self.model_dump(exclude_none=True)


class Demand(Strict):
    """Load of one service: a recorded trace, a synthetic one, or both (the second stands in for an absent file)."""

    service: str
    trace: str | None = None
    synthetic: Synthetic | None = None
    columns: Columns | None = None
    time_unit: Literal["s", "ms", "min", "iso"] | None = None
    per: Literal["s", "min", "bin"] | None = None
    missing: Literal["blank", "zero"] = "blank"
    scale: Annotated[float, Field(ge=0.0, le=100_000.0)] = 1.0
    start_s: NonNegative = 0.0
    stretch: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    cv: Annotated[float, Field(ge=0.05, le=20.0)] = 1.0
    input_tokens: TokensOrMean | None = None
    output_tokens: TokensOrMean | None = None
    prefix_share: Fraction | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Demand:
        if self.trace is None and self.synthetic is None:
            raise ValueError("has neither trace nor synthetic; give one")
        if self.trace is None and (self.columns or self.time_unit or self.per or self.start_s):
            raise ValueError("says how to read a trace, but there is none; give trace, or remove what is for one")
        return self

    def stated(self) -> tuple[Tokens | None, Tokens | None]:
        """Tokens in and out that hold for trace and stand-in alike."""
        return _law(self.input_tokens), _law(self.output_tokens)


# ---- supply ---------------------------------------------------------------------------------------------------------
class Outages(Strict):
    """A stand-in for a recorded pool: `most` instances, gone now and then (up and down times are exponential)."""

    most: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    up_s: Positive
    down_s: Positive


class Recorded(Strict):
    """A pool that holds floor(available × scale) instances in all by a recorded trace, from its second `from_s` on."""

    trace: str
    key: str
    scale: Annotated[float, Field(gt=0.0, le=100_000.0)] = 1.0
    from_s: NonNegative = 0.0
    synthetic: Outages | None = None


class Steps(Strict):
    """A pool whose size changes at stated instants: ``[at_s, instances]``, the first at 0."""

    steps: tuple[tuple[Instants, Annotated[int, Field(ge=0, le=MAX_COUNT)]], ...]

    @model_validator(mode="after")
    def _agrees(self) -> Steps:
        times = [at_s for at_s, _ in self.steps]
        if not times or times[0] != 0.0:
            raise ValueError("steps does not begin at 0; give [0, N] first")
        if any(later <= earlier for earlier, later in pairwise(times)):
            raise ValueError("steps goes back in time; sort it, each instant once")
        return self


def _count_kind(value: Any) -> str:
    if isinstance(value, dict):
        return "<steps>" if "steps" in value else "<outages>" if "most" in value else "<recorded>"
    return f"<{type(value).__name__.lower()}>" if isinstance(value, Strict) else "<number>"


Count = Annotated[
    Annotated[Annotated[int, Field(ge=0, le=MAX_COUNT)], Tag("<number>")]
    | Annotated[Recorded, Tag("<recorded>")]
    | Annotated[Outages, Tag("<outages>")]
    | Annotated[Steps, Tag("<steps>")],
    Discriminator(_count_kind),
]


def _load_kind(value: Any) -> str:
    return "<dist>" if isinstance(value, Dist) or (isinstance(value, dict) and "dist" in value) else "<variants>"


Load = Annotated[
    Annotated[Dist, Tag("<dist>")] | Annotated[dict[str, Dist], Tag("<variants>")], Discriminator(_load_kind)
]


class Supply(Strict):
    """One offering. Without a price it costs the catalogue's; without `boot_s` and `load_s` it takes the catalogue's.

    `start_s` and `end_s` open and close it (a Capacity Block must state `end_s`). `pool` names what fails together.
    """

    id: Name
    instance_type: str = ""
    region: str = "us-east-1"
    zone: str = ""
    market: Market
    reservation: str = ""
    pool: str = ""
    count: Count
    start_s: Instants = 0.0
    end_s: Instants | None = None
    notice_s: Annotated[float, Field(ge=0.0, le=86400.0)] = 120.0
    price_usd_per_h: NonNegative | None = None
    boot_s: Dist | None = None
    load_s: Load | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Supply:
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"end_s {self.end_s:g} is not after start_s {self.start_s:g}; correct one")
        if self.market == "block" and self.end_s is None:
            raise ValueError("a Capacity Block has an end; give end_s")
        if self.market != "overflow" and not self.instance_type:
            raise ValueError("instance_type is missing; add it")
        return self


class Quota(Strict):
    """GPUs of one family that may run in one market at once, starting ones included.

    A family is what the cloud counts by (its letters: ``g``, ``p``) or one generation of it (``g6e``).
    """

    family: str
    market: Market
    gpus: Annotated[int, Field(ge=0, le=1_000_000)]


class Fault(Strict):
    """Something that goes wrong from `at_s` for `for_s` seconds."""

    at_s: Instants
    for_s: NonNegative = 0.0
    kind: Annotated[str, Field(description=help_text())]
    target: str = "*"
    value: float | None = None
