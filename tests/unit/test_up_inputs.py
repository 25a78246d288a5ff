"""`qm up` with bad input: every problem in words, exit code 2, and nothing started."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from autoscaler.cli import app
from autoscaler.commands.outcome import BadInput
from chaos.live.inputs import Given, check_inputs
from chaos.live.up import up_command

POOL = (
    "{id: a, instance_type: g6.2xlarge, region: r, zone: z, market: spot, count: 1, boot_s: {dist: constant, mean: 1}}"
)
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
GOOD = Given(engine="sim", minutes=2.0, http_port=0)


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temporary folder of its own, which must stay empty, and no child process that was not there before."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    before = _children()
    yield
    assert list(folder.iterdir()) == []
    assert _children() <= before


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _refusal(given: Given) -> str:
    with pytest.raises(BadInput) as caught:
        up_command(given)
    return "\n".join(caught.value.problems)


def test_good_input_is_read_whole() -> None:
    found = check_inputs(GOOD)
    assert found.duration_s == 120.0
    assert found.http_port > 0
    http = found.config["http_options"]
    assert (http["host"], http["port"]) == ("127.0.0.1", found.http_port)
    assert {row["instance_type"] for row in found.offerings} == {"g6.12xlarge", "g5.12xlarge"}
    assert all(row["price_usd_per_h"] > 0 and row["gpus"] == 4 for row in found.offerings)
    assert len(found.sends()) > 100


@pytest.mark.parametrize("engine", ["vllm", "sim"])
def test_the_bundled_supply_and_policies_fit_each_other(engine: str) -> None:
    found = check_inputs(replace(GOOD, engine=engine))  # type: ignore[arg-type]
    wanted = {shape.instance_type for shape in found.resolved.shapes}
    assert {row["instance_type"] for row in found.offerings} == wanted
    assert len({row["pool"] for row in found.offerings}) >= 3


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf"), 0.5, 1e9])
def test_impossible_minutes(minutes: float) -> None:
    assert _refusal(replace(GOOD, minutes=minutes)) == f"--minutes {minutes:g}: give a number from 1 to 1440"


def test_a_busy_port() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert _refusal(replace(GOOD, http_port=port)) == (
            f"--http-port {port}: something listens there; stop it, give another port, or 0 for any free one"
        )
    assert "give a port from 1 to 65535" in _refusal(replace(GOOD, http_port=70000))


def test_a_trace_of_unknown_header(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("when,what\n1,2\n")
    assert _refusal(replace(GOOD, trace=trace)).startswith(f"{trace}:1: header: 'when,what' is not known, use one of ")


def test_a_trace_without_requests(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("t_minute,requests\n0,0\n10,0\n")
    assert _refusal(replace(GOOD, trace=trace)) == f"{trace}: all of its rates are zero, give a trace with requests"


def test_an_empty_policy_folder(tmp_path: Path) -> None:
    assert str(tmp_path) in _refusal(replace(GOOD, policies=tmp_path))


def test_a_policy_with_a_problem_names_file_line_and_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("unit: a\nowner: o\nservices: []\nbudgets: 3\n")
    assert f"{tmp_path / 'a.yaml'}:4: " in _refusal(replace(GOOD, policies=tmp_path))


def test_a_supply_that_no_region_of_ec2_has_and_where_the_report_cannot_go(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    supply = tmp_path / "supply.yaml"
    supply.write_text(f"supply: [{POOL.replace('spot', 'odcr, price_usd_per_h: 1')}]\n")
    out = str(tmp_path / "no" / "r.json")
    text = _refusal(replace(GOOD, cloud="ec2-server", supply=supply, json_file=out, journal=tmp_path / "full"))
    assert f"{supply}: a: with --cloud ec2-server all rows are of one region, r, and zones begin with it" in text
    assert f"{supply}: a: with --cloud ec2-server the market is on_demand or spot, not odcr" in text
    assert "r.json: cannot be written" in text
    assert "full: is not an empty folder" in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1: is empty; start with supply:"),
        ("- 1\n", "1: holds a list instead of keys; start with supply:"),
        ("supply: []\n", "1: supply: is empty; give at least one pool"),
        ("supply:\n  - {id: a, price: 1}\n", "2: supply[a].price: is not a known key; "),
        (f"supply:\n  - {POOL}\n  - {POOL}\n", "3: supply[a].id: a is given twice; rename one"),
        (f"supply:\n  - {POOL.replace('count: 1', 'count: -1')}\n", "2: supply[a].count: is -1; it must be at least 0"),
        (
            f"supply: [{POOL.replace('g6.2xlarge', 'x9.large')}]\n",
            "1: supply[a].instance_type: x9.large is not in the catalogue; add it or use another",
        ),
        (
            f"supply: [{POOL.replace('spot', 'odcr')}]\n",
            "1: supply[a].price_usd_per_h: is missing and the catalogue has none for g6.2xlarge odcr; add it",
        ),
        (BOMB, "2: uses a YAML alias (*name); write the value out"),
        ("supply: !!python/object/apply:os.getcwd []\n", "1: uses the YAML tag "),
        ("supply: [\n", "2: is not valid YAML: "),
        ("#" * 2_000_000, "1: is larger than 1 MiB; "),
    ],
)
def test_a_supply_that_cannot_be_used(tmp_path: Path, text: str, problem: str) -> None:
    supply = tmp_path / "supply.yaml"
    supply.write_text(text)
    assert f"{supply}:{problem}" in _refusal(replace(GOOD, supply=supply))


def test_a_row_with_a_problem_does_not_make_the_list_empty(tmp_path: Path) -> None:
    supply = tmp_path / "supply.yaml"
    supply.write_text(f"supply:\n  - {POOL.replace('count: 1', 'count: x')}\n")
    assert _refusal(replace(GOOD, supply=supply)) == (
        f'{supply}:2: supply[a].count: must be a whole number, not "x"; correct it'
    )


def test_a_supply_that_is_no_text_file(tmp_path: Path) -> None:
    binary, pipe = tmp_path / "b.yaml", tmp_path / "p.yaml"
    binary.write_bytes(b"a: 1\n\xff\xfe\n")
    os.mkfifo(pipe)
    assert _refusal(replace(GOOD, supply=binary)) == f"{binary}:2: is not UTF-8 text; save it as UTF-8"
    assert f"{pipe}: is not a regular file; " in _refusal(replace(GOOD, supply=pipe))
    assert f"{tmp_path}: is not a regular file; " in _refusal(replace(GOOD, supply=tmp_path))
    assert "No such file or directory" in _refusal(replace(GOOD, supply=tmp_path / "none.yaml"))


def test_a_negative_seed_with_and_without_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("t_minute,requests\n0,5\n10,5\n")
    for given in (replace(GOOD, seed=-1), replace(GOOD, seed=-1, trace=trace)):
        assert _refusal(given) == "--seed -1: give a whole number that is not negative"


def test_a_trace_that_cannot_be_opened_is_named_by_its_option(tmp_path: Path) -> None:
    trace = tmp_path / "none.csv"
    assert _refusal(replace(GOOD, trace=trace)) == (
        f"--trace {trace}: No such file or directory; give a CSV file with a header"
    )


def test_a_journal_that_cannot_be_created(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for journal in (Path("/proc/j"), Path("/proc/j/k"), file / "j"):
        text = _refusal(replace(GOOD, journal=journal))
        assert text.startswith(f"--journal {journal}: cannot be created (")
        assert text.endswith("); give a folder that can be written")


def test_a_journal_that_can_be_created_is_not_created_yet(tmp_path: Path) -> None:
    check_inputs(replace(GOOD, journal=tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    refusal = _refusal(
        replace(GOOD, minutes=0.0, http_port=-1, trace=tmp_path / "none.csv", policies=tmp_path / "none")
    )
    assert [key for key in ("--minutes", "--http-port", "none.csv", "none") if key in refusal] == [
        "--minutes", "--http-port", "none.csv", "none",
    ]  # fmt: skip


def test_the_command_ends_with_two_and_says_why() -> None:
    result = CliRunner().invoke(app, ["up", "--engine", "sim", "--minutes", "0"])
    assert result.exit_code == 2
    assert "--minutes 0: give a number from 1 to 1440" in result.output
