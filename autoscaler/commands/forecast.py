"""`qm forecast`: how well the forecaster would have done on a recorded series.

Reads one CSV, runs the rolling-origin backtest of `forecasting.backtest`, prints a table and writes what was asked for.
May not decide anything about a forecast itself. Docs: docs/forecasting.md.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import process_time
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from autoscaler.commands.outcome import (
    OK,
    BadInput,
    check_apart,
    check_file,
    check_input,
    check_json,
    write_file,
    write_json,
)
from forecasting.backtest import Cell, cells, predict, with_points
from forecasting.model import Forecaster
from forecasting.series import MOST_PROBLEMS, Row, Series, regular

TimeUnit = Literal["s", "min", "ms"]
Missing = Literal["zero", "blank"]
UNIT_S: dict[str, float] = {"s": 1.0, "min": 60.0, "ms": 1e-3}
KNOWN_TIMES: dict[str, TimeUnit | Literal["iso"]] = {
    "t_minute": "min",
    "t_ms": "ms",
    "t_seconds": "s",
    "t_s": "s",
    "TIMESTAMP": "iso",
    "time": "s",
}
BLANK = ("", "nan", "null", "none", "na", "n/a")
LARGEST_AT_S = 1e11


@dataclass(frozen=True, kw_only=True)
class Given:
    """The command's options as typed."""

    csv_file: Path
    column: str
    time_column: str | None
    time_unit: TimeUnit | None
    lead_s: str
    commitment_s: float
    season_s: float
    missing: Missing
    predictions: Path | None
    html: Path | None
    json_file: str | None


class CellReport(BaseModel):
    """One lead; quantiles are keys. Challengers have their mean loss; the ratio to last value its 90 % interval."""

    lead_s: float
    n: int
    wql: dict[str, float | None]
    wql_mean: float | None
    coverage: dict[str, float | None]
    coverage_halves: tuple[dict[str, float | None], dict[str, float | None]]
    challengers: dict[str, float | None]
    ratio_to_last_value: tuple[float | None, float | None, float | None]
    provisioned_over_clairvoyant: float | None
    provisioned_over_clairvoyant_last_value: float | None


class ForecastReport(BaseModel):
    """What `qm forecast --json` writes. A figure that the data cannot give is null."""

    series: str
    cells: tuple[CellReport, ...]
    s_per_update: float
    bin_s: float
    bins: int
    missing_bins: int
    leading_members: tuple[str, ...]


def forecast_command(given: Given) -> int:
    """Runs `qm forecast`; returns the exit code. Raises BadInput for anything that cannot be used."""
    check_json(given.json_file)
    written = {"--predictions": given.predictions, "--html": given.html}
    for option, path in written.items():
        if path is not None:
            check_file(option, path)
    check_apart([given.csv_file], written | {"--json": given.json_file})
    leads = _leads(given.lead_s)
    if not (given.commitment_s >= 0.0 and given.season_s > 0.0 and math.isfinite(given.commitment_s + given.season_s)):
        raise BadInput("--commitment-s and --season-s: give finite seconds, the season above 0")
    series = read_series(given)
    forecaster = _forecaster(given, leads, series)
    started = process_time()
    said, leading = predict(series.values, with_points(forecaster), series.present, _progress(len(series.values)))
    spent = process_time() - started
    scored = cells(series.values, said, forecaster)
    report = _report(given, series, scored, spent / max(1, int(series.present.sum())), leading[: len(leads)])
    if given.predictions is not None:
        write_file("--predictions", given.predictions, _predictions(series, said, forecaster))
    if given.html is not None:
        write_file("--html", given.html, _picture(given, series, said, forecaster))
    if given.json_file is not None:
        write_json(given.json_file, report.model_dump_json(indent=2).encode())
    if given.json_file != "-":
        _print(report)
    return OK


def _leads(text: str) -> tuple[float, ...]:
    try:
        leads = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"--lead-s {text}: is no list of numbers; write seconds, as in 600,1800,3600") from None
    if not all(0.0 < lead < math.inf for lead in leads) or len(set(leads)) != len(leads):
        raise BadInput(f"--lead-s {text}: give different seconds above 0, as in 600,1800,3600")
    return leads


