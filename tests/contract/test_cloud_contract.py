"""What every Cloud must do, run on the books in memory and on the local cloud's process over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from autoscaler.adapters.local import LocalCloud
from autoscaler.adapters.local_supply import CloudConfig
from autoscaler.core.model import CloudInstance
from autoscaler.ports import Cloud, Misconfigured, NoCapacity, NotFound, Quota, Throttled, Transient
from tests.fakes import FakeClock, FakeCloud

SECRET = "a-token-for-the-test"
MARKER = f"987654.{os.getpid()}"  # the instances' harmless command, found again in the process table


def config(**changes: object) -> CloudConfig:
    def offering(name: str, pool: str, count: int, market: str, notice_s: float = 0.6) -> dict[str, object]:
        place = {"instance_type": "g6e.12xlarge", "zone": "us-east-1a", "region": "us-east-1", "market": market}
        times = {"boot_s": 0.2, "notice_s": notice_s}
        return {"offering": name, "pool": pool, "gpus": 4, "price_usd_per_h": 10.5, "count": count} | place | times

    raw: dict[str, object] = {
        "cluster": "test",
        "ray_address": "127.0.0.1:1",
        "offerings": [
            offering("od-a", "a", 3, "on_demand"),
            offering("od-b", "b", 9, "on_demand"),
            offering("spot-a", "s", 2, "spot"),
        ],
        "quotas": [{"family": "g", "market": "on_demand", "gpus": 24}],
        "boot_command": ["sleep", MARKER],
    }
    return CloudConfig.model_validate_json(json.dumps(raw | changes))


@dataclass
class Rig:
    cloud: Cloud
    set_supply: Callable[[str, int], None]
    reclaim: Callable[[str, float | None], object]
    now_s: Callable[[], float]
    wait: Callable[[float], None]

    def instance(self, instance_id: str) -> CloudInstance:
        listed = {row.instance_id: row for row in self.cloud.describe(self.now_s()).instances}
        return listed[instance_id]

    def until(self, done: Callable[[], bool], limit_s: float = 8.0) -> None:
        waited_s = 0.0
        while not done():
            assert waited_s < limit_s, "did not come true in time"
            self.wait(0.05)
            waited_s += 0.05


@dataclass
class Local:
    process: subprocess.Popen[str]
    url: str
    cloud: LocalCloud


def server_command(folder: Path, settings: str, port: int = 0) -> list[str]:
    (folder / "cloud.json").write_text(settings)
    (folder / "token").write_text(SECRET + "\n")
    files = ["--config", str(folder / "cloud.json"), "--token-file", str(folder / "token")]
    return [sys.executable, "-m", "autoscaler.adapters.local_server", *files, "--port", str(port)]


@contextlib.contextmanager
def serving(folder: Path, settings: CloudConfig, *, exit_code: int = 0) -> Iterator[Local]:
    """A server that answers; afterwards it has stopped with `exit_code` and left no process."""
    command = server_command(folder, settings.model_dump_json())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line
        with contextlib.closing(LocalCloud(line.split()[-1], SECRET)) as cloud:
            yield Local(process, line.split()[-1], cloud)
        process.terminate()
        assert process.wait(20) == exit_code
    poll(lambda: not harmless_commands())


def poll(done: Callable[[], bool], limit_s: float = 10.0) -> None:
    give_up_at_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < give_up_at_s, "did not come true in time"
        time.sleep(0.05)


def harmless_commands() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", MARKER]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Local]:
    with serving(tmp_path, config()) as local:
        yield local


@pytest.fixture(params=["memory", "process"])
def rig(request: pytest.FixtureRequest) -> Rig:
    if request.param == "memory":
        clock = FakeClock()
        fake = FakeCloud(config(), clock)
        return Rig(fake, fake.set_supply, fake.reclaim, clock.now_s, lambda by_s: void(clock.advance(by_s)))
    cloud = request.getfixturevalue("server").cloud
    return Rig(cloud, cloud.set_supply, cloud.reclaim, time.time, time.sleep)


def void(_: object) -> None: ...


def test_offerings_are_described_with_what_a_decision_needs(rig: Rig) -> None:
    now_s = rig.now_s()
    view = rig.cloud.describe(now_s)
    assert view.at_s == now_s
    assert [row.offering for row in view.offerings] == ["od-a", "od-b", "spot-a"]
    spot = view.offerings[2]
    assert (spot.pool, spot.instance_type, spot.zone, spot.region, spot.market) == (
        "s", "g6e.12xlarge", "us-east-1a", "us-east-1", "spot",
    )  # fmt: skip
    assert (spot.gpus, spot.price_usd_per_h) == (4, 10.5)
    assert view.instances == ()


def test_a_launch_goes_from_pending_to_running_and_keeps_its_token(rig: Rig) -> None:
    before_s = rig.now_s()
    (instance_id,) = rig.cloud.launch("od-a", 1, "run/1/1")
    instance = rig.instance(instance_id)
    assert (instance.state, instance.token, instance.offering) == ("pending", "run/1/1", "od-a")
    assert before_s <= instance.launched_at_s <= rig.now_s()
    rig.until(lambda: rig.instance(instance_id).state == "running")


def test_the_same_token_in_the_same_offering_never_launches_twice(rig: Rig) -> None:
    first = rig.cloud.launch("od-a", 2, "run/1/1")
    assert rig.cloud.launch("od-a", 2, "run/1/1") == first
    assert len(rig.cloud.describe(rig.now_s()).instances) == 2
    assert set(rig.cloud.launch("od-b", 1, "run/1/1")).isdisjoint(first)


def test_a_pool_gives_what_it_has_and_then_refuses_by_name(rig: Rig) -> None:
    assert len(rig.cloud.launch("od-a", 5, "t1")) == 3
    with pytest.raises(NoCapacity) as dry:
        rig.cloud.launch("od-a", 1, "t2")
    assert (dry.value.offering, dry.value.code) == ("od-a", "InsufficientInstanceCapacity")
    assert len(rig.cloud.describe(rig.now_s()).instances) == 3


def test_a_quota_is_of_the_account_not_of_the_pool(rig: Rig) -> None:
    assert len(rig.cloud.launch("od-a", 3, "t1")) + len(rig.cloud.launch("od-b", 9, "t2")) == 6
    with pytest.raises(Quota) as full:
        rig.cloud.launch("od-b", 1, "t3")
    assert full.value.code == "VcpuLimitExceeded"
    assert len(rig.cloud.launch("spot-a", 1, "t4")) == 1


@pytest.mark.parametrize(("offering", "count"), [("no-such", 1), ("od-a", 0)])
def test_a_wrong_request_is_misconfigured(rig: Rig, offering: str, count: int) -> None:
    with pytest.raises(Misconfigured) as wrong:
        rig.cloud.launch(offering, count, "t1")
    assert wrong.value.code == "InvalidParameterValue"


def test_a_terminated_instance_ends_and_frees_its_pool(rig: Rig) -> None:
    instance_ids = rig.cloud.launch("od-a", 3, "t1")
    rig.until(lambda: rig.instance(instance_ids[0]).state == "running")
    rig.cloud.terminate(instance_ids[0])
    rig.cloud.terminate(instance_ids[0])
    rig.until(lambda: rig.instance(instance_ids[0]).state == "terminated")
    assert rig.instance(instance_ids[0]).state_reason.startswith("Client.UserInitiatedShutdown")
    assert rig.instance(instance_ids[1]).state in ("pending", "running")
    assert len(rig.cloud.launch("od-a", 3, "t2")) == 1


def test_an_instance_still_pending_can_be_given_back(rig: Rig) -> None:
    (instance_id,) = rig.cloud.launch("od-a", 1, "t1")
    rig.cloud.terminate(instance_id)
    rig.until(lambda: rig.instance(instance_id).state == "terminated")


def test_giving_back_an_unknown_instance_is_not_found(rig: Rig) -> None:
    with pytest.raises(NotFound):
        rig.cloud.terminate("i-unknown")


def test_a_reclaim_gives_notice_and_strikes_at_its_deadline(rig: Rig) -> None:
    (instance_id,) = rig.cloud.launch("spot-a", 1, "t1")
    rig.until(lambda: rig.instance(instance_id).state == "running")
    before_s = rig.now_s()
    rig.reclaim(instance_id, None)
    deadline_at_s = rig.instance(instance_id).reclaim_at_s
    assert deadline_at_s is not None
    assert before_s + 0.6 <= deadline_at_s <= rig.now_s() + 0.6
    rig.until(lambda: rig.instance(instance_id).state == "terminated")
    assert rig.now_s() >= deadline_at_s
    assert rig.instance(instance_id).state_reason.startswith("Server.SpotInstanceTermination")


def test_a_smaller_supply_refuses_launches_but_stops_nothing(rig: Rig) -> None:
    instance_ids = rig.cloud.launch("od-b", 2, "t1")
    rig.set_supply("od-b", 1)
    with pytest.raises(NoCapacity):
        rig.cloud.launch("od-b", 1, "t2")
    rig.until(lambda: all(rig.instance(i).state == "running" for i in instance_ids))
    rig.set_supply("od-b", 3)
    assert len(rig.cloud.launch("od-b", 2, "t3")) == 1


# ---- the process and its HTTP edge ----------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["launch", "terminate", "supply", "reclaim"])
def test_nothing_changes_without_the_token(server: Local, path: str) -> None:
    assert httpx.post(f"{server.url}/{path}", json={}).status_code == 401
    with contextlib.closing(LocalCloud(server.url, "the-wrong-token-000")) as stranger:
        with pytest.raises(Misconfigured) as refused:
            stranger.launch("od-a", 1, "t1")
        assert refused.value.code == "AuthFailure"
    assert server.cloud.describe(0.0).instances == ()


def test_nothing_is_listed_without_the_token(server: Local) -> None:
    assert httpx.get(f"{server.url}/describe").status_code == 401
    stranger = LocalCloud(server.url, "the-wrong-token-000")
    with contextlib.closing(stranger), pytest.raises(Misconfigured, match="wrong or missing bearer token"):
        stranger.describe(0.0)


def test_a_body_of_the_wrong_shape_is_named(server: Local) -> None:
    wrong = httpx.post(f"{server.url}/launch", json={"offering": 1}, headers={"Authorization": f"Bearer {SECRET}"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "InvalidParameterValue")
    assert wrong.json()["message"].startswith("offering: ")
    assert httpx.get(f"{server.url}/healthz").json() == {"ok": True}


def test_nobody_there_is_transient() -> None:
    with contextlib.closing(LocalCloud("http://127.0.0.1:9", SECRET, timeout_s=0.5)) as cloud, pytest.raises(Transient):
        cloud.describe(0.0)


def test_a_slow_answer_is_transient_and_the_token_settles_it(tmp_path: Path) -> None:
    with serving(tmp_path, config(launch_s=1.0)) as local:
        with contextlib.closing(LocalCloud(local.url, SECRET, timeout_s=0.3)) as hasty, pytest.raises(Transient):
            hasty.launch("od-a", 2, "t1")
        listed = {row.instance_id for row in local.cloud.describe(0.0).instances if row.token == "t1"}
        assert len(listed) == 2
        assert set(local.cloud.launch("od-a", 2, "t1")) == listed


def test_too_many_calls_are_throttled_and_launch_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, config(calls_burst=1, calls_per_s=0.01)) as local:
        local.cloud.launch("od-a", 1, "t1")
        with pytest.raises(Throttled):
            local.cloud.launch("od-a", 1, "t2")
        assert len(local.cloud.describe(0.0).instances) == 1


def running(cloud: LocalCloud, count: int) -> None:
    poll(lambda: sum(row.state == "running" for row in cloud.describe(0.0).instances) == count)


def test_an_instance_whose_process_dies_is_terminated_with_the_reason(tmp_path: Path) -> None:
    with serving(tmp_path, config(boot_command=["sh", "-c", "echo no such model >&2; exit 3"])) as local:
        local.cloud.launch("od-a", 1, "t1")
        poll(lambda: local.cloud.describe(0.0).instances[0].state == "terminated")
        reason = local.cloud.describe(0.0).instances[0].state_reason
        assert reason == "Server.InternalError: the node ended with 3: no such model"


def test_an_instances_daemons_live_and_die_with_it(tmp_path: Path) -> None:
    # As `ray start` does: the command ends at once and leaves a daemon, here in a session of its own.
    with serving(tmp_path, config(boot_command=["sh", "-c", f"setsid sleep {MARKER} & exit 0"])) as local:
        kept, given_back = local.cloud.launch("od-a", 2, "t1")
        poll(lambda: len(harmless_commands()) == 2)
        local.cloud.terminate(given_back)
        poll(lambda: len(harmless_commands()) == 1)
        states = {row.instance_id: row.state for row in local.cloud.describe(0.0).instances}
        assert states[kept] == "running"
        psutil.Process(harmless_commands()[0]).kill()
        poll(lambda: all(row.state == "terminated" for row in local.cloud.describe(0.0).instances))


def test_an_instances_first_process_killed_takes_the_rest_along(server: Local) -> None:
    server.cloud.launch("od-a", 1, "t1")
    poll(lambda: len(harmless_commands()) == 1)
    psutil.Process(harmless_commands()[0]).parents()[0].kill()
    poll(lambda: server.cloud.describe(0.0).instances[0].state == "terminated")
    assert not harmless_commands()


def test_a_killed_server_takes_its_instances_along(tmp_path: Path) -> None:
    with serving(tmp_path, config(), exit_code=-9) as local:
        local.cloud.launch("od-a", 2, "t1")
        poll(lambda: len(harmless_commands()) == 2)
        local.process.kill()
        poll(lambda: not harmless_commands())


def test_a_server_whose_parent_dies_stops(tmp_path: Path) -> None:
    command = server_command(tmp_path, config().model_dump_json())
    parent = (
        "import subprocess, time\n"
        f"child = subprocess.Popen({command!r}, stdout=subprocess.PIPE, text=True)\n"
        "print(child.stdout.readline().split()[-1], child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        url, pid = starter.stdout.readline().split()
        with contextlib.closing(LocalCloud(url, SECRET)) as cloud:
            cloud.launch("od-a", 1, "t1")
            running(cloud, 1)
        orphan = psutil.Process(int(pid))
        starter.kill()
    poll(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)
    assert not harmless_commands()


def test_a_bad_config_names_every_problem_and_exits_2(tmp_path: Path) -> None:
    raw = json.loads(config().model_dump_json())
    raw["offerings"][0] |= {"count": -1, "colour": "red"}
    wrong = subprocess.run(server_command(tmp_path, json.dumps(raw)), capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert f"{tmp_path / 'cloud.json'}: offerings.0.count:" in wrong.stderr
    assert "offerings.0.colour: Extra inputs are not permitted" in wrong.stderr


def test_a_busy_port_and_an_absent_file_exit_2(tmp_path: Path, server: Local) -> None:
    port = int(server.url.rpartition(":")[2])
    command = server_command(tmp_path, config().model_dump_json(), port)
    busy = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (busy.returncode, busy.stderr.startswith(f"--port {port}: ")) == (2, True)
    (tmp_path / "token").unlink()
    absent = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (absent.returncode, absent.stderr.startswith(f"{tmp_path / 'token'}: ")) == (2, True)
