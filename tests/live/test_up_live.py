"""`qm up` as a user runs it: a real Ray cluster, real Serve, the simulated engine, a load, a shortage, and the end.

Instances come from the test EC2, through boto3, as in production; those of the local cloud have tests beside this one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.live import processes

QM = (sys.executable, "-m", "autoscaler.cli")
WALL_S = 840.0  # what `qm up` allows itself: Ray, 300 s to the first replica, the load, 240 s to give back, the end


@pytest.mark.timeout(WALL_S + 30.0)
def test_up_with_the_simulated_engine_survives_a_shortage_and_leaves_nothing(tmp_path: Path) -> None:
    out, journal = tmp_path / "report.json", tmp_path / "journal"
    code, printed = _run_to_its_end(
        [
            *(*QM, "up", "--engine=sim", "--cloud=ec2-server", "--minutes=2", "--http-port=0"),
            *(f"--json={out}", f"--journal={journal}"),
        ],
        tmp_path / "printed.txt",
    )
    assert code == 0, printed[-4000:]
    report: dict[str, Any] = json.loads(out.read_text())
    live = report["live"]
    assert report["violations"] == []
    assert report["requests"] > 150
    assert live["failed_requests"] == 0
    assert live["refused_then_granted_same_tick"] >= 1
    assert live["max_ready_replicas"] >= 3
    assert live["nodes_used"] >= 2
    assert live["pools_used"] >= 2
    (reclaim,) = live["reclaims"]
    assert reclaim["empty_at_s"] <= reclaim["deadline_at_s"]
    assert (live["leaked_instances"], live["leaked_processes"]) == (0, 0)
    assert processes.marked(_run_id(printed)) == []
    assert "given back" in printed
    replayed = subprocess.run(
        [*QM, "replay", f"--journal={journal}"],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def _run_to_its_end(command: list[str], printed: Path) -> tuple[int | None, str]:
    """Exit code (None: ended after WALL_S, still running) and all that it printed: told also when it is late."""
    with printed.open("w") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            child.wait(timeout=WALL_S)
        except subprocess.TimeoutExpired:
            child.terminate()  # it takes its cluster with it
            child.wait(timeout=60.0)
            return None, printed.read_text()
    return child.returncode, printed.read_text()


def _run_id(printed: str) -> str:
    found = re.search(r"run (\w+): Ray head", printed)
    assert found is not None, printed[:500]
    return found[1]
