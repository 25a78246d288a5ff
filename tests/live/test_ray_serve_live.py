"""RayServe and the local cloud against a real cluster: a head, real raylets as instances, a Serve application."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from autoscaler.adapters.local import LocalCloud
from autoscaler.adapters.prometheus import EngineScraper
from autoscaler.adapters.ray_serve import RayServe
from autoscaler.core.model import Measured, Signal
from autoscaler.ports import Transient
from serve_apps.wire import GATEWAY_APP
from tests.serving_contract import APP, OFFERING, ServingRig, comes_to_life, is_emptied_by_a_drain, plan

SECRET = "a-token-for-the-test"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def poll(done: Callable[[], bool], limit_s: float, what: str) -> None:
    started_s = time.monotonic()
    while not done():
        assert time.monotonic() - started_s < limit_s, f"{what}: not within {limit_s} s"
        time.sleep(0.1)


def node_env(root: Path) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(root), "RAY_metrics_report_interval_ms": "1000"}


@dataclass
class Cluster:
    dashboard_url: str
    cloud: LocalCloud
    serving: RayServe


@contextlib.contextmanager
def head(port: int, dashboard_port: int, root: Path) -> Iterator[None]:
    """A head node without CPUs or GPUs, in a process tree of its own that is gone afterwards."""
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--node-ip-address",
        "127.0.0.1",
    ]
    command += ["--port", str(port), "--dashboard-port", str(dashboard_port), "--num-cpus", "0", "--num-gpus", "0"]
    command += ["--object-store-memory", "80000000", "--include-log-monitor=false", "--disable-usage-stats"]
    env = os.environ | node_env(root)
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            tree = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            _, alive = psutil.wait_procs(tree, timeout=10)
            for straggler in alive:
                straggler.kill()


@contextlib.contextmanager
def local_cloud(address: str, folder: Path, root: Path) -> Iterator[LocalCloud]:
    offering = {
        "offering": OFFERING,
        "pool": "a",
        "instance_type": "g6e.xlarge",
        "zone": "us-east-1a",
        "market": "on_demand",
    }
    numbers = {"gpus": 2, "price_usd_per_h": 1.0, "count": 2, "boot_s": 0.2}
    env = node_env(root)
    config = {"cluster": "test", "ray_address": address, "offerings": [offering | numbers], "node_env": env}
    (folder / "cloud.json").write_text(json.dumps(config))
    (folder / "token").write_text(SECRET)
    command = [sys.executable, "-m", "autoscaler.adapters.local_server", "--port", "0"]
    command += ["--config", str(folder / "cloud.json"), "--token-file", str(folder / "token")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            with contextlib.closing(LocalCloud(process.stdout.readline().split()[-1], SECRET)) as cloud:
                yield cloud
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def cluster(tmp_path: Path, root: Path) -> Iterator[Cluster]:
    port, dashboard_port = free_port(), free_port()
    address, url = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}"
    with contextlib.closing(RayServe(address, url)) as serving, head(port, dashboard_port, root):
        poll(lambda: answers(serving), 180, "head")
        with local_cloud(address, tmp_path, root) as cloud:
            yield Cluster(url, cloud, serving)


def answers(serving: RayServe) -> bool:
    try:
        serving.probe()
        serving.observe(time.time())  # the dashboard's first answer on Serve takes seconds
    except Transient:
        return False
    return True


def publishes(serving: RayServe, seq: int) -> bool:
    try:
        serving.publish(plan(seq))
    except Transient:
        return False
    return True


def deploy(cluster: Cluster, replicas: int) -> None:
    """Our application with `replicas`, or none of it; and always one that is not ours and needs no GPU."""
    common = {"route_prefix": None, "import_path": "tests.live.tiny_llm:app"}
    no_gpu = {"name": "LLM", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0, "num_gpus": 0}}
    applications = [common | {"name": GATEWAY_APP, "deployments": [no_gpu]}]
    if replicas:
        applications.append(common | {"name": APP, "deployments": [{"name": "LLM", "num_replicas": replicas}]})
    body = {"proxy_location": "Disabled", "applications": applications}
    reply = httpx.put(f"{cluster.dashboard_url}/api/serve/applications/", json=body, timeout=60)
    assert reply.is_success, reply.text


def test_a_replicas_life_on_an_instance_from_join_to_drain(cluster: Cluster) -> None:
    rig = ServingRig(cluster.serving, cluster.cloud, time.time, time.sleep, lambda target: deploy(cluster, target))
    instance_id = comes_to_life(rig)
    ready = {replica.replica_id for replica in rig.observe().replicas if replica.state == "ready"}
    assert len(rig.patiently(cluster.serving.metrics_urls)) == 2
    assert engines(cluster.serving, ready) == dict.fromkeys(ready, Measured(value=3.0, at_s=7.0))
    is_emptied_by_a_drain(rig, instance_id)
    poll(lambda: cluster.cloud.describe(0.0).instances[0].state == "terminated", 60, "instance ends with raylet")
    (instance,) = cluster.cloud.describe(0.0).instances
    assert instance.state_reason.startswith("Client.InstanceInitiatedShutdown")
    assert rig.patiently(cluster.serving.reports) == {}
    assert rig.patiently(cluster.serving.notes) == {}
    assert len(rig.patiently(cluster.serving.metrics_urls)) == 1


def engines(serving: RayServe, ready: set[str]) -> dict[str, Signal]:
    """The requests running in the ready replicas by the scraper, once Ray has exported it."""
    scraper = EngineScraper(serving.metrics_urls, period_s=0.5)
    scraper.start()
    try:
        poll(lambda: running(scraper).keys() >= ready, 180, "engines' gauges")
        return {key: value for key, value in running(scraper).items() if key in ready}
    finally:
        scraper.stop()


def running(scraper: EngineScraper) -> dict[str, Signal]:
    try:
        return {engine.replica_id: engine.running for engine in scraper.engines(7.0)}
    except Transient:
        return {}


def test_a_new_cluster_at_the_same_address_is_joined(root: Path) -> None:
    port, dashboard_port = free_port(), free_port()
    url = f"http://127.0.0.1:{dashboard_port}"
    with contextlib.closing(RayServe(f"127.0.0.1:{port}", url)) as serving:
        for seq in (1, 2):
            with head(port, dashboard_port, root):
                poll(lambda: answers(serving), 180, "head")
                poll(partial(publishes, serving, seq), 60, "the board")
            for call in (serving.reports, lambda: serving.publish(plan(9)), lambda: serving.observe(time.time())):
                started_s = time.monotonic()
                with pytest.raises(Transient):
                    call()
                assert time.monotonic() - started_s < 10


def test_nothing_at_the_address_is_a_clear_error_within_seconds(root: Path) -> None:
    port = free_port()
    with contextlib.closing(RayServe(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}")) as serving:
        for call in (serving.probe, serving.reports, lambda: serving.publish(plan(1))):
            started_s = time.monotonic()
            with pytest.raises(Transient, match=f"no Ray at 127.0.0.1:{port} .*ray start --head"):
                call()
            assert time.monotonic() - started_s < 5
        with pytest.raises(Transient):
            serving.observe(0.0)
        with pytest.raises(Transient):
            serving.drain("i-1", 0.0, "x")
