"""Demand: recorded traces read strictly, and a synthetic one made from published statistics.

Reads files and does arithmetic; may not read a clock, start anything or import an adapter. A trace is either request
rows (`Trace`: when, how many tokens in, how many out) or rate rows (`Rates`: how many requests in each bin), and
`Rates.arrivals` turns the second into the first with seeded Gamma gaps. Formats: docs/load.md.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
TimeUnit = Literal["s", "ms", "min", "iso"]
Per = Literal["s", "min", "bin"]
Absent = Literal["blank", "zero"]  # which values of a rate trace mean that nobody looked

MAX_PROBLEMS = 20
MAX_SHOWN = 200  # characters of an unknown header
BLOCK_TOKENS = 512  # Mooncake counts prefix hits in blocks of this many tokens
MAX_INSTANT_S = 1e11  # the year 5138; beyond it, the time is in another unit
MAX_SPAN_S = 366 * 86400.0
MAX_TOKENS = 10_000_000  # in one request: the longest context that any published model takes
MAX_REQUESTS = 1_000_000_000  # in one bin: a day of 11,000 requests a second
MAX_FILLED = 10  # missing bins for each one that is there
UNIT_S = {"s": 1.0, "ms": 1e-3, "min": 60.0}


class TraceProblems(ValueError):
    """A trace that cannot be used. `problems` are ``file:line: column: what is wrong, what to do``."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class TraceUnreadable(TraceProblems):
    """A trace that cannot be opened. Its one problem is ``file: why; what to do``."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival; all arrays have one entry a request.

    `at_s` counts from the first row's instant. `sessions` is empty when the trace has none; `prefix_tokens` is how much
    of the prompt an infinite prefix cache would hold. `source` says where the numbers come from.
    """

    name: str
    source: str
    at_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    prefix_tokens: Ints
    sessions: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def mean_rps(self) -> float:
        """Requests per second from the first to the last arrival (0 for fewer than two, or all at one instant)."""
        span_s = float(self.at_s[-1] - self.at_s[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span_s if span_s > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Rates:
    """Arrival rates by bin: bin i covers ``[start_s[i], start_s[i] + bin_s[i])``.

    `input_tokens` and `output_tokens` are means per request in that bin, 0 where the file does not say. `filled` bins
    were missing and lie on the line between their neighbours.
    """

    name: str
    source: str
    start_s: Floats
    bin_s: Floats
    rps: Floats
    input_tokens: Floats
    output_tokens: Floats
    filled: int = 0
    of_tokens: bool = False  # the file counts prompt tokens; `rps` supposes Azure's mean prompt

    def arrivals(
        self, seed: int, *, duration_s: float, cv: float = 1.0, scale: float = 1.0, offset_s: float = 0.0
    ) -> Trace:
        """Requests of ``[offset_s, offset_s + duration_s)``: rates × `scale`, gaps Gamma with variation `cv`.

        Token counts vary round each bin's mean as those of the published Azure conversation trace do; a file without
        tokens gets that trace's own means.
        """
        rng = np.random.default_rng(seed)
        edges_s = np.clip(np.append(self.start_s, self.start_s[-1] + self.bin_s[-1]) - offset_s, 0.0, duration_s)
        due = np.concatenate([[0.0], np.cumsum(np.diff(edges_s) * self.rps * scale)])
        marks = _gamma_marks(rng, float(due[-1]), cv)
        at_s = np.interp(marks, due, edges_s)
        index = np.clip(np.searchsorted(due, marks, side="right") - 1, 0, len(self.rps) - 1)
        means = [
            np.where(tokens > 0, tokens, default.mean)
            for tokens, default in ((self.input_tokens, AZURE_INPUT), (self.output_tokens, AZURE_OUTPUT))
        ]
        inputs, outputs = (
            _whole(mean[index] * rng.lognormal(-(law.sigma**2) / 2, law.sigma, len(marks)))
            for mean, law in zip(means, (AZURE_INPUT, AZURE_OUTPUT), strict=True)
        )
        return Trace(self.name, self.source, at_s, inputs, outputs, np.zeros(len(marks), np.int64))


@dataclass(frozen=True)
class Lognormal:
    """A lognormal law given by two published percentiles."""

    p50: float
    p99: float

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.p99 / self.p50) / 2.3263478740408408  # the normal law's 99th percentile

    @property
    def mean(self) -> float:
        """Mean of the law."""
        return self.p50 * math.exp(self.sigma**2 / 2)


# Azure LLM inference trace 2023, conversation (Azure/AzurePublicDataset, CC-BY 4.0; Patel et al., "Splitwise", ISCA
# 2024): 19,366 requests in 58 minutes. The coefficient of variation of its gaps is 1.09.
AZURE_SOURCE = "generated from published statistics of the Azure 2023 conversation trace (CC-BY 4.0): 5.5 requests/s"
AZURE_RPS = 5.5
AZURE_GAP_CV = 1.09
AZURE_INPUT = Lognormal(p50=1020.0, p99=4142.0)
AZURE_OUTPUT = Lognormal(p50=129.0, p99=601.0)


def generated(seed: int, duration_s: float) -> Trace:
    """A request trace of `duration_s` seconds with the published statistics of Azure's 2023 conversation trace."""
    rng = np.random.default_rng(seed)
    at_s = _gamma_marks(rng, AZURE_RPS * duration_s, AZURE_GAP_CV) / AZURE_RPS
    inputs, outputs = (
        _whole(law.p50 * rng.lognormal(0.0, law.sigma, len(at_s))) for law in (AZURE_INPUT, AZURE_OUTPUT)
    )
    return Trace("generated", AZURE_SOURCE, at_s, inputs, outputs, np.zeros(len(at_s), np.int64))


def _gamma_marks(rng: np.random.Generator, expected: float, cv: float) -> Floats:
    """Points of a unit-rate renewal process with Gamma gaps on ``[0, expected)``."""
    if expected <= 0:
        return np.zeros(0)
    shape = 1.0 / cv**2
    drawn = int(expected + 8 * cv * math.sqrt(expected) + 16)  # eight deviations past the mean: the tail is never cut
    marks = np.cumsum(rng.gamma(shape, 1.0 / shape, drawn))
    return marks[marks < expected]


def _whole(tokens: Floats) -> Ints:
    whole: Ints = np.maximum(1, np.rint(tokens)).astype(np.int64)
    return whole


# ---- reading --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Format:
    """Which column means what. `requests` empty: request rows. Else token columns are sums over the bin."""

    time: str
    unit: TimeUnit
    requests: str = ""
    per: Per = "bin"
    input_tokens: str = ""
    output_tokens: str = ""
    session: str = ""
    prefix_tokens: str = ""
    prefix_scale: int = 1

    def needed(self) -> tuple[str, ...]:
        """Columns without which the file is not of this format."""
        return tuple(name for name in (self.time, self.requests, self.input_tokens, self.output_tokens) if name)


PROMPTS = "input_tokens_per_min"  # a trace of tokens, not of requests
_KNOWN: tuple[_Format, ...] = (
    _Format("TIMESTAMP", "iso", input_tokens="ContextTokens", output_tokens="GeneratedTokens"),
    _Format("t_ms", "ms", input_tokens="input_tokens", output_tokens="output_tokens",
            prefix_tokens="prefix_hit_blocks_inf", prefix_scale=BLOCK_TOKENS),
    _Format("at_s", "s", input_tokens="input_tokens", output_tokens="output_tokens"),
    _Format("t_minute", "min", "requests", "bin", "input_tokens_est", "output_tokens_est"),
    _Format("t_minute", "min", "requests_per_min_mid", "min"),
    _Format("t_minute", "min", "requests", "bin"),
    _Format("t_minute", "min", PROMPTS, "min", output_tokens="output_tokens_per_min"),
)  # fmt: skip


@dataclass
class _Reader:
    """One file being read: where we are, and what was wrong so far."""

    path: Path
    problems: list[str] = field(default_factory=list)
    line: int = 1

    def problem(self, column: str, text: str) -> None:
        """Note a problem at the current line; raises when there are too many to be useful."""
        self.problems.append(f"{self.path}:{self.line}: {column}: {text}")
        if len(self.problems) >= MAX_PROBLEMS:
            self.stop()

    def stop(self) -> None:
        """Raise what was found, if anything was."""
        if self.problems:
            raise TraceProblems(tuple(self.problems))

    def count(self, row: Mapping[str, str], column: str, most: float) -> float:
        """A number from 0 to `most`; NaN (with a problem noted) when it is not one."""
        try:
            value = float(row[column])
        except ValueError:
            self.problem(column, f"{row[column]!r} is not a number, correct or remove the row")
            return math.nan
        if not (math.isfinite(value) and value >= 0):
            self.problem(column, f"{row[column]} is not a count, use a finite number that is not negative")
            return math.nan
        if value > most:
            self.problem(column, f"{row[column]} is more than {most:,.0f}, correct or remove the row")
            return math.nan
        return value


def read_trace(
    path: Path,
    columns: Mapping[str, str] | None = None,
    time_unit: TimeUnit | None = None,
    per: Per | None = None,
    absent: Absent = "blank",
) -> Trace | Rates:
    """The trace in a CSV file with a header.

    `columns` maps ``time, requests|value, input_tokens, output_tokens, session, prefix_tokens`` to the file's own
    names; headers in common use are known without it. `time_unit` and `per` are the units of the time and of the rates.
    A bin without a row or value is missing, which is not zero; with `absent` "zero", so is one that counted nothing.
    Raises TraceUnreadable, or TraceProblems listing every bad row up to twenty.
    """
    reader = _Reader(path)
    rows = _fields(reader, _text(reader))
    header = [name.strip() for name in next(rows, [])]
    if not header:
        reader.problem("header", "the file is empty, give a CSV file with a header and rows")
    reader.stop()
    found = _format(reader, header, columns, time_unit, per)
    entries = _rows(reader, header, rows)
    return _read_rates(reader, entries, found, absent) if found.requests else _read_requests(reader, entries, found)


def _text(reader: _Reader) -> str:
    """The file's text. A pipe or a device is not opened: it may never end."""
    path = reader.path
    try:
        if path.exists() and not path.is_file():
            raise TraceUnreadable((f"{path}: Not a regular file; give a CSV file with a header",))
        raw = path.read_bytes()
    except OSError as error:
        raise TraceUnreadable((f"{path}: {error.strerror}; give a CSV file with a header",)) from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reader.line = raw.count(b"\n", 0, error.start) + 1
        reader.problem("file", "is not UTF-8 text, give a CSV file with a header")
        raise TraceProblems(tuple(reader.problems)) from error


def _fields(reader: _Reader, text: str) -> Iterator[list[str]]:
    """Every row's fields; keeps the reader's line. Raises TraceProblems where the file is not CSV."""
    rows = csv.reader(text.splitlines())
    try:
        for row in rows:
            reader.line = rows.line_num
            yield row
    except csv.Error as error:
        reader.line = rows.line_num
        reader.problem("row", f"is not CSV ({error}), correct or remove the row")
        raise TraceProblems(tuple(reader.problems)) from error


def _format(
    reader: _Reader, header: list[str], columns: Mapping[str, str] | None, unit: TimeUnit | None, per: Per | None
) -> _Format:
    """Which columns to read. Raises TraceProblems for a header nobody knows or a column that is not there."""
    form = _known(reader, header) if columns is None else _named(reader, header, columns)
    return replace(form, unit=unit or form.unit, per=per or form.per)


def _known(reader: _Reader, header: list[str]) -> _Format:
    for form in _KNOWN:
        if all(name in header for name in form.needed()):
            session = "session" if "session" in header else ""
            prefix = next((name for name in (form.prefix_tokens, "prefix_tokens") if name in header), "")
            return replace(form, session=session, prefix_tokens=prefix)
    names = "; ".join(",".join(form.needed()) for form in _KNOWN)
    given = ",".join(header)[:MAX_SHOWN]
    reader.problem("header", f"{given!r} is not known, use one of ({names}) or name the columns")
    raise TraceProblems(tuple(reader.problems))


def _named(reader: _Reader, header: list[str], columns: Mapping[str, str]) -> _Format:
    requests = columns.get("requests", columns.get("value", ""))
    if "time" not in columns:
        reader.problem("columns", "'time' is missing, say which column holds the time")
    if not requests and not {"input_tokens", "output_tokens"} <= columns.keys():
        reader.problem("columns", "name 'requests' (rate rows) or 'input_tokens' and 'output_tokens' (request rows)")
    for key, name in columns.items():
        if name not in header:
            reader.problem("columns", f"{key} = {name!r} is not in the header, choose from {', '.join(header)}")
    reader.stop()
    tokens = (columns.get("input_tokens", ""), columns.get("output_tokens", ""))
    return _Format(
        columns["time"], "s", requests, "bin", *tokens, columns.get("session", ""), columns.get("prefix_tokens", "")
    )


def _rows(reader: _Reader, header: list[str], rows: Iterator[list[str]]) -> Iterator[dict[str, str]]:
    """Complete rows as dicts; a short or long row is a problem and is left out."""
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            reader.problem(
                "row", f"{len(row)} fields where the header has {len(header)}, the row is cut off or has extra commas"
            )
            continue
        yield dict(zip(header, row, strict=True))


def _clock(reader: _Reader, form: _Format) -> Callable[[Mapping[str, str]], float]:
    """A reader of the time column that sees to it that time never goes backwards, nor on for more than a year."""
    first_s, last_s = math.nan, -math.inf

    def at_s(row: Mapping[str, str]) -> float:
        nonlocal first_s, last_s
        now_s, shown = _instant(reader, row[form.time], form), row[form.time]
        if math.isnan(first_s):
            first_s = now_s
        if now_s < last_s:
            reader.problem(form.time, f"{shown} is earlier than the row before, sort the file by time")
        if now_s - first_s > MAX_SPAN_S:
            reader.problem(
                form.time, f"{shown} is more than {MAX_SPAN_S / 86400:g} days after the first row, split the file"
            )
            return math.nan
        last_s = max(last_s, now_s) if math.isfinite(now_s) else last_s
        return now_s

    return at_s


def _instant(reader: _Reader, text: str, form: _Format) -> float:
    try:
        if form.unit == "iso":
            stamp = datetime.fromisoformat(text.strip()[:26])  # Azure writes seven decimals; Python reads six
            value_s = (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
        else:
            value_s = float(text) * UNIT_S[form.unit]
    except ValueError:
        value_s = math.nan
    kind = "an ISO 8601 time" if form.unit == "iso" else f"a number of {form.unit}"
    if not math.isfinite(value_s):
        reader.problem(form.time, f"{text!r} is not {kind}, correct the row or give the time unit")
    elif abs(value_s) > MAX_INSTANT_S:
        reader.problem(form.time, f"{text} is too far away for {kind}, correct the row or give the time unit")
        return math.nan
    return value_s


def _read_requests(reader: _Reader, rows: Iterator[dict[str, str]], form: _Format) -> Trace:
    clock = _clock(reader, form)
    table: list[tuple[float, float, float, float]] = []
    sessions: list[str] = []
    for row in rows:
        prefix = reader.count(row, form.prefix_tokens, MAX_TOKENS) * form.prefix_scale if form.prefix_tokens else 0.0
        inputs, outputs = (reader.count(row, name, MAX_TOKENS) for name in (form.input_tokens, form.output_tokens))
        table.append((clock(row), inputs, outputs, prefix))
        if form.session:
            sessions.append(row[form.session])
    if not table:
        reader.problem("row", "there are no rows after the header, give at least one request")
    reader.stop()
    array = np.array(table, dtype=np.float64)
    prompts, answers = _whole(array[:, 1]), _whole(array[:, 2])
    prefixes = np.minimum(array[:, 3].astype(np.int64), prompts)
    at_s = array[:, 0] - array[0, 0]
    return Trace(reader.path.name, f"recorded: {reader.path.name}", at_s, prompts, answers, prefixes, tuple(sessions))


def _bin(reader: _Reader, row: Mapping[str, str], form: _Format) -> tuple[float, float, float]:
    """Requests of one bin, and its tokens in and out, which are sums. NaN requests where the value is blank."""
    blank = not row[form.requests].strip()
    requests = math.nan if blank else reader.count(row, form.requests, MAX_REQUESTS)
    inputs, outputs = (
        reader.count(row, name, requests * MAX_TOKENS) if name and requests > 0 and row[name].strip() else 0.0
        for name in (form.input_tokens, form.output_tokens)
    )
    return requests, inputs, outputs


def _read_rates(reader: _Reader, rows: Iterator[dict[str, str]], form: _Format, absent: Absent) -> Rates:
    at_s = _clock(reader, form)
    table = [(at_s(row), *_bin(reader, row, form)) for row in rows]
    if len(table) < 2:
        reader.problem("row", "fewer than two bins, so their length is unknown, give at least two")
    reader.stop()
    array = np.array(table, dtype=np.float64)
    steps_s = np.diff(array[:, 0])
    if not np.all(steps_s > 0):
        reader.line = int(np.argmax(steps_s <= 0)) + 3
        reader.problem(form.time, "the same time twice, give each bin once")
    reader.stop()
    width_s = float(np.sort(steps_s)[(len(steps_s) - 1) // 2])
    array = _with_missing(reader, form, array, width_s)
    known = ~np.isnan(array[:, 1]) & ((array[:, 1] > 0) | (absent == "blank"))
    if not known.any():
        reader.problem(form.requests, "every bin is missing, give at least one with a count")
        reader.stop()
    bins_s = np.append(np.diff(array[:, 0]), width_s)
    seconds = {"s": np.ones_like(bins_s), "min": np.full_like(bins_s, 60.0), "bin": bins_s}[form.per]
    rps = np.interp(array[:, 0], array[known, 0], array[known, 1] / seconds[known])
    requests = np.where(known, np.maximum(array[:, 1], 1e-9), 1.0)
    inputs, outputs = (np.where(known & (rps > 0), array[:, column] / requests, 0.0) for column in (2, 3))
    if form.requests == PROMPTS:  # requests of Azure's mean prompt, which the prompts' tokens are made of
        rps, inputs, outputs = (
            rps / AZURE_INPUT.mean,
            np.where(known, AZURE_INPUT.mean, 0.0),
            outputs * AZURE_INPUT.mean,
        )
    name, source = reader.path.name, f"recorded rates: {reader.path.name}"
    filled, of_tokens = int(np.sum(~known)), form.requests == PROMPTS
    return Rates(name, source, array[:, 0] - array[0, 0], bins_s, rps, inputs, outputs, filled, of_tokens)


def _with_missing(reader: _Reader, form: _Format, array: Floats, width_s: float) -> Floats:
    """The rows with one of unknown count for each bin of `width_s` that a jump in time leaves out."""
    absent = np.maximum(np.rint(np.diff(array[:, 0]) / width_s) - 1, 0)
    if np.sum(absent) > MAX_FILLED * len(array):
        reader.line = int(np.argmax(absent)) + 3
        text = f"{np.max(absent):,.0f} bins of {width_s:g} s are missing before this row"
        reader.problem(form.time, f"{text}, give a trace that is mostly there, or correct the time unit")
        reader.stop()
    missing = [
        (array[index, 0] + width_s * step, math.nan, 0.0, 0.0)
        for index in np.flatnonzero(absent)
        for step in range(1, int(absent[index]) + 1)
    ]
    filled: Floats = np.concatenate([array, np.array(missing)]) if missing else array
    return filled[np.argsort(filled[:, 0], kind="stable")]
