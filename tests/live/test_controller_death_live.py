"""The controller dies: in the middle of a launch, and for good. A real cluster, real Serve, the simulated engine.

Nothing is bought twice, nothing is lost, and callers notice neither.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from autoscaler.adapters.journal import read_all
from autoscaler.adapters.local import LocalCloud
from autoscaler.core.events import Event, LaunchAmbiguous, LaunchGranted, LaunchTried
from chaos.live import processes
from chaos.live.cluster import SERVE_PATH, Cluster, Setup
from chaos.live.inputs import Given, check_inputs
from chaos.live.watch import Watch

CHAT = "support/chat"
LAUNCH_S = 4.0  # longer than the controller's time for calls, so that a kill always falls into one
BODY = {"model": CHAT, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


class Caller(threading.Thread):
    """Somebody who uses the service all the time: one small request after the other."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.answered, self.failures = url, 0, list[str]()
        self._done = threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=60.0, trust_env=False) as client:
            while not self._done.wait(0.3):
                try:
                    client.post(f"{self.url}/v1/chat/completions", json=BODY).raise_for_status()
                    self.answered += 1
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))

    def end(self) -> None:
        self._done.set()
        self.join(timeout=60.0)


def wait_for(true: Callable[[], bool], within_s: float, what: str) -> float:
    began_s = time.monotonic()
    while time.monotonic() < began_s + within_s:
        if true():
            return time.monotonic() - began_s
        time.sleep(0.1)
    raise AssertionError(f"not within {within_s:g} s: {what}")


@contextmanager
def running() -> Iterator[tuple[Cluster, Path]]:
    """`qm up`'s parts with policies that a test may edit; every process is gone afterwards."""
    inputs = check_inputs(Given(engine="sim", http_port=0))
    with tempfile.TemporaryDirectory(prefix="qm-death-") as name:  # short: Ray's sockets lie below it
        folder = Path(name)
        policies = folder / "policies"
        shutil.copytree(inputs.policies, policies)
        cluster = Cluster(
            Setup(
                run_id=folder.name,
                folder=folder,
                journal=folder / "journal",
                policies=policies,
                engine="sim",
                offerings=inputs.offerings,
                http_port=inputs.http_port,
                keep=False,
                launch_s=LAUNCH_S,
            )
        )
        try:
            cluster.start_head()
            cluster.start_cloud()
            cluster.deploy(inputs.config)
            cluster.start_controller()
            yield cluster, policies
        finally:
            cluster.stop()
            processes.end(folder.name)


def events(cluster: Cluster) -> list[Event]:
    return [record.event for record in read_all(cluster.setup.journal)]


def kill_controller(cluster: Cluster) -> None:
    """SIGKILL to `qm run` itself; what guards it ends too."""
    for pid in processes.marked(cluster.setup.run_id):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"autoscaler.cli" in words and b"run" in words and b"-S" not in words:
            os.kill(pid, signal.SIGKILL)
    cluster.forget("controller")


def ready(cluster: Cluster) -> int:
    """Running chat replicas, from Serve itself: the journal of a dead controller says nothing."""
    with cluster.dashboard() as client:
        reply = client.get(SERVE_PATH).raise_for_status().json()
    apps = [body for app, body in reply["applications"].items() if app.startswith("support.chat.")]
    rows = [row for app in apps for row in app["deployments"].get("LLM", {}).get("replicas", [])]
    return sum(row["state"] == "RUNNING" for row in rows)


async def flood(url: str, streams: int, for_s: float) -> list[int]:
    """So many requests in flight at any time; their status codes."""
    codes: list[int] = []
    until_s = time.monotonic() + for_s

    async def stream(client: httpx.AsyncClient) -> None:
        while time.monotonic() < until_s:
            codes.append((await client.post(f"{url}/v1/chat/completions", json=BODY | {"max_tokens": 12})).status_code)

    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
        await asyncio.gather(*(stream(client) for _ in range(streams)))
    return codes


@pytest.mark.timeout(900)
def test_a_killed_controller_buys_nothing_twice_and_nobody_notices() -> None:
    with running() as (cluster, policies):
        watch = Watch(cluster.setup.journal)
        wait_for(lambda: _look(watch) >= 1 and cluster.gateway_is_up(), 300.0, "the first replica is ready")
        caller = Caller(cluster.gateway_url)
        caller.start()

        # The chat's floor rises: more GPUs are needed than are owned. The controller dies in the launch call.
        before = len([event for event in events(cluster) if isinstance(event, LaunchTried)])
        chat = policies / "support.yaml"
        chat.write_text(chat.read_text().replace("min_replicas: 1", "min_replicas: 6", 1))
        wait_for(
            lambda: sum(isinstance(event, LaunchTried) for event in events(cluster)) > before, 60.0, "a launch is tried"
        )
        kill_controller(cluster)
        tail = events(cluster)[-1]
        assert isinstance(tail, LaunchTried), f"killed in the call, not after {type(tail).__name__}"
        cluster.start_controller()
        wait_for(lambda: ready(cluster) >= 6, 240.0, "six replicas after the restart")
        _assert_one_instance_per_need(cluster)

        # It dies for good. Serve goes by the local rule, and callers are served throughout. (How that rule goes down
        # again is tested in test_serve_policy_live.)
        kill_controller(cluster)
        held = ready(cluster)
        time.sleep(12.0)  # the plan goes stale
        codes = asyncio.run(flood(cluster.gateway_url, 20, 30.0))
        risen = ready(cluster)
        assert risen > held, "Serve scaled up by the local rule"
        assert set(codes) == {200}

        # And it comes back: the same instances, nothing forgotten.
        cluster.start_controller()
        wait_for(lambda: _fresh(cluster), 120.0, "a plan after the second restart")
        _assert_one_instance_per_need(cluster)
        caller.end()
        assert caller.failures == []
        assert caller.answered > 40, "one call after the other, a second each, over the whole of it"


def _look(watch: Watch) -> int:
    watch.look()
    return watch.ready()[CHAT]


def _fresh(cluster: Cluster) -> bool:
    """Whether the controller that runs now has planned."""
    return any(event.kind == "planned" for event in _since_last_start(cluster))


def _since_last_start(cluster: Cluster) -> list[Event]:
    found = events(cluster)
    starts = [n for n, event in enumerate(found) if event.kind == "opened"]
    return found[starts[-1] :]


def _assert_one_instance_per_need(cluster: Cluster) -> None:
    """Chat's six, the agents' one: seven GPUs are two instances of four. All of them known to the journal."""
    cloud = LocalCloud(cluster.cloud_url, cluster.token)
    listed = [row for row in cloud.describe(time.time()).instances if row.state in ("pending", "running")]
    cloud.close()
    assert len(listed) == 2, listed
    assert len({row.token for row in listed}) == 2, "no intent bought twice"
    tried = {event.token for event in events(cluster) if isinstance(event, LaunchTried)}
    assert {row.token for row in listed} <= tried, "nothing is running that no intent asked for"
    settled = (LaunchGranted, LaunchAmbiguous)
    assert any(isinstance(event, settled) for event in events(cluster))
