"""`qm simulate` as a person types it, and everything that docs/simulation.md says can be typed."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autoscaler.cli import app
from chaos.report import Report
from chaos.scenario import load_scenario

HEADINGS = ("Demand and forecast", "Instances by rung", "Requests within every limit", "Cost", "Refused launch calls")


def qm(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def blocks(root: Path, language: str) -> list[str]:
    """The fenced blocks of the document in one language."""
    text = (root / "docs" / "simulation.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def lunch(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The document's scenario, and its controller where Python finds it."""
    (tmp_path / "twice.py").write_text(blocks(root, "python")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "lunch.yaml"
    path.write_text(blocks(root, "yaml")[0])
    return path


def test_a_run_reports_pictures_and_keeps_its_journal(lunch: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("report.json", "run.html", "journal")}
    done = qm(
        "simulate", lunch, "--json", files["report.json"], "--html", files["run.html"], "--journal", files["journal"]
    )
    assert done.exit_code == 0, done.output
    assert "chat.csv is not here ($QM_DATA), its synthetic stand-in runs" in done.output
    report = Report.model_validate_json(files["report.json"].read_text())
    assert (report.scenario, report.controller, report.seed, report.duration_s) == ("lunch", "ours", 1, 1800.0)
    assert report.requests > 3000
    assert report.cost_usd == pytest.approx(sum(report.cost_usd_by.market.values()))
    assert f"cost {report.cost_usd:,.2f} USD" in done.output
    page = files["run.html"].read_text()
    assert all(heading in page for heading in HEADINGS)
    assert "support\\u002fchat" in page  # as plotly writes it
    assert "g6e-1a (on_demand)" in page
    assert "<script src=" not in page
    assert qm("status", "--journal", files["journal"]).exit_code == 0


def test_the_documents_controller_runs_and_json_alone_is_on_the_screen(lunch: Path) -> None:
    done = qm("simulate", lunch, "--controller", "twice:Twice", "--json", "-", "--seed", 7)
    assert done.exit_code == 0, done.output
    report = Report.model_validate_json(done.stdout)
    assert (report.controller, report.seed) == ("twice:Twice", 7)
    assert report.launches.granted > 0


def test_a_controller_that_raises_is_a_violation(lunch: Path, tmp_path: Path) -> None:
    (tmp_path / "sour.py").write_text(
        "class Sour:\n    def __init__(self, scenario): ...\n    def decide(self, now_s, view): raise OSError('no')\n"
    )
    done = qm("simulate", lunch, "--controller", "sour:Sour", "--set", "duration_s=60")
    assert done.exit_code == 1
    assert "violation at 0 s: controller_raised" in done.output
    assert "more violations" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--controller", "nobody"], "--controller nobody is no controller; give module:attr, or one of ours"),
        (["--controller", "no_such_module:attr"], "--controller no_such_module:attr: cannot be imported"),
        (["--seed", "-1"], "--seed -1: give a whole number from 0"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json: No such file or directory"),
        (["--html", "nowhere/x.html"], "--html nowhere/x.html: No such file or directory"),
        (["--set", "demand.0.cv=x"], '--set demand.0.cv=x: demand[0].cv: must be a number, not "x"'),
        (["--set", "demand.0.trace=bad.csv"], "bad.csv:3: requests: -1 is not a count"),
        (["--set", "supply.0.count={trace: bad.csv, key: a}"], "bad.csv:1: header: 't_minute,requests' is not"),
    ],
)
def test_bad_input_is_said_and_nothing_runs(lunch: Path, options: list[str], said: str) -> None:
    (lunch.parent / "bad.csv").write_text("t_minute,requests\n0,1\n10,-1\n")
    done = qm("simulate", lunch, *options)
    assert done.exit_code == 2
    assert said in done.output.replace(f"{lunch.parent}/", "")
    assert "launches" not in done.output


def test_an_output_is_never_an_input_or_another_output(lunch: Path) -> None:
    before = lunch.read_bytes()
    done = qm("simulate", lunch, "--json", lunch)
    assert (done.exit_code, "is what the run reads; give it a file of its own" in done.output) == (2, True)
    assert lunch.read_bytes() == before
    both = lunch.parent / "same"
    done = qm("simulate", lunch, "--json", both, "--html", both)
    assert (done.exit_code, "is what --json writes too" in done.output, both.exists()) == (2, True, False)


def test_a_pipe_without_a_reader_is_not_waited_for(lunch: Path) -> None:
    os.mkfifo(lunch.parent / "pipe")
    done = qm("simulate", lunch, "--json", lunch.parent / "pipe")
    assert (done.exit_code, "give a file that can be written" in done.output) == (2, True)


def test_a_journal_that_is_there_is_not_written_into(lunch: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    done = qm("simulate", lunch, "--journal", tmp_path / "used")
    assert (done.exit_code, "is not an empty folder; give a new one" in done.output) == (2, True)


def test_a_scenario_that_is_not_there_names_those_that_are() -> None:
    done = qm("simulate", "lnch.yaml")
    assert done.exit_code == 2
    assert "lnch.yaml: does not exist; give a scenario's file, or one of blind" in done.output


def test_the_schema_is_printed() -> None:
    done = qm("schema", "scenario")
    assert done.exit_code == 0
    assert {"name", "policies", "demand", "supply", "quotas", "faults"} <= json.loads(done.output)["properties"].keys()


def test_every_key_and_kind_of_the_format_is_in_the_document(root: Path) -> None:
    text = (root / "docs" / "simulation.md").read_text(encoding="utf-8")
    schema = json.loads(qm("schema", "scenario").output)
    keys = {
        key for part in ("Demand", "Supply", "Quota", "Fault", "Dist") for key in schema["$defs"][part]["properties"]
    }
    keys |= schema["properties"].keys()
    from chaos.faults import KINDS

    assert KINDS.keys() == set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"\| (?:pools|services|everything) \|(.*)\|", text)))
    )
    assert {key for key in keys if not re.search(rf"\b{key}\b", text)} == set()


def test_loading_a_scenario_imports_no_engine() -> None:
    import subprocess

    code = "import sys; from chaos.scenario import load_scenario; load_scenario('flash'); print('numba' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
    assert load_scenario("flash").name == "flash"
