"""What is published of the scoreboard says what was measured, and README says what is published."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoscaler.cli import app
from chaos.scoreboard.figures import Scoreboard
from chaos.scoreboard.jobs import Store
from chaos.scoreboard.page import BEGIN, END, details, publish, summary, with_table
from chaos.scoreboard.picture import page, svg
from chaos.scoreboard.plan import Asked, measure
from chaos.scoreboard.pool import Pool
from tests import bench_fakes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def board() -> Scoreboard:
    """Two scenarios over the fake world."""
    asked = Asked(scenarios=("calm", "flash"), controllers=("ours", "hpa", "static"), seeds=(0, 1))
    return measure(asked, Pool(Store(None), 1, bench_fakes.world_with_a_cheap_peer))


def test_the_summary_has_a_line_a_scenario_with_ours_the_best_peer_and_who_dominates(board: Scoreboard) -> None:
    lines = [line for line in summary(board).splitlines() if line.startswith("| calm")]
    ours = next(row for row in board.rows if row.controller == "ours" and row.scenario == "calm")
    assert lines == [
        f"| calm | 95.0% | 97.00% | {ours.cost_usd.mean:,.2f} | {1 + (ours.regret_lb1 or 0):.2f} "
        "| hpa | 0.25 | 98.00% | 50.00 | hpa |"
    ]


def test_the_details_have_every_row_and_every_claim(board: Scoreboard) -> None:
    text = details(board)
    assert sum(line.startswith(("| calm", "| flash")) for line in text.splitlines()) == len(board.rows) + len(
        board.claims
    )


def test_the_picture_is_whole_and_has_a_dot_for_everything(board: Scoreboard) -> None:
    root = ET.fromstring(svg(board))  # noqa: S314 - our own
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(board.rows) + len(board.sweeps)
    assert "flash" in [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert len(svg(board)) < 100_000


def test_the_page_needs_no_network(board: Scoreboard) -> None:
    text = page(board)
    assert "flash" in text
    assert 'src="http' not in text


def test_publishing_writes_figures_tables_and_readme_that_agree(board: Scoreboard, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    publish(board, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text == f"before\n{BEGIN}\n{summary(board)}{END}\nafter\n"
    kept = Scoreboard.model_validate_json((tmp_path / "docs/scoreboard.json").read_bytes())
    assert kept == board
    assert with_table(text, kept) == text


def test_a_readme_without_a_place_gets_one_at_its_end(board: Scoreboard) -> None:
    once = with_table("# Product\n\nText.\n", board)
    assert once.startswith("# Product\n\nText.\n\n## Beside other autoscalers\n")
    assert with_table(once, board) == once


def test_the_readme_shows_the_scoreboard_that_is_committed() -> None:
    figures, text = ROOT / "docs/scoreboard.json", (ROOT / "README.md").read_text(encoding="utf-8")
    assert figures.exists() == (BEGIN in text)
    if figures.exists():
        kept = Scoreboard.model_validate_json(figures.read_bytes())
        assert with_table(text, kept) == text
        assert (ROOT / "docs" / "scoreboard.md").read_text(encoding="utf-8") == details(kept)
        assert (ROOT / "docs/scoreboard.svg").read_text(encoding="utf-8") == svg(kept)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seeds", "3"], "--seeds 3: give FROM:TO with 1 to 1000 seeds, for example 0:10"),
        (["--seeds", "5:5"], "--seeds 5:5: give FROM:TO"),
        (["--controllers", "hpaa"], "--controllers hpaa: is no controller of the scoreboard; did you mean hpa?"),
        (["--controllers", ","], "name at least one each"),
        (["--scenarios", "clam"], "clam: does not exist; give a scenario's file, or one of"),
        (["--publish", "nowhere"], "--publish nowhere: holds no README.md"),
        (["--json", "no/such/folder/f.json"], "--json no/such/folder/f.json: No such file or directory"),
        (["--html", "no/such/folder/f.html"], "--html no/such/folder/f.html: No such file or directory"),
        (["--results", "README.md"], "--results README.md: is not a folder"),
    ],
)
def test_bad_input_is_said_before_anything_runs(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("a file")
    found = CliRunner().invoke(app, ["bench", *options])
    assert (found.exit_code, found.stdout) == (2, "")
    assert said in " ".join(found.stderr.split())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["README.md"]


def test_a_real_bench_of_one_short_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One service for five minutes under ours and a peer, through the command, with everything it writes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.yaml").write_text(SHORT)
    options = ["--scenarios", "short.yaml", "--controllers", "ours,hpa,static", "--seeds", "0:2", "--jobs", "1"]
    found = CliRunner().invoke(app, ["bench", *options, "--json", "out.json", "--html", "out.html"])
    assert found.exit_code == 0, found.output
    kept = Scoreboard.model_validate_json(Path("out.json").read_bytes())
    assert {row.controller for row in kept.rows} == {"ours", "hpa", "static"}
    assert all(0.0 < (row.lb1_usd or 0.0) <= row.cost_usd.mean for row in kept.rows)
    assert "ours" in found.stdout
    again = CliRunner().invoke(app, ["bench", *options, "--json", "again.json"])
    assert again.exit_code == 0
    assert "0 of them now" in " ".join(again.stdout.split())
    assert Scoreboard.model_validate_json(Path("again.json").read_bytes()).rows == kept.rows


SHORT = """
name: short
duration_s: 300
tick_s: 10
policies:
  - unit: u
    owner: o@example.com
    services:
      - name: chat
        model: meta-llama/Meta-Llama-3.1-8B
        goal: latency
        priority: 900
        slo: {ttft_s: 2.0, tpot_s: 0.08, fraction: 0.5}
        max_replicas: 4
        variants: [{id: l40s, instance_type: g6e.2xlarge}]
demand: [{service: u/chat, synthetic: {kind: constant, rps: 5}}]
supply:
  - {id: od, instance_type: g6e.2xlarge, zone: a, market: on_demand, count: 4,
     boot_s: {dist: constant, mean: 20}, load_s: {dist: constant, mean: 20}}
"""
