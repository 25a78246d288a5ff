"""The test EC2 at its edges: who may call, what is bounded, its process, and how each trouble reaches the adapter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import ClientError

from autoscaler.ports import Misconfigured, PortError, Refused, Transient
from chaos.ec2_server.http import MAX_BODY_BYTES, HttpServer
from chaos.ec2_server.state import EXPIRES, Pool
from tests.ec2_rig import BIG, EAST, SWITCH, A, B, Ec2Rig, Wire, client, door, ec2, region

WIRES = pytest.mark.parametrize("wire", ["inproc", "socket"])
MARKER = f"987653.{os.getpid()}"  # the instances' harmless command, found again in the process table
TOKEN = "a-token-for-the-weather"
SECRET = "the-secret-of-the-test"


# ---- troubles -------------------------------------------------------------------------------------------------------
def expire(rig: Ec2Rig) -> None:
    rig.server.account.keys["test"].expires_at_s = rig.clock.now_s()


def lose_region(rig: Ec2Rig) -> None:
    rig.server.account.regions["eu-nowhere-1"] = rig.server.account.regions.pop(EAST)


def fail(kind: str, times: int = 9, **more: Any) -> Callable[[Ec2Rig], None]:
    return lambda rig: rig.fault(kind, "RunInstances", times, **more)


TROUBLES: tuple[tuple[str, Callable[[Ec2Rig], object], type[PortError], str], ...] = (
    ("expired credentials", expire, Misconfigured, "RequestExpired"),
    ("no permission", lambda rig: rig.region.denied.add("RunInstances"), Misconfigured, "UnauthorizedOperation"),
    ("wrong region", lose_region, Misconfigured, "AuthFailure"),
    (
        "subnet full",
        lambda rig: rig.region.subnets.update({"subnet-a": (A, 0)}),
        Refused,
        "InsufficientFreeAddressesInSubnet",
    ),
    ("image gone", lambda rig: rig.region.images.clear(), Misconfigured, "InvalidAMIID.NotFound"),
    (
        "template deleted",
        lambda rig: rig.region.templates.clear(),
        Misconfigured,
        "InvalidLaunchTemplateName.NotFoundException",
    ),
    ("unknown code", fail("error", code="SomethingNew", status=400), Refused, "SomethingNew"),
    ("page of a proxy", fail("html"), Transient, "502"),
    ("hanging endpoint", fail("hang", 2), Transient, "ReadTimeoutError"),
)


@WIRES
@pytest.mark.parametrize(("name", "spoil", "error", "code"), TROUBLES, ids=[row[0] for row in TROUBLES])
def test_each_trouble_is_the_port_error_it_means(
    wire: Wire, name: str, spoil: Callable[[Ec2Rig], object], error: type[PortError], code: str
) -> None:
    with ec2(wire=wire) as rig:
        spoil(rig)
        if name == "hanging endpoint":  # done, and found by its token
            assert len(rig.cloud.launch("od-a", 1, "t")) == 1
            return
        with pytest.raises(error) as told:
            rig.cloud.launch("od-a", 1, "t")
        assert told.value.code == code


@WIRES
def test_a_listing_comes_in_pages_whose_tokens_are_checked(wire: Wire) -> None:
    with ec2(region(pools={Pool(BIG, B): 9}), wire=wire) as rig:
        rig.cloud.launch("od-b", 9, "t")
        caller = client("ec2", EAST, wire)
        pages = list(caller.get_paginator("describe_instances").paginate(PaginationConfig={"PageSize": 4}))
        assert [len(page["Reservations"]) for page in pages] == [4, 4, 1]
        for wrong in ({"NextToken": "x"}, {"MaxResults": 2000}, {"InstanceIds": ["i-1"], "MaxResults": 5}):
            with pytest.raises(ClientError, match=r"InvalidNextToken|InvalidParameter|InvalidInstanceID"):
                caller.describe_instances(**wrong)


@WIRES
def test_notices_stay_in_the_queue_until_they_are_deleted(wire: Wire) -> None:
    with ec2(wire=wire) as rig:
        (instance_id,) = rig.cloud.launch("spot-a", 1, "t")
        rig.clock.advance(30.0)
        rig.region.interrupt(instance_id, rig.clock.now_s())
        queue = client("sqs", EAST, wire)
        url = queue.get_queue_url(QueueName="qm-events")["QueueUrl"]

        def received() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = queue.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get(
                "Messages", []
            )
            return found

        first = received()
        kinds = [json.loads(row["Body"])["detail-type"] for row in first]
        assert "EC2 Spot Instance Interruption Warning" in kinds
        assert received() == []
        rig.clock.advance(31.0)
        again = received()
        assert len(again) == len(first)
        rows = [{"Id": str(at), "ReceiptHandle": row["ReceiptHandle"]} for at, row in enumerate(again)]
        assert len(queue.delete_message_batch(QueueUrl=url, Entries=rows)["Successful"]) == len(rows)
        rig.clock.advance(31.0)
        assert received() == []
        with pytest.raises(ClientError, match="NonExistentQueue"):
            queue.receive_message(QueueUrl=url + "-other")


@WIRES
def test_limits_and_identity_are_told(wire: Wire) -> None:
    with ec2(region(quotas={("P", "on-demand"): 384}), wire=wire):
        quotas = client("service-quotas", EAST, wire)
        assert quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-417A185B")["Quota"]["Value"] == 384.0
        assert len(quotas.list_service_quotas(ServiceCode="ec2")["Quotas"]) == 4
        with pytest.raises(ClientError, match="NoSuchResource"):
            quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-0")
        assert client("sts", EAST, wire).get_caller_identity()["Account"] == "000000000001"


@WIRES
@pytest.mark.parametrize("denied", [False, True])
def test_a_dry_run_tells_the_permission_and_does_nothing(wire: Wire, denied: bool) -> None:
    actions = ("RunInstances", "TerminateInstances", "PurchaseCapacityBlock")
    with ec2(region(denied=set(actions) if denied else set()), wire=wire) as rig:
        caller = client("ec2", EAST, wire)
        launch = {"LaunchTemplate": {"LaunchTemplateName": "nodes"}, "InstanceType": BIG, "SubnetId": "subnet-a"}
        calls: tuple[Callable[[], object], ...] = (
            lambda: caller.run_instances(MinCount=1, MaxCount=1, DryRun=True, **launch),
            lambda: caller.terminate_instances(InstanceIds=["i-1"], DryRun=True),
            lambda: caller.purchase_capacity_block(
                CapacityBlockOfferingId="cb-1", InstancePlatform="Linux/UNIX", DryRun=True
            ),
        )
        for call in calls:
            with pytest.raises(ClientError, match="UnauthorizedOperation" if denied else "DryRunOperation"):
                call()
        assert not rig.region.instances


# ---- the socket -----------------------------------------------------------------------------------------------------
@pytest.fixture
def opened() -> Iterator[Ec2Rig]:
    with ec2(wire="socket") as rig:
        yield rig


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ClientError) as told:
        call()
    return str(told.value.response["Error"]["Code"])


def test_nobody_calls_without_the_secret(opened: Ec2Rig) -> None:
    assert httpx.post(door().url, content="Action=DescribeInstances").status_code == 403
    assert refusal(client("ec2", EAST, "socket", secret="wrong").describe_instances) == "SignatureDoesNotMatch"
    opened.server.account.keys.clear()
    assert refusal(client("ec2", EAST, "socket").describe_instances) == "AuthFailure"


def test_a_clock_that_is_off_is_refused(opened: Ec2Rig) -> None:
    opened.server.account.skew_s = 300.0
    assert refusal(client("ec2", EAST, "socket").describe_instances) == "RequestExpired"
    opened.clock.at_s = time.time()
    client("ec2", EAST, "socket").describe_instances()


def test_a_body_has_a_length_and_a_limit(opened: Ec2Rig) -> None:
    assert httpx.post(door().url, content=b"x" * (MAX_BODY_BYTES + 1)).status_code == 413
    assert httpx.post(door().url, content=iter([b"x"])).status_code == 411  # chunked
    assert not opened.server.requests


@pytest.mark.parametrize("body", ["Action=RunInstances&MinCount=many", "Action=\xff", "Filter.x.Name=1", ""])
def test_what_can_not_be_read_is_refused_in_ec2s_words(body: str) -> None:
    with ec2(wire="inproc") as rig:
        caller = client("ec2", EAST, "inproc")
        change = lambda params, **_: params.update(body=body)  # noqa: E731
        caller.meta.events.register("before-call.ec2", change)
        told = refusal(caller.describe_instances)
        caller.meta.events.unregister("before-call.ec2", change)
        assert told in ("MalformedQueryString", "InvalidAction", "MissingParameter")
        assert SWITCH.server is rig.server


def test_the_weathers_door_wants_its_token(opened: Ec2Rig) -> None:
    with HttpServer(opened.server, weather={"pool": lambda given: given}, secret=TOKEN) as server:
        assert server.url.startswith("http://127.0.0.1:")
        ask = httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"})
        assert httpx.post(f"{server.url}/weather/pool", json={}).status_code == 401
        assert ask.post("/weather/pool", json={"x": 1}).json() == {"x": 1}
        assert ask.post("/weather/hail", json={}).status_code == 404
        assert ask.post("/weather/pool", content=b"{").status_code == 400
        assert ask.get("/healthz").json() == {"ok": True}
        ask.close()
    with HttpServer(opened.server, weather={"pool": lambda given: given}) as server:  # no token: nobody may
        assert httpx.post(f"{server.url}/weather/pool", headers={"Authorization": "Bearer"}).status_code == 401


# ---- the process ----------------------------------------------------------------------------------------------------
def written(folder: Path, **changes: Any) -> Path:
    place = {"instance_type": BIG, "zone": A}
    now_s = time.time()
    block = {"reservation": "cr-1", "block": True, "count": 1, "start_at_s": now_s - 60.0, "end_at_s": now_s + 2390.0}
    one = {
        "name": EAST,
        "pools": [{**place, "count": 2, "boot_s": 0.2}],
        "subnets": [{"subnet": "subnet-a", "zone": A}],
        "templates": {"nodes": {"ImageId": "ami-1"}},
        "reservations": [block | place],
    }
    nodes = {"ray_address": "-", "gpus": {BIG: 4}, "boot_command": ["sleep", MARKER]}
    config = {"regions": [one], "keys": [{"key": "k", "secret": SECRET}], "nodes": nodes} | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "token").write_text(TOKEN)
    return folder


def command(folder: Path) -> list[str]:
    files = ["--config", str(folder / "config.json"), "--token-file", str(folder / "token")]
    return [sys.executable, "-m", "chaos.ec2_server", *files]


@contextmanager
def process(folder: Path) -> Iterator[str]:
    """A server in a process of its own; afterwards it has ended well and left no instance."""
    with subprocess.Popen(command(folder), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line
        try:
            yield line.split()[-1]
        finally:
            child.terminate()
            assert child.wait(20) == 0
    until(lambda: not nodes())


def nodes() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", MARKER]]


def until(true: Callable[[], bool], limit_s: float = 10.0) -> None:
    give_up_at_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < give_up_at_s, "did not come true in time"
        time.sleep(0.05)


def test_instances_are_processes_that_live_as_the_books_say(tmp_path: Path) -> None:
    with process(written(tmp_path)) as url:
        session = Session(aws_access_key_id="k", aws_secret_access_key=SECRET, region_name=EAST)
        config = Config(proxies={}, retries={"total_max_attempts": 1})
        caller, queue = (session.client(name, endpoint_url=url, config=config) for name in ("ec2", "sqs"))
        launch = {"LaunchTemplate": {"LaunchTemplateName": "nodes"}, "InstanceType": BIG, "SubnetId": "subnet-a"}
        rows = caller.run_instances(MinCount=1, MaxCount=2, **launch)["Instances"]
        ids = [row["InstanceId"] for row in rows]

        def states() -> list[str]:
            found = caller.describe_instances(InstanceIds=ids)["Reservations"]
            return [row["Instances"][0]["State"]["Name"] for row in found]

        until(lambda: states() == ["running", "running"] and len(nodes()) == 2)
        caller.terminate_instances(InstanceIds=ids[:1])
        until(lambda: states() == ["terminated", "running"] and len(nodes()) == 1)
        psutil.Process(nodes()[0]).kill()
        until(lambda: states() == ["terminated", "terminated"])
        (lost,) = caller.describe_instances(InstanceIds=ids[1:])["Reservations"]
        assert lost["Instances"][0]["StateReason"]["Code"] == "Server.InternalError"
        told = queue.receive_message(QueueUrl=f"{url}/1/qm-events", MaxNumberOfMessages=10, WaitTimeSeconds=5)
        kinds = [json.loads(row["Body"])["detail-type"] for row in told["Messages"]]
        assert EXPIRES in kinds
        began_s = time.monotonic()
        assert "Messages" not in queue.receive_message(QueueUrl=f"{url}/1/qm-events", WaitTimeSeconds=1)
        assert time.monotonic() - began_s >= 0.75
        caller.run_instances(MinCount=1, MaxCount=1, **launch)
        until(lambda: len(nodes()) == 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keys": []}, "keys: "),
        ({"clock": "virtual"}, "nodes are real, and so must their clock be"),
        ({"colour": 1}, "colour: "),
    ],
)
def test_a_wrong_config_is_named_and_nothing_starts(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    done = subprocess.run(
        command(written(tmp_path, **changes)), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{tmp_path / 'config.json'}: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_and_files_that_are_not_there(tmp_path: Path) -> None:
    written(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = [*command(tmp_path), "--port", str(taken.getsockname()[1])]
        done = subprocess.run(busy, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "a free port" in done.stderr
    (tmp_path / "token").unlink()
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "token: No such file" in done.stderr) == (2, True)
