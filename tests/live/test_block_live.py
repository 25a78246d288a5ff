"""A Capacity Block from its purchase to its end, on a real cluster: raylets launched through boto3, under load.

Nothing is scaled in time: the block starts two and a half minutes after it is bought, is used for seven, and the last
40 minutes before its end, in which it takes no work, are left out but for the first. It takes eleven minutes, so it is
part of `make proof`.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import policies
from autoscaler.adapters.ec2.calls import Bucket, Caller, connect
from autoscaler.adapters.ec2.purchase import Purchases, for_sale
from autoscaler.adapters.journal import read_all
from autoscaler.core.events import CheckFailed
from chaos.live import processes
from chaos.live.clouds import Ec2Part
from chaos.live.cluster import Cluster, Setup
from chaos.live.inputs import Given, Inputs, check_inputs
from chaos.live.load import Load, Send
from chaos.live.watch import Watch

KIND, ZONE = "g6.12xlarge", "us-east-1a"
CHAT = "support/chat"
SUPPLY = (
    f"supply:\n  - {{id: od, instance_type: {KIND}, region: us-east-1, zone: {ZONE}, "
    "market: on_demand, count: 2, boot_s: {dist: constant, mean: 5}}\n"
)
UNTIL_START_S, IN_USE_S, AFTER_S = 150.0, 420.0, 60.0
WARM_S = 240.0  # launch, boot and load on a machine that has other work
BOOT_S = 90.0  # on the same machine, where the catalogue of the demo has one that is idle
CLOSING_S = 2400.0
EVERY_S = 1.5
WALL_S = 1500.0


def prepared(folder: Path) -> Inputs:
    """The demo's policy for chat alone, which may use a block."""
    demo = Path(policies.__path__[0]) / "local" / "sim"
    written = folder / "given"
    written.mkdir()
    (written / "catalogue").mkdir()
    facts = (demo / "catalogue" / "instance_types.yaml").read_text()
    (written / "catalogue" / "instance_types.yaml").write_text(facts.replace("boot_s: 15.0", f"boot_s: {BOOT_S}"))
    text = (demo / "support.yaml").read_text()
    text = text.replace("[on_demand, spot]", "[on_demand, block]").replace("max_replicas: 28", "max_replicas: 2")
    text = text.replace(f"instance_type: {KIND}}}", f"instance_type: {KIND}, tp: 4}}")  # a replica is an instance
    text = "".join(line for line in text.splitlines(keepends=True) if "g5-12x" not in line)
    (written / "support.yaml").write_text(text)
    (folder / "supply.yaml").write_text(SUPPLY)
    return check_inputs(
        Given(engine="sim", http_port=0, policies=written, supply=folder / "supply.yaml", cloud="ec2-server")
    )


@contextmanager
def running(folder: Path) -> Iterator[tuple[Cluster, float]]:
    """The parts, the block bought before the controller starts; and when the block starts."""
    inputs = prepared(folder)
    setup = Setup(
        run_id=folder.name,
        folder=folder,
        journal=folder / "journal",
        policies=inputs.policies,
        engine="sim",
        offerings=inputs.offerings,
        http_port=inputs.http_port,
        keep=False,
        cloud="ec2-server",
    )
    cluster = Cluster(setup)
    try:
        cluster.start_head()
        start_at_s = time.time() + UNTIL_START_S
        buy(cluster, start_at_s)
        cluster.deploy(inputs.config)
        cluster.start_controller()
        yield cluster, start_at_s
    finally:
        cluster.stop()
        processes.end(folder.name)


