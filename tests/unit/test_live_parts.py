"""Parts of `qm up` that need no cluster: finding and ending a run's processes, following a journal, the shortage."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from autoscaler.adapters.journal import encode_line
from autoscaler.core.events import Event, LaunchRefused, Observed, Record
from autoscaler.core.model import CloudInstance, CloudView, Missing, Observation, Offering, Replica, ServingView
from chaos.facts import Facts
from chaos.live import processes
from chaos.live.script import Script, in_use, pick_victim
from chaos.live.status import Snapshot, Status, summary
from chaos.live.watch import Watch
from chaos.report import build, live_part
from policies.model import Market, PolicySet

POOLS: tuple[tuple[str, Market, float], ...] = (("od", "on_demand", 0.9), ("spot", "spot", 0.4))
OFFERINGS = tuple(
    Offering(
        offering=name, pool=name, instance_type="g6.2xlarge", zone="a", market=market, gpus=1, price_usd_per_h=price
    )
    for name, market, price in POOLS
)


def _instance(key: str, offering: str, launched_at_s: float, reclaim_at_s: float | None = None) -> CloudInstance:
    return CloudInstance(
        instance_id=key,
        offering=offering,
        token=key,
        state="running",
        launched_at_s=launched_at_s,
        reclaim_at_s=reclaim_at_s,
    )


def _cloud(*instances: CloudInstance) -> CloudView:
    return CloudView(at_s=1.0, offerings=OFFERINGS, instances=instances)


def _serving(*instances: str) -> ServingView:
    replicas = tuple(
        Replica(replica_id=key, service="a/s", variant="v", instance_id=key, state="ready", since_s=0.0)
        for key in instances
    )
    return ServingView(at_s=1.0, replicas=replicas, nodes=(), targets=())


# ---- processes ------------------------------------------------------------------------------------------------------
STUBBORN = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
FAMILY = STUBBORN + "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], env={}); time.sleep(60)"


def test_a_run_is_found_with_children_that_lost_the_mark_and_is_ended_though_it_resists() -> None:
    run_id = f"test{os.getpid()}"
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], env=os.environ | {processes.MARK: run_id})
    try:
        until_s = time.monotonic() + 10.0
        while len(processes.marked(run_id)) < 2 and time.monotonic() < until_s:
            time.sleep(0.02)
        found = processes.marked(run_id)
        assert len(found) == 2
        assert parent.pid in found
        assert processes.marked(run_id + "x") == []
        assert processes.pss_bytes(run_id) > 5_000_000
        assert processes.end(run_id, grace_s=0.3) == []
        assert parent.wait(5.0) == -signal.SIGKILL
    finally:
        parent.kill()
        parent.wait()


def test_ports_that_are_free_and_one_that_is_not() -> None:
    ports = processes.free_ports(3)
    assert len(set(ports)) == 3
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < low for port in ports), "the kernel may lend the others to anybody's connection"
    assert all(processes.port_is_free(port) for port in ports)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", ports[0]))
        busy.listen()
        assert not processes.port_is_free(ports[0])


# ---- watch ----------------------------------------------------------------------------------------------------------
def _line(seq: int, event: Event) -> bytes:
    return encode_line(Record(seq=seq, event=event))


def test_the_watch_follows_lines_as_they_are_written_and_into_the_next_segment(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.look()  # nothing there yet
    refused = LaunchRefused(at_s=1.0, intent="i", token="t", offering="od", error="no_capacity", code="ICE")
    whole = _line(1, refused)
    segment = tmp_path / "00000001.jsonl"
    segment.write_bytes(whole[:20])
    watch.look()
    assert watch.news == []
    segment.write_bytes(whole)
    watch.look()
    watch.look()
    assert watch.news == ["refused: od (ICE)"]
    seen = Observation(
        at_s=2.0, loads=Missing(why="x"), serving=_serving("i-1"), cloud=_cloud(_instance("i-1", "spot", 0.0))
    )
    (tmp_path / "00000002.jsonl").write_bytes(_line(2, Observed(at_s=2.0, observation=seen)))
    watch.look()
    assert watch.ready() == Counter({"a/s": 1})
    assert watch.instances() == Counter({"spot": 1})
    assert watch.facts.given_back() == 0


# ---- shortage -------------------------------------------------------------------------------------------------------
def test_the_victim_serves_has_no_notice_and_is_spot_where_possible() -> None:
    view = _cloud(_instance("i-1", "od", 1.0), _instance("i-2", "spot", 9.0), _instance("i-3", "spot", 2.0, 99.0))
    chosen = pick_victim(view, _serving("i-1", "i-2", "i-3"))
    assert chosen is not None
    assert chosen.instance_id == "i-2"
    only = pick_victim(view, _serving("i-1"))
    assert only is not None
    assert only.instance_id == "i-1"
    assert pick_victim(view, _serving("i-3")) is None
    assert pick_victim(view, None) is None


class _Cloud:
    """The weather's side of the local cloud, in memory."""

    def __init__(self) -> None:
        self.view = _cloud(_instance("i-1", "od", 1.0), _instance("i-2", "spot", 2.0))
        self.supply: list[tuple[str, int]] = []
        self.reclaimed: list[tuple[str, float | None]] = []

    def describe(self, now_s: float) -> CloudView:
        assert now_s > 0
        return self.view

    def set_supply(self, offering: str, count: int) -> None:
        self.supply.append((offering, count))

    def reclaim(self, instance_id: str, notice_s: float | None = None) -> float:
        self.reclaimed.append((instance_id, notice_s))
        return 0.0


