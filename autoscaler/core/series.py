"""The load of every service as series of equal bins, and the long forecaster's state: a fold of what was observed.

Pure; may not do I/O or read a clock. Four series a service: requests, prefill tokens, decode tokens (per second each)
and requests in the system. A bin that nobody saw is missing, not zero. Requests go into the forecaster; tokens per
request are followed as a mix, level and damped trend of their logarithm, because a shift to long contexts shows in the
mix before it shows anywhere else.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from forecasting.model import Forecaster

from .model import Idle, Measured, ServiceLoad, Signal

Floats = npt.NDArray[np.float64]

BIN_S = 60.0
LEADS_S = (150.0, 300.0, 600.0, 1200.0, 2400.0)  # each window is an octave: [lead, 2 × lead]
QUANTILES = (0.5, 0.8, 0.95, 0.99)
BEFORE_S = 600.0  # what was before an instant is the mean of so long
SPREAD_S = 300.0  # one observation speaks for the time since the one before, up to this long
STREAMS = ("requests", "prefill_tokens", "decode_tokens", "concurrency")
MIX_LEVEL, MIX_TREND, MIX_DAMPING = 0.4, 0.2, 0.9  # per bin of many requests
MIX_REQUESTS = 60.0  # a bin with so few teaches half as much
MIX_MOST = 4.0  # a mix is never forecast beyond this many times its level

FORECASTER = Forecaster(BIN_S, LEADS_S, LEADS_S, QUANTILES)


class Arrays(Mapping[str, npt.NDArray[Any]]):
    """Named arrays that nobody changes. Equal when every bit is; written to a snapshot as one compressed string."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        self._arrays = dict(arrays or {})

    def __getitem__(self, key: str) -> npt.NDArray[Any]:
        return self._arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arrays) and self._bits() == other._bits()

    __hash__ = None  # type: ignore[assignment]

    def _bits(self) -> list[tuple[str, str, tuple[int, ...], bytes]]:
        return [(key, a.dtype.str, a.shape, a.tobytes()) for key, a in sorted(self._arrays.items())]

    def pack(self) -> str:
        """Every bit of every array as text: a line that names them, then their bytes."""
        rows = self._bits()
        head = json.dumps([(key, kind, shape) for key, kind, shape, _ in rows]).encode()
        body = b"".join(bits for *_, bits in rows)
        return base64.b64encode(zlib.compress(head + b"\n" + body, 1)).decode()

    @classmethod
    def unpack(cls, text: object) -> Arrays:
        """What `pack` wrote. Raises ValueError for anything else."""
        if isinstance(text, Arrays):
            return text
        if not isinstance(text, str):
            raise ValueError("arrays are written as one string")
        try:
            head, _, body = zlib.decompress(base64.b64decode(text)).partition(b"\n")
        except zlib.error as error:
            raise ValueError(f"no arrays: {error}") from error
        arrays: dict[str, npt.NDArray[Any]] = {}
        at = 0
        for key, kind, shape in json.loads(head):
            size = int(np.prod(shape)) * np.dtype(kind).itemsize
            arrays[key] = np.frombuffer(body[at : at + size], dtype=kind).reshape(shape).copy()
            at += size
        return cls(arrays)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(lambda value: value.pack())
        return core_schema.no_info_plain_validator_function(cls.unpack, serialization=write)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesBelief:
    """Series of all services in `keys`, one row each. `sums` [services, streams] and `weights` [services] make up the
    bin `index` that is still open; `recent` holds the last hour of closed bins; `state` is the forecaster's; `mix`
    [services, (input, output), (level, trend)] are logarithms of tokens per request, NaN before any.
    """

    keys: tuple[str, ...] = ()
    index: int = -1
    seen_at_s: float = 0.0
    closed: int = 0
    arrays: Arrays = field(default_factory=Arrays)
    state: Arrays = field(default_factory=Arrays)

    def row(self, service: str) -> int | None:
        """The service's row, None when it has never been seen."""
        return self.keys.index(service) if service in self.keys else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongForecast:
    """Quantiles (in `QUANTILES`) of the largest arrival rate in the window of one lead; what `coverage` was of
    late; how many realised `windows` it was tested on, counting those that do not overlap; the `mean` rate of about a
    day.
    """

    lead_s: float
    commitment_s: float
    rates: tuple[float, ...]
    member: str
    coverage: float
    windows: float
    mean: float


