"""A real one-node Ray with its dashboard for the live tests: own ports, own processes, all gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from chaos.live.processes import free_ports

RAY = Path(sys.executable).parent / "ray"
SERVE = Path(sys.executable).parent / "serve"


@dataclass(frozen=True)
class ServeCluster:
    """Where to find it, and the environment that command-line tools need to talk to it."""

    address: str
    dashboard_url: str
    metrics_port: int
    env: dict[str, str]

    def deploy(self, config: dict[str, Any]) -> None:
        """PUT a Serve config."""
        httpx.put(f"{self.dashboard_url}/api/serve/applications/", json=config, timeout=30).raise_for_status()

    def applications(self) -> dict[str, Any]:
        """What Serve's REST interface says of every application."""
        answer = httpx.get(f"{self.dashboard_url}/api/serve/applications/", timeout=30)
        applications: dict[str, Any] = answer.raise_for_status().json()["applications"]
        return applications

    def replicas(self, app: str) -> int:
        """Running replicas of an application's LLM deployment."""
        deployment = self.applications().get(app, {}).get("deployments", {}).get("LLM", {})
        return sum(one["state"] == "RUNNING" for one in deployment.get("replicas", []))

    def target(self, app: str) -> int:
        """Replicas that Serve is aiming at."""
        deployment = self.applications().get(app, {}).get("deployments", {}).get("LLM", {})
        return int(deployment.get("target_num_replicas", -1))


def free_port() -> int:
    """A port that nothing listens on now."""
    return free_ports(1)[0]


def wait_until(true: Callable[[], bool], within_s: float, what: str) -> float:
    """Poll until `true()`; the seconds it took. Fails the test after `within_s`."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < within_s:
        if true():
            return time.monotonic() - began_s
        time.sleep(0.05)
    raise AssertionError(f"not within {within_s} s: {what}")


@contextmanager
def serve_cluster(num_cpus: int = 8) -> Iterator[ServeCluster]:
    """Start a head node with a dashboard, yield it, and end every process of it."""
    port, dashboard, metrics = free_port(), free_port(), free_port()
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }
    command = [str(RAY), "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"]
    command += [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", f"--num-cpus={num_cpus}"]
    command += ["--num-gpus=0", f"--metrics-export-port={metrics}", "--object-store-memory=100000000"]
    head = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    )
    cluster = ServeCluster(f"127.0.0.1:{port}", env["RAY_DASHBOARD_ADDRESS"], metrics, env)
    try:
        wait_until(lambda: _answers(cluster), 180, "the dashboard answers")
        yield cluster
    finally:
        _end(head)


def _answers(cluster: ServeCluster) -> bool:
    try:
        return httpx.get(f"{cluster.dashboard_url}/api/serve/applications/", timeout=5).is_success
    except httpx.HTTPError:
        return False


def _end(head: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(head.pid).children(recursive=True)
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(8)
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait(5)
    for one in psutil.wait_procs(family, timeout=2)[1]:
        one.kill()
