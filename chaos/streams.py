"""Arrival streams: what a scenario's demand sends, in chunks, the same for one seed however it is taken.

Reads trace files (`chaos.demand`) and draws from generators seeded by concern; may not read a clock or start anything.
A stream holds one chunk at a time, so memory does not grow with the length of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np

from chaos.curves import Curve, recorded_curve, synthetic_curve
from chaos.demand import (
    AZURE_INPUT,
    AZURE_OUTPUT,
    Absent,
    Floats,
    Per,
    Rates,
    TimeUnit,
    Trace,
    TraceProblems,
    read_trace,
)
from chaos.engine.spec import F8, I4, SINGLE, Arrivals, RequestBatch, TaskTable
from chaos.scenario import Scenario
from chaos.scenario_format import Agents, Demand, Tokens

CHUNK = 65_536
TASK_KINDS = 4096
MAX_REQUESTS = 1e11
MANY_REQUESTS = 2e7  # from here on the run is announced with its length
REQUESTS_PER_S = 3e5  # of one core, with our controller (`qm bench world`)
ONCE_S = 1e9  # a trace of one instant has no length to be repeated after
COPY_SHIFT_S = (
    60.0  # copies of a request trace are shifted by up to this much: the minute's rate stays, bursts do not add
)
MAX_REQUEST_TOKENS = 2**30
P99 = 2.3263478740408408  # of the standard normal law
TASK_VARIATION = 0.5
RAG_INPUT, RAG_OUTPUT = Tokens(mean=12_000, p99=30_000), Tokens(mean=250, p99=800)
AGENT_INPUT, AGENT_OUTPUT = Tokens(mean=2_500, p99=9_000), Tokens(mean=300, p99=1_200)


@dataclass(frozen=True, slots=True)
class Law:
    """Tokens of a request: lognormal round `mean` (or round the bin's own mean) with deviation `sigma` of the log."""

    mean: float
    sigma: float
    stated: bool

    def draw(self, rng: np.random.Generator, size: int, means: Floats | None) -> I4:
        """`size` token counts of at least 1; `means`, shape (size,), stand for the mean unless it was stated."""
        factor = np.exp(self.sigma * rng.standard_normal(size, np.float32) - np.float32(self.sigma**2 / 2))
        tokens = factor * np.float32(self.mean)
        if means is not None and not self.stated:
            tokens = factor * np.where(means > 0, means, self.mean)
        whole: I4 = np.clip(np.rint(tokens), 1, MAX_REQUEST_TOKENS).astype(np.int32)
        return whole


def arrivals(scenario: Scenario, service: str, seed: int) -> Arrivals:
    """The requests of one service over the scenario; several demands are superposed, none is an empty stream.

    Raises TraceProblems for a trace that cannot be used.
    """
    rows = [(index, demand) for index, demand in enumerate(scenario.demand) if demand.service == service]
    streams = [_stream(scenario, demand, seed, f"demand/{service}/{index}") for index, demand in rows]
    return streams[0] if len(streams) == 1 else Merged(tuple(streams))


def check_traces(scenario: Scenario) -> tuple[str, ...]:
    """Reads every demand trace; what there is to know of them, one line each. Raises TraceProblems with all."""
    problems: list[str] = []
    notes: list[str] = []
    total = 0.0
    for demand in scenario.demand:
        try:
            source = _source(scenario, demand)
            expected = _expected(scenario, demand, source)
        except TraceProblems as error:
            problems += error.problems
            continue
        total += expected
        if expected > MAX_REQUESTS:
            text = f"would send {expected:.3g} requests; lower scale or rps, or shorten duration_s"
            problems.append(f"demand of {demand.service}: {text}")
        if isinstance(source, Rates) and source.filled:
            text = f"{source.filled} of {len(source.rps)} bins are missing; their rate lies between their neighbours'"
            notes.append(f"demand of {demand.service}: {demand.trace}: {text}")
    if problems:
        raise TraceProblems(tuple(dict.fromkeys(problems)))
    if total > MANY_REQUESTS:
        text = "lower duration_s, or scale or rps of the demand, for a shorter run; time goes with their number"
        notes.append(
            f"about {total:,.0f} requests, {total / REQUESTS_PER_S / 60.0:,.0f} minutes of one core or more; {text}"
        )
    return tuple(notes)


def expected_requests(scenario: Scenario, service: str) -> float:
    """How many requests (tasks, where there are tasks) the service's demand sends on average."""
    rows = [demand for demand in scenario.demand if demand.service == service]
    return sum(_expected(scenario, demand, _source(scenario, demand)) for demand in rows)


def _expected(scenario: Scenario, demand: Demand, source: Trace | Rates | None) -> float:
    if isinstance(source, Trace):
        return len(source) / _loop(source, demand).round_s * demand.scale * scenario.duration_s
    return float(_curve(scenario, demand, source, _generator(0, "expected")).due[-1])


# ---- streams --------------------------------------------------------------------------------------------------------
class Stream:
    """Chunks of requests, handed out by time."""

    def __init__(self, chunks: Iterator[RequestBatch], tasks: TaskTable) -> None:
        self._chunks = chunks
        self._tasks = tasks
        self._held = nothing()
        self._used = 0

    @property
    def tasks(self) -> TaskTable:
        """The kinds of tasks that requests refer to."""
        return self._tasks

    def take(self, until_s: float) -> RequestBatch:
        """The requests from the last `until_s` (included) to this one (excluded), in order of time."""
        parts: list[RequestBatch] = []
        while True:
            end = int(np.searchsorted(self._held.at_s, until_s))
            parts.append(_rows(self._held, slice(self._used, end)))
            self._used = end
            if end < len(self._held.at_s):
                return joined(parts)
            following = next(self._chunks, None)
            if following is None:
                return joined(parts)
            self._held, self._used = following, 0


class Merged:
    """Several streams as one, in order of time; at one instant the first stream comes first."""

    def __init__(self, streams: tuple[Arrivals, ...]) -> None:
        self._streams = streams
        tables = [stream.tasks for stream in streams]
        self._offsets = np.cumsum([0, *(len(table.calls) for table in tables)])
        self._tasks = TaskTable.none()
        if tables:
            self._tasks = TaskTable(
                calls=np.concatenate([table.calls for table in tables]),
                think_s=np.concatenate([table.think_s for table in tables]),
                grow_tokens=np.concatenate([table.grow_tokens for table in tables]),
            )

    @property
    def tasks(self) -> TaskTable:
        """The kinds of tasks of all streams, one after the other."""
        return self._tasks

    def take(self, until_s: float) -> RequestBatch:
        """The requests from the last `until_s` (included) to this one (excluded), in order of time."""
        parts = [stream.take(until_s) for stream in self._streams]
        batch = joined([_renumbered(part, int(offset)) for part, offset in zip(parts, self._offsets, strict=False)])
        return _rows(batch, np.argsort(batch.at_s, kind="stable"))


def nothing() -> RequestBatch:
    """No requests."""
    empty = np.empty(0, np.int32)
    return RequestBatch(at_s=np.empty(0), input_tokens=empty, output_tokens=empty, prefix_tokens=empty, task=empty)


def joined(parts: list[RequestBatch]) -> RequestBatch:
    """Batches one after the other."""
    some = [part for part in parts if len(part.at_s)]
    if len(some) < 2:
        return some[0] if some else nothing()
    return RequestBatch(
        at_s=np.concatenate([part.at_s for part in some]),
        input_tokens=np.concatenate([part.input_tokens for part in some]),
        output_tokens=np.concatenate([part.output_tokens for part in some]),
        prefix_tokens=np.concatenate([part.prefix_tokens for part in some]),
        task=np.concatenate([part.task for part in some]),
    )


def _rows(batch: RequestBatch, rows: slice | np.ndarray) -> RequestBatch:
    return RequestBatch(
        at_s=batch.at_s[rows],
        input_tokens=batch.input_tokens[rows],
        output_tokens=batch.output_tokens[rows],
        prefix_tokens=batch.prefix_tokens[rows],
        task=batch.task[rows],
    )


def _renumbered(batch: RequestBatch, offset: int) -> RequestBatch:
    if offset == 0:
        return batch
    task = np.where(batch.task == SINGLE, SINGLE, batch.task + offset).astype(np.int32)
    return RequestBatch(
        at_s=batch.at_s,
        input_tokens=batch.input_tokens,
        output_tokens=batch.output_tokens,
        prefix_tokens=batch.prefix_tokens,
        task=task,
    )


# ---- one demand -----------------------------------------------------------------------------------------------------
def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(name.encode())])