def observe(known: SeriesBelief, loads: Sequence[ServiceLoad], at_s: float) -> SeriesBelief:
    """The series after one observation; what was not measured says nothing. Time that goes back is not learnt."""
    if known.index >= 0 and at_s <= known.seen_at_s:
        return known
    if known.keys and not FORECASTER.fits(known.state):  # a snapshot of a version that forecast otherwise
        known = replace(known, state=Arrays(FORECASTER.empty(len(known.keys))))
    known = _with_rows(known, sorted({load.service for load in loads} - set(known.keys)))
    if not known.keys:
        return known
    last = int(at_s // BIN_S)
    first = last
    if known.index >= 0 and at_s - known.seen_at_s <= SPREAD_S:
        first = min(last, int(known.seen_at_s // BIN_S) + 1)
    values = np.full((len(known.keys), len(STREAMS)), np.nan)
    for load in loads:
        values[known.keys.index(load.service)] = _streams(load)
    for index in range(first, last + 1):
        known = _add(known, values, index)
    return replace(known, seen_at_s=at_s)


def _streams(load: ServiceLoad) -> tuple[float, float, float, float]:
    """Values of `STREAMS`; NaN where a signal is missing."""
    waiting, running = _value(load.queued), _value(load.running)
    return _value(load.arrival_rps), _value(load.prefill_tps), _value(load.decode_tps), waiting + running


def _value(signal: Signal) -> float:
    if isinstance(signal, Measured):
        return signal.value
    return 0.0 if isinstance(signal, Idle) else float("nan")


def _with_rows(known: SeriesBelief, services: Sequence[str]) -> SeriesBelief:
    """Rows for services seen for the first time, at the end."""
    if not services:
        return known
    n = len(services)
    fresh: dict[str, npt.NDArray[Any]] = {
        "sums": np.zeros((n, len(STREAMS))),
        "counts": np.zeros((n, len(STREAMS))),
        "recent": np.full((n, FORECASTER.grid.per_hour, len(STREAMS)), np.nan),
        "mix": np.full((n, 2, 2), np.nan),
    }
    return replace(
        known,
        keys=(*known.keys, *services),
        arrays=_stacked(known.arrays, fresh),
        state=Arrays(FORECASTER.joined(dict(known.state), n)),
    )


def _stacked(known: Arrays, fresh: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    return Arrays({key: np.concatenate([known[key], rows]) if key in known else rows for key, rows in fresh.items()})


def _add(known: SeriesBelief, values: Floats, index: int) -> SeriesBelief:
    """One observation into bin `index`; the bin before it is closed when this is a later one."""
    if index > known.index >= 0:
        known = _close(known, index - known.index - 1)
    ok = ~np.isnan(values)
    arrays = dict(known.arrays)
    arrays["sums"] = arrays["sums"] + np.where(ok, values, 0.0)
    arrays["counts"] = arrays["counts"] + ok
    return replace(known, index=index, arrays=Arrays(arrays))


def _close(known: SeriesBelief, missed: int) -> SeriesBelief:
    """The open bin's means go where they belong; `missed` bins after it nobody saw."""
    arrays = dict(known.arrays)
    counts = arrays["counts"]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, arrays["sums"] / np.maximum(counts, 1.0), np.nan)
    unseen = np.full((len(means), min(missed, FORECASTER.grid.per_hour), len(STREAMS)), np.nan)
    recent = np.concatenate([arrays["recent"], means[:, None], unseen], axis=1)
    arrays["recent"] = recent[:, -FORECASTER.grid.per_hour :]
    arrays["mix"] = _mixed(arrays["mix"], means)
    arrays["sums"], arrays["counts"] = np.zeros_like(counts), np.zeros_like(counts)
    state = FORECASTER.update(dict(known.state), means[:, 0], known.index)
    return replace(known, closed=known.closed + 1, arrays=Arrays(arrays), state=Arrays(state))


def _mixed(mix: Floats, means: Floats) -> Floats:
    """Level and damped trend of log tokens per request after one bin; silence changes nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = means[:, 1:3] / means[:, :1]
        ok = np.isfinite(ratio) & (ratio > 0.0)
        seen = np.log(np.where(ok, ratio, 1.0))
    level, trend = mix[..., 0], mix[..., 1]
    first = ok & np.isnan(level)
    requests = np.where(ok, means[:, :1], 0.0) * BIN_S
    trust = requests / (requests + MIX_REQUESTS)
    ahead = level + MIX_DAMPING * trend
    new = ahead + MIX_LEVEL * trust * (seen - ahead)
    slope = MIX_DAMPING * trend + MIX_TREND * trust * (new - level - MIX_DAMPING * trend)
    level = np.where(first, seen, np.where(ok, new, level))
    return np.stack([level, np.where(first, 0.0, np.where(ok, slope, trend))], axis=-1)


def mix_ahead(known: SeriesBelief, service: str, lead_s: float) -> tuple[float, float]:
    """(input, output) tokens a request as they will be at the end of the lead; 0 where nothing is known."""
    row = known.row(service)
    if row is None:
        return 0.0, 0.0
    bins = max(1, round(lead_s / BIN_S))
    damped = MIX_DAMPING * (1.0 - MIX_DAMPING**bins) / (1.0 - MIX_DAMPING)
    level, trend = known.arrays["mix"][row, :, 0], known.arrays["mix"][row, :, 1]
    grown = np.clip(trend * damped, -np.log(MIX_MOST), np.log(MIX_MOST))
    inputs, outputs = np.where(np.isnan(level), 0.0, np.exp(np.where(np.isnan(level), 0.0, level) + grown))
    return float(inputs), float(outputs)


def long_forecast(known: SeriesBelief, service: str, lead_s: float) -> LongForecast | None:
    """What the long forecaster says of the window that the end of the lead lies in; None before a closed bin."""
    row = known.row(service)
    if row is None or known.closed == 0:
        return None
    k = max((k for k, begins_s in enumerate(LEADS_S) if begins_s <= lead_s), default=0)
    rates = np.maximum(0.0, known.state["answer"][row, k]).tolist()
    if any(rate != rate for rate in rates):
        return None
    first, last = FORECASTER.windows[k]
    return LongForecast(
        lead_s=LEADS_S[k],
        commitment_s=LEADS_S[k],
        rates=tuple(rates),
        member=FORECASTER.member(known.state, row, k),
        coverage=float(known.state["covered"][row, k, QUANTILES.index(0.95)]),
        windows=float(known.state["windows"][row, k]) / (last - first + 1),
        mean=float(known.state["member.mean"][row]),
    )


def seen_s(known: SeriesBelief, service: str) -> float:
    """How long a time of the service's load has been seen, in closed bins."""
    row = known.row(service)
    return 0.0 if row is None else float(known.state["member.seen"][row]) * BIN_S


def rate_before(known: SeriesBelief, service: str, at_s: float) -> float | None:
    """Mean rate of the bins that were seen in the `BEFORE_S` before an instant, of the last hour; None without any."""
    row = known.row(service)
    if row is None:
        return None
    recent = known.arrays["recent"][row, :, 0]
    bins = np.arange(known.index - len(recent), known.index)  # the last is the one closed last
    before = recent[(bins < int(at_s // BIN_S)) & (bins >= int((at_s - BEFORE_S) // BIN_S))]
    before = before[~np.isnan(before)]
    return float(before.mean()) if len(before) else None