def buy(cluster: Cluster, start_at_s: float) -> None:
    """The block is for sale in the account, is bought over HTTP, and is written into ``cloud/ec2.yaml``."""
    part = cluster.cloud
    assert isinstance(part, Ec2Part)
    end_at_s = start_at_s + IN_USE_S + CLOSING_S
    place = {"instance_type": KIND, "zone": ZONE, "count": 1}
    part.blocks = [{"offering": "cb-1", "start_at_s": start_at_s, "end_at_s": end_at_s, "fee_usd": 90.0} | place]
    cluster.start_cloud()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in part.environment().items():
            patch.setenv(name, value)
        caller = Caller(connect("us-east-1"), Bucket(10.0, 1.0, time.time))
        (block,) = for_sale(caller, KIND, 1, 1)
        bought = Purchases(caller, cluster.setup.folder / "purchases", time.time).buy("demo", block)
    part.reservations.append({"id": bought, "market": "block", "instance_type": KIND, "zone": ZONE})


class Users(threading.Thread):
    """Small requests, evenly, from now until long after the block's end."""

    def __init__(self, url: str, for_s: float) -> None:
        super().__init__(daemon=True)
        sends = [Send(number * EVERY_S, CHAT, "latency", 20, 6) for number in range(round(for_s / EVERY_S))]
        self.load = Load(url, sends)

    def run(self) -> None:
        asyncio.run(self.load.run())


class Seen:
    """What the journal last showed: ready replicas by the market of the instance they are on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._watch = cluster, Watch(cluster.setup.journal)

    def ready(self) -> dict[str, int]:
        self._cluster.check_alive()
        self._watch.look()
        cloud, serving = self._watch.cloud, self._watch.serving
        if cloud is None or serving is None:
            return {}
        markets = {row.offering: row.market for row in cloud.offerings}
        on = {row.instance_id: markets.get(row.offering, "gone") for row in cloud.instances if row.state == "running"}
        places = [on[row.instance_id] for row in serving.replicas if row.state == "ready" and row.instance_id in on]
        return {market: places.count(market) for market in places}


def wait_for(true: Callable[[], bool], until_s: float, what: str) -> float:
    """When it came true. Fails at `until_s`."""
    while not true():
        assert time.time() < until_s, f"not in time: {what}"
        time.sleep(0.5)
    return time.time()


@pytest.mark.timeout(WALL_S)
def test_a_block_is_used_from_its_start_and_left_before_it_closes_and_nobody_notices() -> None:
    with tempfile.TemporaryDirectory(prefix="qm-block-") as name, running(Path(name)) as (cluster, start_at_s):
        seen = Seen(cluster)
        close_at_s = start_at_s + IN_USE_S
        wait_for(lambda: cluster.gateway_is_up() and seen.ready().get("on_demand", 0) > 0, time.time() + 240.0, "ready")
        users = Users(cluster.gateway_url, close_at_s + AFTER_S - 15.0 - time.time())
        users.start()
        warm_at_s = wait_for(lambda: seen.ready().get("block", 0) > 0, start_at_s + WARM_S, "a replica in the block")
        moved_at_s = wait_for(lambda: "on_demand" not in seen.ready(), close_at_s, "on-demand given back")
        replaced_at_s = wait_for(lambda: seen.ready().get("on_demand", 0) > 0, close_at_s, "replaced")
        wait_for(lambda: "block" not in seen.ready(), close_at_s + AFTER_S, "the block left")
        left_at_s = time.time()
        users.join(timeout=240.0)
        states = [row.state for row in users.load.outcomes]
        print(
            f"warm {warm_at_s - start_at_s:.0f} s after the start, alone {moved_at_s - start_at_s:.0f} s; replaced "
            f"{close_at_s - replaced_at_s:.0f} s before end − 40 min, left {close_at_s - left_at_s:.0f} s before it; "
            f"{len(states)} requests: {states.count('shed')} shed, {states.count('failed')} failed"
        )
        assert not users.is_alive()
        assert len(states) == len(users.load.sends)
        assert set(states) == {"ok"}
        assert not [record for record in read_all(cluster.setup.journal) if isinstance(record.event, CheckFailed)]
    assert processes.marked(Path(name).name) == []