def test_the_cheapest_pool_in_use_runs_dry_and_then_loses_an_instance_for_good() -> None:
    cloud, said = _Cloud(), list[str]()
    asyncio.run(Script(cloud, 0.4, lambda: _serving("i-1", "i-2"), said.append).run())
    assert cloud.supply == [("spot", 1), ("spot", 0)]
    assert cloud.reclaimed == [("i-2", 120.0)]
    assert [line.split(":")[0] for line in said] == ["shortage", "reclaim"]
    assert in_use(cloud.view) == Counter({"od": 1, "spot": 1})


# ---- status ---------------------------------------------------------------------------------------------------------
def _snapshot(done_s: float) -> Snapshot:
    return Snapshot(
        phase="load", done_s=done_s, whole_s=60.0, sent=9, answered=6, shed=1, failed=0, in_flight=2,
        ready=Counter({"a/chat": 2}), instances=Counter({"spot": 1}), pss_bytes=3 * 2**30,
    )  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_the_status_is_drawn_on_a_terminal_and_told_in_lines_elsewhere(terminal: bool) -> None:
    screen = io.StringIO()
    with Status(Console(file=screen, force_terminal=terminal, width=200)) as status:
        status.show(_snapshot(1.0))
        status.show(_snapshot(2.0))
        status.say("an event")
    text = screen.getvalue()
    assert "an event" in text
    assert "chat 2" in text
    if not terminal:
        assert (
            text.count("sent 9 answered 6 open 2 shed 1 failed 0  ready 2 (chat 2)  instances 1 (spot×1)  3.0 GiB") == 1
        )


def _summary(found: Facts, kept: str) -> str:
    report = build(
        scenario="s", controller="qm", seed=1, duration_s=1.0, wall_s=1.0, outcomes=[], policy=PolicySet(units=()),
        facts=found, violations=[], live=live_part("sim", found, 0, 0, 0),
    )  # fmt: skip
    screen = io.StringIO()
    summary(Console(file=screen, width=200), report, found, ["a note"], kept)
    return screen.getvalue()


def test_the_summary_says_what_is_left_over_or_what_is_kept_never_both() -> None:
    ended, kept = (_summary(Facts(), text) for text in ("", "2 instances and 9 processes, until qm down"))
    assert "left over: 0 instances, 0 processes" in ended
    assert "kept:" not in ended
    assert "kept: 2 instances and 9 processes, until qm down" in kept
    assert "left over" not in kept
    assert "a note" in ended
