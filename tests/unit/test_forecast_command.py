"""`qm forecast`: what it writes, and what it says of input that cannot be used."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from autoscaler.cli import app

RUN = CliRunner()


def qm(*words: object) -> tuple[int, str, str]:
    found = RUN.invoke(app, ["forecast", *(str(word) for word in words)])
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def made(*rows: str, header: str = "t_minute,load") -> Path:
        path = tmp_path / "load.csv"
        path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
        return path

    return made


def rows(n: int) -> list[str]:
    return [f"{10 * k},{100 + 30 * math.sin(k / 23):.3f}" for k in range(n)]


def test_it_writes_predictions_figures_and_a_picture(write: Callable[..., Path], tmp_path: Path) -> None:
    path, out, picture, report = write(*rows(60)), tmp_path / "p.csv", tmp_path / "p.html", tmp_path / "r.json"
    words = (
        path,
        "--column",
        "load",
        "--lead-s",
        "600,1800",
        "--predictions",
        out,
        "--html",
        picture,
        "--json",
        report,
    )
    code, shown, said = qm(*words)
    assert (code, said) == (0, "")
    assert "last value" in shown
    made = list(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))
    assert list(made[0]) == ["origin_s", "lead_s", "q", "value"]
    assert (made[0]["origin_s"], made[-1]["origin_s"]) == ("18000", "35400"), "every stamp of the last half"
    assert len(made) == 30 * 2 * 4
    values = [float(row["value"]) for row in made[:4]]
    assert values == sorted(values)
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["series"] == "load.csv:load"
    assert [cell["lead_s"] for cell in found["cells"]] == [600.0, 1800.0]
    assert set(found["cells"][0]) >= {"n", "wql", "wql_mean", "coverage", "challengers"}
    assert set(found["cells"][0]["challengers"]) == {"last_value", "seasonal_naive"}
    assert found["s_per_update"] > 0.0
    assert "plotly" in picture.read_text(encoding="utf-8")


def test_json_on_the_screen_is_all_that_is_on_it(write: Callable[..., Path]) -> None:
    code, shown, _ = qm(write(*rows(30)), "--column", "load", "--json", "-")
    assert code == 0
    assert json.loads(shown)["bins"] == 30


def test_zeros_are_missing_unless_blanks_are(write: Callable[..., Path]) -> None:
    path = write(*rows(30), "300,0", "310,", "320,100")
    assert "line" not in qm(path, "--column", "load", "--missing", "blank")[2]
    code, shown, _ = qm(path, "--column", "load", "--missing", "blank", "--json", "-")
    assert (code, json.loads(shown)["missing_bins"]) == (0, 1)
    code, _, said = qm(path, "--column", "load")
    assert code == 2
    assert said == f"{path}:33: load: is blank; write a number, or leave it empty and say --missing blank\n"


BAD: dict[str, tuple[list[str], str]] = {
    "twice": (["0,5", "10,6", "10,7"], "4: load: has the instant of line 3; keep one of the two"),
    "unordered": (["0,5", "20,6", "10,7"], "4: load: lies before line 3; sort the rows by time"),
    "nan": (["0,5", "10,nan"], "3: load: is nan; write a number, or leave it empty and say --missing blank"),
    "infinite": (["0,5", "10,inf"], "3: load: is inf; write a finite number"),
    "negative": (["0,5", "10,-2"], "3: load: is -2, below zero; a rate cannot be, so correct or remove the row"),
    "word": (["0,5", "10,many"], "3: load: many is no number; write one"),
    "one sample": (["0,5"], "1: load: 1 sample; a forecast is tested on at least 2, half of them to learn from"),
    "all zero": (
        ["0,0", "10,0", "20,0"],
        "1: load: no row says anything; give a column with values (zeros count with --missing blank)",
    ),
    "clock jump": (
        ["0,5", "10,6", "20,7", "33,8", "43,9"],
        "5: load: lies 180 s off the grid of 600 s bins that the other rows make (a clock that jumped?); put rows on "
        "one grid, leaving out those that are missing",
    ),
    "short row": (["0,5", "10"], "3: load: the row has 1 fields, the header 2; give every column, and quote commas"),
    "long row": (
        ["0,1", "10,2,3", "20,3"],
        "3: load: the row has 3 fields, the header 2; give every column, and quote commas",
    ),
    "no instant": (["0,5", "soon,6"], "3: soon: is no instant in min; write one, or say --time-unit"),
    "in other units": (
        ["0,5", "10,6", "2e8,7"],
        "4: load: lies 20000000 bins of 600 s after the first row, over 2000000; cut the file, or check --time-unit",
    ),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_rows_are_named_with_their_line(write: Callable[..., Path], tmp_path: Path, name: str) -> None:
    lines, complaint = BAD[name]
    path, out = write(*lines), tmp_path / "never.csv"
    assert qm(path, "--column", "load", "--predictions", out) == (2, "", f"{path}:{complaint}\n")
    assert not out.exists()


def test_all_zero_counts_where_blanks_are_missing(write: Callable[..., Path]) -> None:
    code, shown, said = qm(
        write(*(f"{10 * k},0" for k in range(20))), "--column", "load", "--missing", "blank", "--json", "-"
    )
    assert (code, said) == (0, "")
    cell = json.loads(shown)["cells"][0]
    assert cell["wql_mean"] is None, "there is nothing to weigh a loss by"


def test_a_year_of_silence_then_traffic(write: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    lines = [*rows(20), *(f"{525600 + 10 * k},80" for k in range(20))]
    code, _, said = qm(write(*lines), "--column", "load", "--lead-s", "600", "--predictions", out)
    assert (code, said) == (0, "")
    values = [float(row["value"]) for row in csv.DictReader(out.read_text(encoding="utf-8").splitlines())]
    assert len(values) == 20 * 4
    assert 0.0 < min(values) <= max(values) <= 3 * 130.0


OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "column": (("--column", "lod"), "{path}:1: lod: is no column; the file has t_minute, load"),
    "time column": (
        ("--column", "load", "--time-column", "when"),
        "{path}:1: when: is no column; the file has t_minute, load",
    ),
    "leads": (
        ("--column", "load", "--lead-s", "600;900"),
        "--lead-s 600;900: is no list of numbers; write seconds, as in 600,1800,3600",
    ),
    "no lead": (
        ("--column", "load", "--lead-s", "0"),
        "--lead-s 0: give different seconds above 0, as in 600,1800,3600",
    ),
    "far lead": (
        ("--column", "load", "--lead-s", "9e6"),
        "--lead-s 9e6: reaches 15003 bins ahead, more than 10000; shorten it",
    ),
    "season": (
        ("--column", "load", "--season-s", "900"),
        "--season-s 900: is less than two bins of 600 s; give a longer one",
    ),
    "out": (
        ("--column", "load", "--predictions", "/nowhere/p.csv"),
        "--predictions /nowhere/p.csv: No such file or directory; give a file that can be written",
    ),
}


@pytest.mark.parametrize("option", ["--predictions", "--html", "--json"])
def test_what_is_read_is_not_written(write: Callable[..., Path], option: str) -> None:
    path = write(*rows(10))
    before = path.read_bytes()
    complaint = f"{option} {path}: is what the run reads; give it a file of its own\n"
    assert qm(path, "--column", "load", option, path) == (2, "", complaint)
    assert path.read_bytes() == before


def test_two_outputs_are_two_files(write: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    complaint = f"--html {out}: is what --predictions writes too; give it a file of its own\n"
    assert qm(write(*rows(10)), "--column", "load", "--predictions", out, "--html", out) == (2, "", complaint)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_bad_options_are_named(write: Callable[..., Path], name: str) -> None:
    words, complaint = OPTIONS[name]
    path = write(*rows(10))
    assert qm(path, *words) == (2, "", complaint.format(path=path) + "\n")


def test_files_that_are_none(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.csv", tmp_path / "binary.csv"
    empty.write_bytes(b"")
    binary.write_bytes(b"\xff\xfe\x00t,load\n")
    assert qm(empty, "--column", "load") == (2, "", f"{empty}:1: is empty; give a CSV with a header\n")
    assert qm(tmp_path / "no.csv", "--column", "load")[2].endswith(
        "No such file or directory; name a file that can be read\n"
    )
    code, _, said = qm(binary, "--column", "load")
    assert (code, "is no CSV text" in said) == (2, True)


# ---- the public series ----------------------------------------------------------------------------------------------
PUBLIC: dict[str, tuple[str, tuple[float, ...], dict[str, tuple[float, float]]]] = {
    "azure_2024_conv_week_10min.csv": (
        "requests_per_min_mid",
        (0.93, 0.85, 0.75),
        {"600.0": (0.918, 0.976), "1800.0": (0.909, 0.985), "3600.0": (0.904, 0.988)},
    ),
    "servegen_m_small_14d_10min.csv": (
        "requests",
        (0.90, 0.90, 0.92),
        {"600.0": (0.934, 0.966), "1800.0": (0.928, 0.969), "3600.0": (0.922, 0.975)},
    ),
    "servegen_deepseek_r1_1d_10min.csv": ("requests", (1.03, 1.03, 1.03), {}),
}


@pytest.mark.data
@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_recorded_series_are_forecast_better_than_by_their_last_value(name: str) -> None:
    column, most, cover = PUBLIC[name]
    path = Path(os.environ["QM_DATA"]) / "demand" / name
    code, shown, said = qm(path, "--column", column, "--json", "-")
    assert (code, said) == (0, "")
    found: list[dict[str, Any]] = json.loads(shown)["cells"]
    ratios = [cell["ratio_to_last_value"] for cell in found]
    assert all(ratio[0] <= bar for ratio, bar in zip(ratios, most, strict=True)), ratios
    assert all(cell["coverage"]["0.99"] >= 0.97 for cell in found)
    if cover:
        assert np.prod([high for _, _, high in ratios]) < 1.0
        halves = [(half["0.95"], *cover[str(cell["lead_s"])]) for cell in found for half in cell["coverage_halves"]]
        assert all(low <= share <= high for share, low, high in halves), halves
        assert all(
            cell["provisioned_over_clairvoyant"] < cell["provisioned_over_clairvoyant_last_value"] for cell in found
        )


def test_a_series_too_short_to_score_anything_is_refused(write: Callable[..., Path]) -> None:
    path = write(*rows(8))
    said = (
        f"{path}: 8 bins of 600 s: the second half is forecast, and the shortest window ends 4 bins ahead; give more "
        "rows, or shorter --lead-s and --commitment-s\n"
    )
    assert qm(path, "--column", "load", "--lead-s", "600") == (2, "", said)
    assert qm(write(*rows(9)), "--column", "load", "--lead-s", "600", "--json", "-")[0] == 0