def _stream(scenario: Scenario, demand: Demand, seed: int, name: str) -> Stream:
    source = _source(scenario, demand)
    if isinstance(source, Trace):
        return Stream(_from_requests(source, demand, scenario.duration_s, _generator(seed, name)), TaskTable.none())
    shape = _generator(seed, f"{name}/curve")
    curve = _curve(scenario, demand, source, shape)
    tasks = _task_table(demand.synthetic, shape) if source is None else TaskTable.none()
    profile = demand.synthetic if source is None else None
    share = demand.prefix_share if demand.prefix_share is not None else profile.prefix_share if profile else 0.0
    laws = _laws(demand, source is None)
    return Stream(_from_curve(curve, demand.cv, laws, share, len(tasks.calls), _generator(seed, name)), tasks)


def _curve(scenario: Scenario, demand: Demand, source: Rates | None, rng: np.random.Generator) -> Curve:
    if source is None:
        return synthetic_curve(demand, scenario.start_at_s, scenario.duration_s, rng)
    try:
        return recorded_curve(source, demand, scenario.duration_s)
    except ValueError as error:
        raise TraceProblems((f"{demand.trace}: {error}",)) from error


def _source(scenario: Scenario, demand: Demand) -> Trace | Rates | None:
    """The trace, with the demand's reading of it; None when the synthetic profile runs. Raises TraceProblems."""
    path = scenario.file(demand.trace) if demand.trace else None
    if path is None:
        return None
    stat = path.stat()
    columns = tuple(demand.columns.named().items()) if demand.columns else None
    source = _cached(path, columns, demand.time_unit, demand.per, demand.missing, (stat.st_mtime_ns, stat.st_size))
    length_s = source.at_s[-1] if isinstance(source, Trace) else source.start_s[-1] + source.bin_s[-1]
    if demand.start_s > 0 and demand.start_s >= length_s:
        raise TraceProblems(
            (f"{path}: lasts {length_s:g} s, so start_s {demand.start_s:g} is after its end; lower it",)
        )
    if isinstance(source, Rates) and source.of_tokens and (stated := demand.stated()[0]):
        factor = AZURE_INPUT.mean / stated.mean
        return Rates(source.name, source.source, source.start_s, source.bin_s, source.rps * factor,
                     source.input_tokens / factor, source.output_tokens / factor, source.filled, True)  # fmt: skip
    return source


