"""A whole Quartermaster on this machine: Ray head, local cloud, Serve applications, controller. Started and ended here.

May not decide anything or measure anything. Every process carries the run's mark (`processes.MARK`), listens on
loopback, and, unless the run is to be kept, ends when this process does, even by SIGKILL: `local_init` sees to that.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from autoscaler.adapters import local_init

from .clouds import CloudKind, Ec2Part, LocalPart, Place, write_secret
from .processes import HOST, MARK, free_ports

OBJECT_STORE_BYTES = 80_000_000
HEAD_CPUS = 8  # Ray's own bookkeeping for the gateway; engines ask for GPUs only, and the head has none
HEAD_WAIT_S = 90.0
CLOUD_WAIT_S = 20.0
POLL_S = 0.25
TICK_S = 2.0
SERVE_PATH = "/api/serve/applications/"
NO_LOCK = ""  # the parts may start beside each other

# The children's environment: fresh queue metrics, no spare workers. Ray listens beyond the loopback interface whatever
# address it is given, so it asks everyone for the run's token (`Cluster.environment`).
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_register_timeout_seconds": "180",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
DROPPED = ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_ID", "CUDA_VISIBLE_DEVICES")


class StartFailedError(RuntimeError):
    """A part did not come up. The message names it, with the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What to start: run id and folder, journal, policies, engine, the local cloud's offerings, gateway port."""

    run_id: str
    folder: Path
    journal: Path
    policies: Path
    engine: Literal["vllm", "sim"]
    offerings: Sequence[Mapping[str, Any]]
    http_port: int
    keep: bool
    launch_s: float = 0.0  # how long the local cloud's launch calls take to answer
    cloud: CloudKind = "local"
    console_port: int = 0  # 0 takes a free one


