"""A real Prometheus that scrapes one port of this machine, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.repo.test_metric_names import RULES

DEADLINE_S = 30.0
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: quartermaster
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def binary(name: str) -> str:
    """Where `prometheus` or `promtool` is; the test fails, and says how to get it, where it is not."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not on the path: run these tests by `make test-system`, which fetches it")
    return found


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, ready: Callable[[], bool]) -> None:
    """Polls `ready` until it is true; the test fails after DEADLINE_S."""
    end_s = time.monotonic() + DEADLINE_S
    while not ready():
        if time.monotonic() > end_s:
            pytest.fail(f"{what}: not within {DEADLINE_S:.0f} s")
        time.sleep(0.1)


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def ready(self) -> bool:
        """Whether it answers queries."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/-/ready").status_code == httpx.codes.OK
        return False

    def query(self, expression: str) -> dict[tuple[str, ...], float]:
        """Value by label values (sorted by label name; the scrape's own labels left out) of an instant query."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}).raise_for_status().json()
        rows: list[dict[str, Any]] = answer["data"]["result"]
        hidden = {"__name__", "instance", "job"}
        return {
            tuple(value for name, value in sorted(row["metric"].items()) if name not in hidden): float(row["value"][1])
            for row in rows
        }

    def rules(self) -> list[dict[str, Any]]:
        """Its rules as it sees them."""
        answer = httpx.get(f"{self.url}/api/v1/rules").raise_for_status().json()
        return [rule for group in answer["data"]["groups"] for rule in group["rules"]]


@contextlib.contextmanager
def running(scraped_port: int, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with its files in `folder`, answering, and gone afterwards."""
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(port=scraped_port, rules=RULES))
    port = free_port()
    command = [
        binary("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        server = Prometheus(f"http://127.0.0.1:{port}")
        try:
            wait_for("Prometheus answers", lambda: process.poll() is not None or server.ready())
            assert process.poll() is None, (folder / "log").read_text()
            yield server
        finally:
            process.terminate()