@lru_cache(maxsize=16)
def _cached(
    path: Path,
    columns: tuple[tuple[str, str], ...] | None,
    unit: TimeUnit | None,
    per: Per | None,
    absent: Absent,
    _version: tuple[int, int],
) -> Trace | Rates:
    return read_trace(path, dict(columns) if columns is not None else None, unit, per, absent)


def _task_table(agents: object, rng: np.random.Generator) -> TaskTable:
    if not isinstance(agents, Agents):
        return TaskTable.none()
    sigma2 = math.log1p(TASK_VARIATION**2)
    think, grow = (np.exp(math.sqrt(sigma2) * rng.standard_normal(TASK_KINDS) - sigma2 / 2) for _ in range(2))
    return TaskTable(
        calls=rng.integers(agents.calls[0], agents.calls[1] + 1, TASK_KINDS).astype(np.int32),
        think_s=agents.think_s * think,
        grow_tokens=np.rint(agents.grow_tokens * grow).astype(np.int32),
    )


def _laws(demand: Demand, synthetic: bool) -> tuple[Law, Law]:
    """How prompts and answers are drawn: as the demand says, else as the running profile does, else as Azure's."""
    usual = _usual(demand) if synthetic else (None, None)
    laws = []
    for stated, profile, azure in zip(demand.stated(), usual, (AZURE_INPUT, AZURE_OUTPUT), strict=True):
        found = stated or profile
        sigma = P99 - math.sqrt(P99**2 - 2 * math.log(found.p99 / found.mean)) if found and found.p99 else azure.sigma
        laws.append(Law(found.mean if found else azure.mean, sigma, stated is not None))
    return laws[0], laws[1]


def _usual(demand: Demand) -> tuple[Tokens | None, Tokens | None]:
    """What the profile states, else what its kind is known for."""
    profile = demand.synthetic
    assert profile is not None
    kinds: dict[str, tuple[Tokens | None, Tokens | None]] = {
        "agents": (AGENT_INPUT, AGENT_OUTPUT),
        "rag": (RAG_INPUT, RAG_OUTPUT),
    }
    (inputs, outputs), (usual_in, usual_out) = profile.tokens(), kinds.get(profile.kind, (None, None))
    return inputs or usual_in, outputs or usual_out