@dataclass
class Cluster:
    """The running parts. Call the `start_…` methods and `deploy` in the order below, and `stop` at the end."""

    setup: Setup
    ports: dict[str, int] = field(default_factory=dict)
    _parts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (
            "ray",
            "dashboard",
            "client",
            "agent_http",
            "agent_grpc",
            "ray_metrics",
            "runtime_env",
            "cloud",
            "metrics",
            "console",
        )
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        setup = self.setup
        place = Place(
            setup.folder,
            setup.policies,
            setup.offerings,
            self.ray_address,
            self.environment,
            self.ports["cloud"],
            setup.keep,
            setup.launch_s,
        )
        self.cloud: LocalPart | Ec2Part = LocalPart(place) if setup.cloud == "local" else Ec2Part(place)

    # ---- addresses --------------------------------------------------------------------------------------------------
    @property
    def ray_address(self) -> str:
        """``host:port`` of Ray's GCS."""
        return f"{HOST}:{self.ports['ray']}"

    @property
    def dashboard_url(self) -> str:
        """Ray's dashboard, which also answers Serve's REST API."""
        return f"http://{HOST}:{self.ports['dashboard']}"

    @property
    def gateway_url(self) -> str:
        """The OpenAI-compatible endpoint (without ``/v1``)."""
        return f"http://{HOST}:{self.setup.http_port}"

    @property
    def cloud_url(self) -> str:
        """Where the cloud answers."""
        return self.cloud.place.url

    @property
    def console_url(self) -> str:
        """The controller's web page."""
        return f"http://{HOST}:{self.setup.console_port or self.ports['console']}/"

    @property
    def console_token_file(self) -> Path:
        """Holds the token that an order on that page needs."""
        return self.setup.folder / "console-token"

    @property
    def metrics_url(self) -> str:
        """The controller's Prometheus endpoint."""
        return f"http://{HOST}:{self.ports['metrics']}/metrics"

    @property
    def token_file(self) -> Path:
        """Where the cloud's token is; readable by this user only."""
        return self.cloud.place.token_file

    @property
    def token(self) -> str:
        """The cloud's token."""
        return self.cloud.place.token

    @property
    def ray_token_file(self) -> Path:
        """Where Ray's token is; readable by this user only."""
        return self.setup.folder / "ray.token"

    @property
    def environment(self) -> dict[str, str]:
        """What every process of the run has in its environment, those on the instances included."""
        return ENVIRONMENT | {"RAY_AUTH_TOKEN_PATH": str(self.ray_token_file), MARK: self.setup.run_id}

    def dashboard(self) -> httpx.Client:
        """A client of Ray's dashboard that shows the run's token."""
        headers = {"Authorization": f"Bearer {self.ray_token_file.read_text()}"}
        return httpx.Client(base_url=self.dashboard_url, headers=headers, timeout=120.0, trust_env=False)

    # ---- parts ------------------------------------------------------------------------------------------------------
    def start_head(self) -> None:
        """Ray's head: no GPUs, a small object store, everything on loopback. Raises StartFailedError."""
        ports = self.ports
        options = {
            "node-ip-address": HOST,
            "port": ports["ray"],
            "ray-client-server-port": ports["client"],
            "dashboard-host": HOST,
            "dashboard-port": ports["dashboard"],
            "include-dashboard": "true",
            "dashboard-agent-listen-port": ports["agent_http"],
            "dashboard-agent-grpc-port": ports["agent_grpc"],
            "metrics-export-port": ports["ray_metrics"],
            "runtime-env-agent-port": ports["runtime_env"],
            "num-gpus": 0,
            "num-cpus": HEAD_CPUS,
            "object-store-memory": OBJECT_STORE_BYTES,
            "temp-dir": self.setup.folder / "ray",
            "include-log-monitor": "false",
        }
        write_secret(self.ray_token_file)
        head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"]
        self._start("ray-head", head + [f"--{name}={value}" for name, value in options.items()])
        with self.dashboard() as client:
            self._wait("ray-head", HEAD_WAIT_S, lambda: client.get(SERVE_PATH, timeout=5.0).is_success)

    def start_cloud(self) -> None:
        """The cloud with the run's supply. Raises StartFailedError."""
        self._start("cloud", self.cloud.command())
        url = f"{self.cloud_url}/healthz"
        self._wait("cloud", CLOUD_WAIT_S, lambda: httpx.get(url, timeout=2.0, trust_env=False).is_success)

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Hand Serve the rendered config; replicas come with the plans. Raises StartFailedError."""
        (self.setup.folder / "serve.json").write_text(json.dumps(config, indent=2))
        with self.dashboard() as client:
            reply = client.put(SERVE_PATH, json=config)
        if not reply.is_success:
            raise StartFailedError(f"Serve refused the config (HTTP {reply.status_code}): {reply.text[:500]}")

    def start_controller(self) -> None:
        """``qm run`` on this cluster, as a process of its own."""
        options = {
            "ray-address": self.ray_address,
            "dashboard-url": self.dashboard_url,
            "journal": self.setup.journal,
            "tick-s": f"{TICK_S:g}",
            "engine": self.setup.engine,
            "metrics-port": self.ports["metrics"],
            "console-port": self.setup.console_port or self.ports["console"],
            "console-token-file": self.console_token_file,
        } | self.cloud.run_options()
        write_secret(self.console_token_file)
        run = [sys.executable, "-m", "autoscaler.cli", "run"]
        self._start(
            "controller", run + [f"--{name}={value}" for name, value in options.items()], self.cloud.environment()
        )

    def gateway_is_up(self) -> bool:
        """Whether the gateway answers."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.gateway_url}/healthz", timeout=2.0, trust_env=False).is_success
        return False

    def check_alive(self) -> None:
        """Raise StartFailedError when a part has ended by itself."""
        for name, child in self._parts.items():
            if child.poll() is not None and not (self.setup.keep and name == "ray-head" and child.returncode == 0):
                raise StartFailedError(f"{name} ended with {child.returncode}:\n{self.tail(name)}")

    def forget(self, name: str) -> None:
        """A part that was killed on purpose: no longer missed when it ends. Waits for its end."""
        child = self._parts.pop(name, None)
        if child is not None:
            child.wait(timeout=15.0)

    def stop(self) -> None:
        """Ask the parts to end, controller first so that nothing is launched meanwhile, and wait for each."""
        for name in ("controller", "cloud", "ray-head"):
            child = self._parts.pop(name, None)
            if child is not None and child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=15.0)

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of what a part printed."""
        with contextlib.suppress(OSError):
            text = (self.setup.folder / f"{name}.log").read_text(errors="replace")
            return "\n".join(text.splitlines()[-lines:])
        return ""

    def _start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        guard = [] if self.setup.keep else [sys.executable, "-I", "-S", local_init.__file__, str(os.getpid()), NO_LOCK]
        clean = {key: value for key, value in os.environ.items() if key not in DROPPED and not key.startswith("AWS_")}
        with (self.setup.folder / f"{name}.log").open("wb") as output:
            self._parts[name] = subprocess.Popen(
                [*guard, *command],
                start_new_session=True,  # a Ctrl-C at the terminal reaches this process only, which ends them in order
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=clean | self.environment | dict(env or {}),
            )

    def _wait(self, name: str, for_s: float, ready: Callable[[], bool]) -> None:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            self.check_alive()
            with contextlib.suppress(httpx.HTTPError):
                if ready():
                    return
            time.sleep(POLL_S)
        raise StartFailedError(f"{name} did not answer within {for_s:g} s:\n{self.tail(name)}")
