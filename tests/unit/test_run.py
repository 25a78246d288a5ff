"""`qm run` as a process sees it: cadence, signals, policy reloads, one line a tick, and what is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from autoscaler.adapters.journal import FileJournal, read_all
from autoscaler.adapters.local_supply import CloudConfig
from autoscaler.adapters.policy_folder import PolicyFolder, read_policy
from autoscaler.commands.outcome import OK, VIOLATED
from autoscaler.commands.run import RunOptions, World, run_command
from autoscaler.core.events import Configured, Event, LaunchGranted, Planned, PolicyRefused
from autoscaler.core.model import ServiceLoad
from autoscaler.ports import Broken, Misconfigured, Policy, Transient
from tests.fakes import FakeClock, FakeCloud, FakeMetrics, FakeServing
from tests.scene import offering
from tests.system.prometheus_server import free_port


@dataclass
class Stage:
    """A world of fakes on the real clock, and what is to happen at each tick."""

    policies: Path
    journal: Path
    script: dict[int, Callable[[], None]] = field(default_factory=dict)
    ticks: int = 0
    left: bool = False

    def connect(self, options: RunOptions) -> World:
        clock = FakeClock(at_s=time.time())
        config = CloudConfig(
            cluster="c", ray_address="a", offerings=(offering("a", instance_type="g6.12xlarge", gpus=4),)
        )
        cloud = FakeCloud(config, clock)
        stage = self

        class Metrics(FakeMetrics):
            def loads(self, now_s: float) -> tuple[ServiceLoad, ...]:
                clock.at_s = now_s
                stage.ticks += 1
                stage.script.get(stage.ticks, lambda: None)()
                return super().loads(now_s)

        shapes = read_policy(self.policies, "sim").shapes
        self.serving = FakeServing(cloud, clock, shapes)
        self.cloud = cloud
        return World(Metrics(), self.serving, cloud, self.leave)

    def leave(self) -> None:
        self.left = True

    def options(self, **changes: object) -> RunOptions:
        given = RunOptions(
            policies=self.policies,
            ray_address="-",
            dashboard_url="-",
            cloud="local",
            cloud_url="-",
            cloud_token_file=Path("-"),
            journal=self.journal,
            engine="sim",
            tick_s=0.05,
            metrics_port=None,
            once=False,
            advise=False,
            json_file=None,
        )
        return replace(given, **changes)  # type: ignore[arg-type]

    def run(self, **changes: object) -> int:
        return run_command(self.options(**changes), self.connect)

    def events(self) -> list[Event]:
        return [record.event for record in read_all(self.journal)]


@pytest.fixture
def stage(tmp_path: Path, root: Path) -> Stage:
    policies = tmp_path / "policies"
    shutil.copytree(root / "policies" / "local" / "sim", policies)
    return Stage(policies, tmp_path / "journal")


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_after_the_tick(stage: Stage, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stage.script[3] = send(number)
    assert stage.run() == OK
    assert stage.left
    assert [event.kind for event in stage.events()].count("planned") == 3
    assert signal.getsignal(number) == before
    FileJournal(stage.journal).close()  # its lock is free again


def test_one_tick_writes_one_line_and_the_plan(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage.run(once=True, json_file=str(tmp_path / "plan.json")) == OK
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert " tick took_ms=" in lines[0]
    assert " launches=1 " in lines[0]
    assert json.loads((tmp_path / "plan.json").read_text())["launches"]
    assert stage.serving.published


def test_advice_is_said_and_nothing_is_done(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run(once=True, advise=True) == OK
    said = capsys.readouterr().out
    assert "launch 1 at a for support/chat (cheapest a: usd_per_h" in said
    assert not stage.serving.published
    assert not stage.cloud.launches


def test_the_cadence_is_fixed_and_a_slow_tick_is_not_made_up_for(stage: Stage) -> None:
    stage.script[2] = lambda: time.sleep(0.35)
    stage.script[6] = send(signal.SIGTERM)
    stage.run(tick_s=0.1)
    at_s = [event.at_s for event in stage.events() if isinstance(event, Planned)]
    gaps = [after - before for before, after in pairwise(at_s)]
    assert gaps[1] >= 0.35
    assert all(gap > 0.05 for gap in (gaps[0], *gaps[2:]))


def test_a_hangup_has_a_broken_policy_refused_and_a_mended_one_taken(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stage.policies / "support.yaml"
    good = file.read_text()
    stage.script[2] = lambda: (file.write_text(good.replace("priority: 900", "priority: high")), send(signal.SIGHUP)())[
        1
    ]
    stage.script[4] = lambda: (file.write_text(good.replace("priority: 900", "priority: 901")), send(signal.SIGHUP)())[
        1
    ]
    stage.script[6] = send(signal.SIGTERM)
    assert stage.run() == OK
    refused = [event for event in stage.events() if isinstance(event, PolicyRefused)]
    assert len(refused) == 1
    assert f"{file}:" in refused[0].problems[0]
    assert f"the one before stays in force: problem={file}:" in capsys.readouterr().err
    priorities = [e.policy.services()[0][2].priority for e in stage.events() if isinstance(e, Configured)]
    assert priorities == [900, 901]
    assert [event.kind for event in stage.events()].count("planned") == 6


def test_metrics_are_exported_and_show_a_refused_policy(stage: Stage) -> None:
    port, seen = free_port(), list[str]()
    file = stage.policies / "support.yaml"
    stage.script[2] = lambda: (file.write_text("unit: 7"), send(signal.SIGHUP)())[1]
    stage.script[4] = lambda: seen.append(httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text)
    stage.script[5] = send(signal.SIGTERM)
    stage.run(metrics_port=port)
    assert "qm_policy_refused 1.0" in seen[0]
    assert "qm_policy_refusals_total 1.0" in seen[0]
    assert 'qm_launches_total{offering="a",outcome="granted"}' in seen[0]
    assert 'qm_blind{port="cloud"} 0.0' in seen[0]
    assert "qm_tick_seconds_count 3.0" in seen[0]


def test_a_port_that_fails_for_a_tick_does_not_end_it(stage: Stage) -> None:
    stage.script[2] = lambda: stage.cloud.failures.append(Transient("gone"))
    stage.script[4] = send(signal.SIGTERM)
    assert stage.run() == OK
    assert [event.kind for event in stage.events()].count("planned") == 4


def test_a_disk_that_is_full_for_a_tick_is_said_and_waited_for(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, full = os.fsync, [False]

    def maybe(fd: int) -> None:
        if full[0]:
            full[0] = False
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", maybe)
    stage.script[2] = lambda: full.__setitem__(0, True)
    stage.script[4] = send(signal.SIGTERM)
    assert stage.run() == OK
    assert "tick failed error=journal_unwritable: " in capsys.readouterr().err
    assert [event.kind for event in stage.events()].count("planned") == 3


def test_a_plan_that_breaks_an_invariant_shows_in_the_log_and_the_exit_code(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoscaler import loop

    monkeypatch.setattr(loop, "check", lambda *_, **__: ("sky is falling",))
    assert stage.run(once=True) == VIOLATED
    said = capsys.readouterr().err
    assert "plan not acted on, the one before stays in force: plan=" in said
    assert "why=sky is falling" in said


def test_a_defect_in_carrying_out_a_plan_fails_the_tick_and_the_next_begins_from_the_journal(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> None:
        del stage.serving.publish
        raise ValueError("boom")

    stage.script[2] = lambda: setattr(stage.serving, "publish", broken)
    stage.script[4] = send(signal.SIGTERM)
    assert stage.run() == VIOLATED
    assert "tick failed error=defect: ValueError: boom at " in capsys.readouterr().err
    kinds = [event.kind for event in stage.events()]
    assert (kinds.count("opened"), kinds.count("planned")) == (2, 4)
    tokens = [event.token for event in stage.events() if isinstance(event, LaunchGranted)]
    assert len(tokens) == 1


def test_a_second_controller_on_the_same_journal_is_bad_input_and_leaves_the_cluster(stage: Stage) -> None:
    first = FileJournal(stage.journal)
    with pytest.raises(Misconfigured, match="another controller"):
        stage.run(once=True)
    assert stage.left
    first.close()


def test_a_torn_tail_is_said_when_it_is_cut(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.run(once=True)
    with (stage.journal / "00000001.jsonl").open("ab") as tail:
        tail.write(b"0123")
    capsys.readouterr()
    stage.run(once=True)
    assert "journal repaired=" in capsys.readouterr().err


# ---- the policy folder ----------------------------------------------------------------------------------------------
def folder_of(stage: Stage) -> PolicyFolder:
    return PolicyFolder(stage.policies, lambda folder: read_policy(folder, "sim"))


def test_the_folder_is_looked_at_every_ten_seconds_and_answers_changes_only(stage: Stage) -> None:
    folder = folder_of(stage)
    assert isinstance(folder.poll(100.0), Policy)
    file = stage.policies / "support.yaml"
    file.write_text(file.read_text().replace("priority: 900", "priority: 901"))
    assert folder.poll(109.9) is None
    changed = folder.poll(110.0)
    assert isinstance(changed, Policy)
    assert changed.policy.services()[0][2].priority == 901
    assert folder.poll(120.0) is None


def test_a_mended_folder_is_answered_again_even_if_nothing_differs_from_before(stage: Stage) -> None:
    folder = folder_of(stage)
    first = folder.poll(0.0)
    file = stage.policies / "support.yaml"
    good = file.read_text()
    file.write_text("unit: [")
    assert isinstance(folder.poll(10.0), Broken)
    assert folder.poll(20.0) is None
    file.write_text(good)
    assert folder.poll(30.0) == first


def test_a_catalogue_override_counts_as_a_change(stage: Stage) -> None:
    folder = folder_of(stage)
    first = folder.poll(0.0)
    override = next((stage.policies / "catalogue").glob("*.yaml"))
    override.write_text(override.read_text() + "# a word\n")
    again = folder.poll(10.0)
    assert isinstance(first, Policy)
    assert isinstance(again, Policy)
    assert again.digest == first.digest
    shutil.rmtree(stage.policies / "catalogue")
    without = folder.poll(20.0)
    assert isinstance(without, Policy)
    assert without.policy == first.policy
    assert without.digest != first.digest


def test_a_folder_that_is_gone_is_broken_and_is_tried_again(stage: Stage) -> None:
    folder = folder_of(stage)
    folder.poll(0.0)
    away = stage.policies.rename(stage.policies.with_name("away"))
    assert isinstance(folder.poll(10.0), Broken)
    away.rename(stage.policies)
    assert isinstance(folder.poll(20.0), Policy)


def test_a_folder_that_is_rewritten_all_the_time_is_read_whole_or_not_at_all(stage: Stage) -> None:
    """Whatever instant a poll meets: a policy that somebody wrote, or a refusal; never half of one."""
    folder, file = folder_of(stage), stage.policies / "support.yaml"
    good = file.read_text()
    versions = [good.replace("priority: 900", f"priority: {number}") for number in range(901, 911)]
    ended = threading.Event()

    def rewrite() -> None:
        while not ended.is_set():
            for text in (*versions, "unit: ["):
                file.write_text(text)  # truncates first, as a careless editor does
                ended.wait(0.002)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        found = [folder.poll(10.0 * number) for number in range(20)]
    finally:
        ended.set()
        writer.join()
    taken = {each.policy.services()[0][2].priority for each in found if isinstance(each, Policy)}
    assert taken <= set(range(900, 911))
    file.write_text(good)
    last = folder.poll(10_000.0)
    assert isinstance(last, Policy)
    assert last.policy.services()[0][2].priority == 900