def _from_curve(
    curve: Curve, cv: float, laws: tuple[Law, Law], prefix_share: float, kinds: int, rng: np.random.Generator
) -> Iterator[RequestBatch]:
    """Requests at the curve's rates; gaps, counted in expected requests, are Gamma with variation `cv`.

    With `kinds` of tasks every request begins one, the kinds in turn.
    """
    due, shape, sent, mark = curve.due, 1.0 / cv**2, 0, 0.0
    vary = bool(curve.input_tokens.any() or curve.output_tokens.any())
    while mark < due[-1]:
        left = due[-1] - mark
        size = min(CHUNK, int(left + 8 * cv * math.sqrt(left) + 16))
        gaps = rng.standard_exponential(size) if shape == 1.0 else rng.standard_gamma(shape, size) / shape
        marks = mark + np.cumsum(gaps)
        mark = float(marks[-1])
        marks = marks[: int(np.searchsorted(marks, due[-1]))]
        bins = np.minimum(np.searchsorted(due, marks, side="right") - 1, len(curve.rps) - 1) if vary else None
        inputs, outputs = (
            law.draw(rng, len(marks), means[bins] if bins is not None else None)
            for law, means in zip(laws, (curve.input_tokens, curve.output_tokens), strict=True)
        )
        task = (np.arange(sent, sent + len(marks)) % kinds if kinds else np.full(len(marks), SINGLE)).astype(np.int32)
        sent += len(marks)
        prefix = (inputs * prefix_share).astype(np.int32)
        yield RequestBatch(
            at_s=np.interp(marks, due, curve.edges_s),
            input_tokens=inputs,
            output_tokens=outputs,
            prefix_tokens=prefix,
            task=task,
        )


# ---- request traces -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A request trace on a circle: row i comes at ``at_s[i]`` of every round of `round_s` seconds."""

    at_s: F8
    round_s: float
    input_tokens: I4
    output_tokens: I4
    prefix_tokens: I4

    def between(self, first_s: float, last_s: float) -> tuple[F8, np.ndarray]:
        """Instants in ``[first_s, last_s)`` of the unrolled circle, and their rows."""
        at_s, rows = [np.empty(0)], [np.empty(0, np.int64)]
        for number in range(math.floor(first_s / self.round_s), math.floor(last_s / self.round_s) + 1):
            base_s = number * self.round_s
            low, high = np.searchsorted(self.at_s, (first_s - base_s, last_s - base_s))
            at_s.append(self.at_s[low:high] + base_s)
            rows.append(np.arange(low, high))
        return np.concatenate(at_s), np.concatenate(rows)


def _loop(trace: Trace, demand: Demand) -> Loop:
    gap_s = trace.at_s[-1] / (len(trace) - 1) if len(trace) > 1 else 0.0
    tokens = [np.minimum(each, MAX_REQUEST_TOKENS).astype(np.int32) for each in (
        trace.input_tokens, trace.output_tokens, trace.prefix_tokens)]  # fmt: skip
    round_s = float(trace.at_s[-1] + gap_s) or ONCE_S
    return Loop(trace.at_s * demand.stretch, round_s * demand.stretch, *tokens)


def _from_requests(trace: Trace, demand: Demand, duration_s: float, rng: np.random.Generator) -> Iterator[RequestBatch]:
    """The trace's requests, begun again when it ends; `scale` copies of it, the last one thinned to the fraction."""
    loop, copies = _loop(trace, demand), math.ceil(demand.scale)
    keep = demand.scale - (copies - 1)  # of the last copy
    shifts_s = [0.0, *(rng.uniform(0.0, min(COPY_SHIFT_S, loop.round_s), copies - 1) if copies > 1 else [])][:copies]
    per_s = len(trace) / loop.round_s * demand.scale
    window_s = min(duration_s, CHUNK / per_s) if per_s > 0 else duration_s
    laws, origin_s = _laws(demand, False), demand.start_s * demand.stretch
    for number in range(math.ceil(duration_s / window_s)):
        first_s, last_s = number * window_s, min((number + 1) * window_s, duration_s)
        parts = []
        for copy, shift_s in enumerate(shifts_s):
            at_s, rows = loop.between(first_s + origin_s - shift_s, last_s + origin_s - shift_s)
            chosen = rng.random(len(rows)) < keep if copy == copies - 1 and keep < 1.0 else slice(None)
            parts.append((at_s[chosen] - origin_s + shift_s, rows[chosen]))
        at_s, rows = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        order = np.argsort(at_s, kind="stable")
        inside_s = np.clip(at_s[order], first_s, np.nextafter(last_s, 0.0))  # sums of floats may leave the window
        yield _picked(loop, demand, laws, inside_s, rows[order], rng)


def _picked(
    loop: Loop, demand: Demand, laws: tuple[Law, Law], at_s: F8, rows: np.ndarray, rng: np.random.Generator
) -> RequestBatch:
    """The rows' requests, with the demand's tokens where it states any."""
    inputs, outputs = (
        law.draw(rng, len(rows), None) if law.stated else recorded[rows]
        for law, recorded in zip(laws, (loop.input_tokens, loop.output_tokens), strict=True)
    )
    share = demand.prefix_share
    prefix = np.minimum(loop.prefix_tokens[rows], inputs) if share is None else (inputs * share).astype(np.int32)
    return RequestBatch(
        at_s=at_s,
        input_tokens=inputs,
        output_tokens=outputs,
        prefix_tokens=prefix,
        task=np.full(len(rows), SINGLE, np.int32),
    )
