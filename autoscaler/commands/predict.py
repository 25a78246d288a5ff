"""`qm predict`: TTFT and TPOT for the rows of a table, and how well the same method says rows it has not seen.

May not hold the model itself (`autoscaler.sizing`). Docs: docs/performance.md.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from autoscaler.catalogue import Catalogue, load_catalogue
from autoscaler.commands.outcome import OK, check_apart, check_file, check_input, check_json, write_file, write_json
from autoscaler.sizing.closed_loop import answer
from autoscaler.sizing.engines import Known, laws, unknown
from autoscaler.sizing.score import Errors, Score, scores
from autoscaler.sizing.table import MOST_PROBLEMS, EngineKey, Row, Table, TableProblems, read_table
from policies.problems import Problem


@dataclass(frozen=True, kw_only=True)
class Given:
    """The command's options as typed."""

    table: Path
    predictions: Path
    fit: Path | None
    policies: Path | None
    json_file: str | None


class Constants(BaseModel):
    """The law of one engine as it was used. Seconds, tokens, tokens per second."""

    model: str
    system: str
    precision: str
    tp: int
    source: str
    a_s: float
    b_s_per_seq: float
    c_s_per_ktoken: float
    moe_w_s: float
    prefill_fixed_s: float
    prefill_tps: float
    kv_tokens: float
    first_wave: float


class PredictReport(BaseModel):
    """What `qm predict --json` writes. `scores` are over rows that took no part in the fit that predicts them."""

    rows: int
    measured_rows: int
    roofline_rows: int
    engines: tuple[Constants, ...]
    scores: tuple[Score, ...]


def predict_command(given: Given) -> int:
    """Runs `qm predict`; returns the exit code. Raises BadInput or Problems for anything that cannot be used."""
    check_json(given.json_file)
    check_file("--predictions", given.predictions)
    inputs = [path for path in (given.table, given.fit) if path is not None]
    check_apart(inputs, {"--predictions": given.predictions, "--json": given.json_file})
    for path in inputs:
        check_input(path)
    catalogue = load_catalogue(given.policies)
    table = read_table(given.table)
    fitted = table.rows if given.fit is None else (*read_table(given.fit).rows, *table.rows)
    found = laws({row.engine for row in table.rows}, fitted, catalogue)
    _check_known(given.table, table, found, catalogue)
    write_file("--predictions", given.predictions, _predictions(table, found))
    report = _report(table, fitted, found, catalogue)
    if given.json_file is not None:
        write_json(given.json_file, report.model_dump_json(indent=2).encode())
    if given.json_file != "-":
        _print(report)
    return OK


def _check_known(path: Path, table: Table, found: Mapping[EngineKey, Known], catalogue: Catalogue) -> None:
    """Raises TableProblems for engines of which neither the table nor the catalogue knows anything."""
    first = {row.engine: row.line for row in reversed(table.rows) if row.engine not in found}
    problems = [
        Problem(str(path), line, column, text)
        for key, line in sorted(first.items(), key=lambda item: item[1])
        for column, text in unknown(key, catalogue)
    ]
    if problems:
        raise TableProblems(problems[:MOST_PROBLEMS])


def _predictions(table: Table, found: Mapping[EngineKey, Known]) -> str:
    """CSV: the table with both figures predicted in every row, what they rest on, whether the row itself was fitted."""
    columns = [*table.header, *(name for name in ("ttft_ms", "tpot_ms") if name not in table.header)]
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*columns, "source", "row_was_fitted"])
    for row in table.rows:
        known = found[row.engine]
        ttft_s, tpot_s = answer(known.law, row.point.load)
        cells = dict(zip(table.header, row.fields, strict=True))
        cells |= {"ttft_ms": f"{1000.0 * ttft_s:.6g}", "tpot_ms": f"{1000.0 * tpot_s:.6g}"}
        out.writerow([*(cells[name] for name in columns), known.source, "yes" if row.measured else "no"])
    return text.getvalue()


def _report(
    table: Table, fitted: Sequence[Row], found: Mapping[EngineKey, Known], catalogue: Catalogue
) -> PredictReport:
    return PredictReport(
        rows=len(table.rows),
        measured_rows=sum(row.measured for row in table.rows),
        roofline_rows=sum(found[row.engine].roofline for row in table.rows),
        engines=tuple(_constants(key, known) for key, known in sorted(found.items())),
        scores=scores(fitted, catalogue) if any(row.measured for row in fitted) else (),
    )


def _constants(key: EngineKey, known: Known) -> Constants:
    timing = known.law.timing
    return Constants(
        model=key.model,
        system=key.system,
        precision=key.precision,
        tp=key.tp,
        source=known.source,
        a_s=timing.a_s,
        b_s_per_seq=timing.b_s_per_seq,
        c_s_per_ktoken=timing.c_s_per_ktoken,
        moe_w_s=timing.moe_w_s,
        prefill_fixed_s=timing.prefill_fixed_s,
        prefill_tps=timing.prefill_tps,
        kv_tokens=known.law.kv_tokens,
        first_wave=known.law.first_wave,
    )


def _print(report: PredictReport) -> None:
    from rich.console import Console
    from rich.table import Table as Screen

    console = Console()
    console.print(
        f"{report.rows} rows, {report.measured_rows} of them measured, {report.roofline_rows} by roofline", markup=False
    )
    if not report.scores:
        return
    screen = Screen("scored on rows kept back", "left out", "n", "TTFT median", "p90", "TPOT median", "p90")
    for score in report.scores:
        cells = (*_cells(score.ttft), *_cells(score.tpot))
        screen.add_row(score.split.replace("_", " "), score.left_out, str(max(score.ttft.n, score.tpot.n)), *cells)
    console.print(screen)


def _cells(errors: Errors) -> tuple[str, str]:
    return tuple("–" if value is None else f"{value:.1%}" for value in (errors.median, errors.p90))  # type: ignore[return-value]