def _forecaster(given: Given, leads: tuple[float, ...], series: Series) -> Forecaster:
    forecaster = Forecaster(series.bin_s, leads, given.commitment_s, season_s=given.season_s)
    if forecaster.horizon > 10_000:
        raise BadInput(f"--lead-s {given.lead_s}: reaches {forecaster.horizon} bins ahead, more than 10000; shorten it")
    if given.season_s < 2 * series.bin_s:
        raise BadInput(f"--season-s {given.season_s:g}: is less than two bins of {series.bin_s:g} s; give a longer one")
    scored, needed = len(series.values) - len(series.values) // 2 - 1, min(last for _, last in forecaster.windows)
    if scored < needed:
        raise BadInput(
            f"{given.csv_file}: {len(series.values)} bins of {series.bin_s:g} s: the second half is forecast, and "
            f"the shortest window ends {needed} bins ahead; give more rows, or shorter --lead-s and --commitment-s"
        )
    return forecaster


# ---- reading --------------------------------------------------------------------------------------------------------
def read_series(given: Given) -> Series:
    """The series that the options name. Raises BadInput with every problem as ``file:line: column: …``."""
    name = str(given.csv_file)
    check_input(given.csv_file)
    try:
        with given.csv_file.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if header is None:
                raise BadInput(f"{name}:1: is empty; give a CSV with a header")
            at, time_at, unit = _columns(given, [word.strip() for word in header])
            rows, problems = _rows(reader, len(header), at, time_at, unit, given)
    except OSError as error:
        raise BadInput(f"{name}: {error.strerror}; name a file that can be read") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{name}: is no CSV text ({error}); give a CSV in UTF-8") from error
    if problems:
        raise BadInput(*(f"{name}:{problem}" for problem in problems[:MOST_PROBLEMS]))
    found = regular(rows, given.column)
    if not isinstance(found, Series):
        raise BadInput(*(f"{name}:{problem}" for problem in found))
    return found


def _columns(given: Given, header: list[str]) -> tuple[int, int, str]:
    """(value's place, time's place, unit of time)."""
    name, known = given.csv_file, ", ".join(header)
    if given.column not in header:
        raise BadInput(f"{name}:1: {given.column}: is no column; the file has {known[:200]}")
    if given.time_column is not None and given.time_column not in header:
        raise BadInput(f"{name}:1: {given.time_column}: is no column; the file has {known[:200]}")
    time_column = given.time_column or next((word for word in header if word in KNOWN_TIMES), None)
    if time_column is None:
        raise BadInput(f"{name}:1: no column of time is known by name; say --time-column and --time-unit")
    unit = given.time_unit or KNOWN_TIMES.get(time_column)
    if unit is None:
        raise BadInput(f"{name}:1: {time_column}: has no known unit; say --time-unit s, min or ms")
    return header.index(given.column), header.index(time_column), unit


def _rows(
    reader: Iterator[list[str]], columns: int, at: int, time_at: int, unit: str, given: Given
) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    problems: list[str] = []
    for line, fields in enumerate(reader, start=2):
        if not any(field.strip() for field in fields):
            continue
        if not max(at, time_at) < len(fields) <= columns:
            text = f"the row has {len(fields)} fields, the header {columns}; give every column, and quote commas"
            problems.append(f"{line}: {given.column}: {text}")
            if len(problems) >= MOST_PROBLEMS:
                break
            continue
        stamp, value = _instant(fields[time_at].strip(), unit), _value(fields[at].strip(), given)
        if stamp is None:
            problems.append(f"{line}: {fields[time_at][:40]}: is no instant in {unit}; write one, or say --time-unit")
        if isinstance(value, str):
            problems.append(f"{line}: {given.column}: {value}")
        if len(problems) >= MOST_PROBLEMS:
            break
        if stamp is not None and not isinstance(value, str):
            rows.append(Row(line, stamp, value))
    return rows, problems


def _instant(text: str, unit: str) -> float | None:
    try:
        if unit == "iso":
            moment = datetime.fromisoformat(text[:26])
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        at_s = float(text) * UNIT_S[unit]
    except ValueError:
        return None
    return at_s if abs(at_s) < LARGEST_AT_S else None


def _value(text: str, given: Given) -> float | str | None:
    """The number, None for missing, or what is wrong with it."""
    if text.lower() in BLANK:
        if text == "" and given.missing == "blank":
            return None
        why = "is blank" if text == "" else f"is {text}"
        return f"{why}; write a number, or leave it empty and say --missing blank"
    try:
        value = float(text)
    except ValueError:
        return f"{text[:40]} is no number; write one"
    if not math.isfinite(value):
        return f"is {text[:40]}; write a finite number"
    if value < 0.0:
        return f"is {text[:40]}, below zero; a rate cannot be, so correct or remove the row"
    return None if value == 0.0 and given.missing == "zero" else value


