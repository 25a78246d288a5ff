"""What commands read and write: devices, pipes, full disks, long names, interrupts. One line and the right code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from autoscaler.cli import app

SCENARIO = """
name: small
duration_s: {duration_s}
policies:
  - unit: u
    owner: o@example.com
    services:
      - {{name: chat, model: meta-llama/Meta-Llama-3.1-8B, goal: latency, slo: {{ttft_s: 2.0}}, max_replicas: 9,
         variants: [{{id: l, instance_type: g6e.2xlarge}}]}}
demand: [{{service: u/chat, synthetic: {{kind: constant, rps: {rps}}}}}]
supply: [{{id: od, instance_type: g6e.2xlarge, zone: us-east-1a, market: on_demand, count: 30}}]
"""
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "autoscaler.cli"]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a scenario, a series and a pipe."""
    (tmp_path / "s.yaml").write_text(SCENARIO.format(duration_s=60, rps="1e0"))
    (tmp_path / "c.csv").write_text("t_s,x\n" + "".join(f"{60 * k},{k}\n" for k in range(200)))
    os.link(tmp_path / "c.csv", tmp_path / "same.csv")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def qm(here: Path, words: str, out: str = "out") -> tuple[int, str]:
    """Exit code and standard error."""
    with (here / out).open("w") if out == "out" else Path(out).open("w") as file:
        done = subprocess.run(
            [*COMMAND, *words.split()], cwd=here, env=ENV, stdout=file, stderr=subprocess.PIPE, timeout=60, check=False
        )
    return done.returncode, done.stderr.decode()


FULL = "No space left on device; give a file that can be written"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("simulate s.yaml --html /dev/full", f"--html /dev/full: {FULL}"),
        ("simulate s.yaml --json /dev/full", f"--json /dev/full: {FULL}, or - for the screen"),
        ("simulate s.yaml --html -", "--html -: goes to a file; name one, only --json writes to the screen"),
        (f"simulate s.yaml --json {'a' * 300}", "File name too long; give a file that can be written"),
        (f"simulate {'a' * 300}", "File name too long; check the path and its permissions"),
        ("simulate fifo", "fifo: is not a regular file; remove it, or give it another name"),
        ("simulate /dev/zero", "/dev/zero: is not a regular file; remove it, or give it another name"),
        ("simulate s.yaml --set demand.0.trace=fifo", "fifo: Not a regular file; give a CSV file with a header"),
        ("simulate s.yaml --set demand=[]", "demand: is empty, so nothing would happen; give a row"),
        ("forecast fifo --column x", "fifo: is no regular file; save what it gives, and name that file"),
        ("forecast /dev/zero --column x", "/dev/zero: is no regular file; save what it gives, and name that file"),
        ("forecast c.csv --column x --predictions /dev/full", f"--predictions /dev/full: {FULL}"),
        ("forecast c.csv --column x --predictions same.csv", "--predictions same.csv: is what the run reads"),
        ("predict fifo --predictions p.csv", "fifo: is no regular file; save what it gives, and name that file"),
        ("predict c.csv --predictions same.csv", "--predictions same.csv: is what the run reads"),
        ("recommend --html -", "--html -: goes to a file; name one, only --json writes to the screen"),
        ("check fifo", "fifo: is a file; give the folder that holds it"),
        ("schema nope", "schema nope: is not a format; choose one of board, catalogue"),
    ],
)
def test_what_cannot_be_read_or_written_is_said_in_one_line(
    here: Path, words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", ["simulate s.yaml --json -", "simulate s.yaml", "schema scenario"])
def test_a_screen_that_is_full_is_no_success(here: Path, words: str) -> None:
    code, errors = qm(here, words, "/dev/full")
    assert (code, "Traceback" in errors, "standard output: No space left on device" in errors) == (2, False, True)


def test_who_reads_no_further_has_enough(here: Path) -> None:
    words = f"{' '.join(COMMAND)} schema scenario | head -n 1"
    done = subprocess.run(["/bin/sh", "-c", words], cwd=here, env=ENV, capture_output=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (b"{\n", b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line_that_says_what_is_kept(here: Path, number: signal.Signals) -> None:
    (here / "long.yaml").write_text(SCENARIO.format(duration_s=5e6, rps=1.0))
    command = [*COMMAND, "simulate", "long.yaml", "--journal", "kept"]
    run = subprocess.Popen(command, cwd=here, env=ENV, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert until(lambda: any((here / "kept").glob("*")))
    run.send_signal(number)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + number
    assert errors.decode() == f"stopped by {number.name}: kept has the journal up to the last tick\n"


def test_an_interrupted_bench_leaves_no_process_and_goes_on(here: Path) -> None:
    (here / "long.yaml").write_text(SCENARIO.format(duration_s=5e6, rps=1.0))
    words = ["bench", "--scenarios", "s.yaml,long.yaml", "--controllers", "ours", "--seeds", "0:1", "--jobs", "2"]
    bench = subprocess.Popen([*COMMAND, *words], cwd=here, env=ENV, stderr=subprocess.PIPE)
    assert until(lambda: len(list((here / "build/bench").glob("*.json"))) > 0)
    children = psutil.Process(bench.pid).children(recursive=True)
    bench.send_signal(signal.SIGINT)
    _, errors = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert errors.decode().splitlines()[-1] == (
        "stopped by SIGINT: finished runs are kept in build/bench; the same command goes on there"
    )
    assert until(lambda: not any(child.is_running() for child in children))


def until(true: object, limit_s: float = 60.0) -> bool:
    """Whether it becomes true in time."""
    assert callable(true)
    end_s = time.monotonic() + limit_s
    while not true() and time.monotonic() < end_s:
        time.sleep(0.05)
    return bool(true())


def test_numbers_with_an_exponent_are_numbers_everywhere(here: Path) -> None:
    code, errors = qm(here, "simulate s.yaml --set demand.0.synthetic.rps=2e0 --json r.json")
    assert (code, errors) == (0, "")
    assert json.loads((here / "r.json").read_text())["requests"] == pytest.approx(120, rel=0.4)


def test_a_long_run_is_announced_with_what_would_shorten_it(here: Path) -> None:
    long = SCENARIO.format(duration_s=1e6, rps=100.0)
    (here / "long.yaml").write_text(long)
    with subprocess.Popen([*COMMAND, "simulate", "long.yaml"], cwd=here, env=ENV, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        line = run.stderr.readline().decode()
        run.kill()
    assert line.startswith(
        "about 100,000,000 requests, 6 minutes of one core or more; lower duration_s, or scale or rps"
    )
