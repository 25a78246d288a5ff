"""`qm apply` against a real Serve: what it shows is what changes, and a running target survives every change."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import policies
from autoscaler.commands.policy import apply_command
from serve_apps.board import get_board
from serve_apps.wire import GATEWAY_APP, GATEWAY_DEPLOYMENT, LLM_DEPLOYMENT, PlanMessage, encode
from tests.live.serve_cluster import RAY, ServeCluster, free_port, serve_cluster, wait_until

SUPPORT = Path(policies.__file__).parent / "local" / "sim" / "support.yaml"
APP, OTHER_APP = "support.chat.g6-12x", "support.chat.g5-12x"
REPLICAS = 3


@contextmanager
def instance(cluster: ServeCluster) -> Iterator[None]:
    """A node with the GPUs and labels of the instance type that the policy names."""
    command = [str(RAY), "start", "--block", f"--address={cluster.address}", "--node-ip-address=127.0.0.1"]
    command += ["--num-cpus=1", "--num-gpus=4", "--labels=qm-instance-type=g6.12xlarge,qm-market=spot"]
    command += ["--object-store-memory=80000000", "--include-log-monitor=false"]
    node = subprocess.Popen(command, env=cluster.env, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        family = psutil.Process(node.pid).children(recursive=True)
        node.terminate()
        for one in psutil.wait_procs([psutil.Process(node.pid), *family], timeout=8)[1]:
            one.kill()
        node.wait(5)


@pytest.fixture
def cluster() -> Iterator[ServeCluster]:
    import ray

    with serve_cluster() as running, instance(running):
        os.environ.pop("RAY_ADDRESS", None)
        ray.init(running.address, namespace="test", log_to_driver=False, configure_logging=False)
        yield running
        ray.shutdown()


def publish(replicas: int, other: int = 0) -> None:
    """A plan that stays fresh for the whole test."""
    import ray

    targets = {APP: replicas, OTHER_APP: other}
    message = PlanMessage(
        run_id="test",
        seq=1 + other,
        published_at_s=0.0,
        stale_after_s=600.0,
        targets=targets,
        local_rules={},
        services=(),
    )
    ray.get(get_board(create=True).publish.remote(encode(message)), timeout=10)


def replica_ids(cluster: ServeCluster, app: str = APP, deployment: str = LLM_DEPLOYMENT) -> list[str]:
    replicas = cluster.applications()[app]["deployments"][deployment]["replicas"]
    return sorted(replica["replica_id"] for replica in replicas)


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def test_a_config_put_never_resets_a_running_target(
    cluster: ServeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, port = Path(shutil.copy(SUPPORT, tmp_path)), free_port()

    def apply() -> list[str]:
        assert apply_command(tmp_path, "sim", cluster.dashboard_url, yes=True, http_port=port) == 0
        return capsys.readouterr().out.splitlines()

    def settled() -> bool:
        return all(app["status"] == "RUNNING" for app in cluster.applications().values())

    assert [line for line in apply() if line.startswith("+")] == [
        f"+ {name}: new application" for name in (GATEWAY_APP, APP, OTHER_APP)
    ]
    publish(REPLICAS)
    wait_until(lambda: cluster.replicas(APP) == REPLICAS, 240, "the plan is in force")
    wait_until(settled, 180, "every application is built, also the one whose instance type is not running")
    assert (cluster.target(OTHER_APP), cluster.replicas(OTHER_APP)) == (0, 0)
    assert apply() == ["nothing to change"]

    before, gateway = replica_ids(cluster), replica_ids(cluster, GATEWAY_APP, GATEWAY_DEPLOYMENT)
    edit(policy, "max_replicas: 28", "max_replicas: 27")
    edit(policy, "ttft_s: 3.0", "ttft_s: 4.0")
    edit(policy, "priority: 900", "priority: 800")
    changes = apply()
    assert f"~ {APP}: deployments[LLM].autoscaling_config.max_replicas: 28 -> 27" in changes
    assert any("user_config" in line and ".priority: " in line for line in changes)
    seen = set()
    until_s = time.monotonic() + 8.0
    while time.monotonic() < until_s:
        deployments = cluster.applications()[APP]["deployments"]
        seen.add((deployments["LLM"]["target_num_replicas"], tuple(replica_ids(cluster))))
    assert seen == {(REPLICAS, tuple(before))}
    assert replica_ids(cluster, GATEWAY_APP, GATEWAY_DEPLOYMENT) == gateway, "new routes reach the running gateway"
    assert apply() == ["nothing to change"]

    publish(REPLICAS, other=1)
    wait_until(lambda: cluster.target(OTHER_APP) == 1, 30, "a replica is wanted on the type that is not running")
    until_s = time.monotonic() + 4.0
    while time.monotonic() < until_s:
        assert cluster.replicas(OTHER_APP) == 0