# ---- writing --------------------------------------------------------------------------------------------------------
def _progress(total: int) -> Callable[[int], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(row: int) -> None:
        if row % 50 == 0 or row == total - 1:
            sys.stderr.write(f"\r{row + 1}/{total} bins" + ("\n" if row == total - 1 else ""))

    return show


def _report(given: Given, series: Series, scored: Sequence[Cell], cost_s: float, leading: list[str]) -> ForecastReport:
    return ForecastReport(
        series=f"{given.csv_file.name}:{given.column}",
        cells=tuple(
            CellReport(
                lead_s=cell.lead_s,
                n=cell.n,
                wql=_nulls(cell.wql),
                wql_mean=_null(cell.wql_mean),
                coverage=_nulls(cell.coverage),
                coverage_halves=(_nulls(cell.halves[0]), _nulls(cell.halves[1])),
                challengers=_nulls(cell.challengers),
                ratio_to_last_value=(_null(cell.ratio[0]), _null(cell.ratio[1]), _null(cell.ratio[2])),
                provisioned_over_clairvoyant=_null(cell.provisioned),
                provisioned_over_clairvoyant_last_value=_null(cell.provisioned_last_value),
            )
            for cell in scored
        ),
        s_per_update=cost_s,
        bin_s=series.bin_s,
        bins=len(series.values),
        missing_bins=int(np.isnan(series.values).sum()),
        leading_members=tuple(leading),
    )


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _nulls(values: dict[str, float]) -> dict[str, float | None]:
    return {key: _null(value) for key, value in values.items()}


def _predictions(series: Series, said: npt.NDArray[np.float64], forecaster: Forecaster) -> str:
    """CSV: one row per origin of the last half, lead and quantile."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(("origin_s", "lead_s", "q", "value"))
    for row in range(len(series.values) // 2, len(series.values)):
        if not series.present[row] or np.isnan(said[row]).any():
            continue
        origin = f"{series.start_s + row * series.bin_s:.10g}"
        for k, lead in enumerate(forecaster.leads_s):
            for q, value in zip(forecaster.quantiles, said[row, k], strict=True):
                out.writerow((origin, f"{lead:g}", f"{q:g}", repr(float(value))))
    return text.getvalue()


def _print(report: ForecastReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "lead",
        "n",
        "WQL",
        "÷ last value (90 %)",
        "cover .95",
        "halves",
        "cover .99",
        "× demand",
        box=None,
        pad_edge=False,
    )
    for cell in report.cells:
        ratio, low, high = cell.ratio_to_last_value
        room = (cell.provisioned_over_clairvoyant, cell.provisioned_over_clairvoyant_last_value)
        table.add_row(
            f"{cell.lead_s:g} s",
            str(cell.n),
            _shown(cell.wql_mean, 4),
            f"{_shown(ratio)} ({_shown(low)}–{_shown(high)})",
            _shown(cell.coverage["0.95"]),
            " ".join(_shown(half["0.95"]) for half in cell.coverage_halves),
            _shown(cell.coverage["0.99"]),
            f"{_shown(room[0])}, last value {_shown(room[1])}",
        )
    console = Console(width=max(Console().width, 110))
    console.print(
        f"{report.series}: {report.bins} bins of {report.bin_s:g} s, {report.missing_bins} missing", markup=False
    )
    console.print(table)
    console.print("× demand: what must be provided, in demands, for 1 % of it to stay unmet", markup=False)
    console.print("most weight now: " + ", ".join(report.leading_members), markup=False)


def _shown(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _picture(given: Given, series: Series, said: npt.NDArray[np.float64], forecaster: Forecaster) -> str:
    """The series, and for the first lead what was said of the window that begins at each bin: the fan."""
    import plotly.graph_objects as go

    start = len(series.values) // 2
    at_s = series.start_s + np.arange(start, len(series.values)) * series.bin_s
    lead = forecaster.leads_s[0]
    figure = go.Figure()
    shades = ("rgba(31,119,180,.35)", "rgba(31,119,180,.22)", "rgba(31,119,180,.12)")
    figure.add_scatter(x=at_s + lead, y=said[start:, 0, 0], name="q 0.5", line={"color": "rgb(31,119,180)"})
    for k, shade in zip(range(1, len(forecaster.quantiles)), shades, strict=True):
        name = f"q {forecaster.quantiles[k]:g}"
        figure.add_scatter(
            x=at_s + lead, y=said[start:, 0, k], name=name, fill="tonexty", fillcolor=shade, line={"width": 0}
        )
    figure.add_scatter(x=at_s, y=series.values[start:], name=given.column, line={"color": "black", "width": 1})
    figure.update_layout(
        title=f"{given.column}: largest of [t, t + {given.commitment_s:g} s], said {lead:g} s before",
        xaxis_title="seconds",
        yaxis_title=given.column,
        template="plotly_white",
    )
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page
