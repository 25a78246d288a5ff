"""The controller's policy is the least: every call that the code makes is driven here and allowed there, no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autoscaler.adapters.ec2 import Ec2Cloud
from autoscaler.adapters.ec2.doctor import Doctor
from autoscaler.adapters.ec2.notices import Queue
from autoscaler.adapters.ec2.purchase import Purchases, for_sale
from autoscaler.adapters.s3_journal import S3Journal, read_all
from autoscaler.adapters.s3_lease import Lease
from autoscaler.ports import PortError
from chaos.ec2_server.state import BlockOffering
from tests.cfn import nodes, template
from tests.contract.test_journal_contract import head, note
from tests.ec2_rig import BIG, EAST, A, Ec2Rig, client, clients, ec2
from tests.s3_fake import FakeS3
from tests.unit.test_ec2_doctor import OFFERS, sound

# What IAM calls an operation, where that is not the operation's own name.
ACTIONS = {
    "SQS:DeleteMessageBatch": "sqs:DeleteMessage",
    "S3:ListObjectsV2": "s3:ListBucket",
    "S3:DeleteObjects": "s3:DeleteObject",
    "Service Quotas:ListServiceQuotas": "servicequotas:ListServiceQuotas",
}
IMPLIED = {"ec2:CreateTags", "iam:PassRole"}  # what a launch with tags, of a template with a role, needs besides
LAUNCHES = ("ec2:RunInstances", "ec2:CreateFleet")
CREATES = ["RunInstances", "CreateFleet", "PurchaseCapacityBlock"]
CLUSTER = {"Ref": "ClusterName"}


@dataclass
class Calls:
    """What was asked for, in IAM's words, with the parameters of each."""

    seen: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    operations: set[str] = field(default_factory=set)

    def note(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        """botocore's hook."""
        name = f"{model.service_model.service_id}:{model.name}"
        action = ACTIONS.get(name, name.replace("EC2:", "ec2:").replace("SQS:", "sqs:").replace("S3:", "s3:"))
        self.seen.setdefault(action, []).append(params)
        self.operations.add(model.name)


@contextmanager
def watched(*boto: Any) -> Iterator[Calls]:
    calls = Calls()
    for each in boto:
        each.meta.events.register("before-parameter-build", calls.note)
    try:
        yield calls
    finally:
        for each in boto:
            each.meta.events.unregister("before-parameter-build", calls.note)


def use_everything(rig: Ec2Rig, cloud: Ec2Cloud, doctor: Doctor, queue: Queue, folder: Path) -> None:
    """Each thing that the controller and the doctor ever do."""
    now_s = rig.clock.now_s
    for name in ("od-a", "odcr"):
        cloud.launch(name, 1, f"t-{name}")
    cloud.launch_any(("od-a", "od-b"), 1, "t-any")
    rig.fault("lost_before", "RunInstances", 2)
    with suppress(PortError):
        cloud.launch("od-b", 1, "t-lost")
    (instance_id, *_) = (row.instance_id for row in cloud.describe(now_s()).instances)
    cloud.last_words(instance_id)
    cloud.terminate(instance_id)
    queue.poll()
    queue.take()
    queue.take()
    queue.poll()
    doctor.examine()
    caller = cloud._callers[EAST]
    (block,) = for_sale(caller, BIG, 1, 24)
    Purchases(caller, folder, now_s).buy("spring", block)


def keep_a_journal(store: Any, now_s: Any) -> None:
    journal = S3Journal(store, Lease(store, now_s, "a"), segment_bytes=300, keep=1)
    list(journal.read())
    for number in range(9):
        journal.append(note(number), durable=True)
        journal.roll(lambda: head(1.0))
    assert list(read_all(store))
    journal.close()


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """Everything that is ever called."""
    day_s = 86_400.0
    block = BlockOffering("cb-0", BIG, A, 1, 1_000_000.0 + day_s, 1_000_000.0 + 2 * day_s, 100.0)
    with ec2(sound(blocks={"cb-0": block}), offers=OFFERS, launch_template="qm-node") as rig:
        region = rig.region
        limits, sqs, store = client("service-quotas", EAST), client("sqs", EAST), FakeS3(rig.clock.now_s).store()
        made = replace(clients(EAST), quotas=limits)
        cloud = Ec2Cloud(rig.cloud._config, rig.clock.now_s, clients=lambda _: made)
        doctor = Doctor(rig.cloud._config, rig.clock.now_s, lambda _: made)
        queue = Queue(sqs, f"https://sqs.{EAST}.amazonaws.com/1/{region.queue}")
        region.notices.append({"detail-type": "x", "detail": {}})
        with watched(made.read, made.write, limits, sqs, store.read, store.write) as seen:
            use_everything(rig, cloud, doctor, queue, tmp_path_factory.mktemp("purchases"))
            keep_a_journal(store, rig.clock.now_s)
        cloud.close()
        doctor.close()
    return seen


@pytest.fixture(scope="module")
def statements(root: Path) -> list[dict[str, Any]]:
    """The policy's statements, conditional ones included."""
    policy = template(root / "deploy" / "quartermaster.yaml")["Resources"]["ControllerPolicy"]["Properties"]
    return [node for node in nodes(policy["PolicyDocument"]["Statement"]) if "Sid" in node]


def actions(statement: dict[str, Any]) -> list[str]:
    found = statement["Action"]
    return [found] if isinstance(found, str) else list(found)


def test_the_policy_allows_every_call_and_no_other(calls: Calls, statements: list[dict[str, Any]]) -> None:
    allowed = {action for statement in statements for action in actions(statement)}
    assert not [action for action in allowed if "*" in action]
    assert set(calls.seen) | IMPLIED == allowed


def test_no_call_that_the_code_can_make_was_left_out(calls: Calls, root: Path) -> None:
    """Operations are named as text, so the text of the adapters says which there are."""
    named: set[str] = set()
    for path in [*(root / "autoscaler/adapters/ec2").glob("*.py"), *(root / "autoscaler/adapters").glob("s3_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                named |= {text for text in texts if isinstance(text, str)}
                named |= {node.func.attr} if isinstance(node.func, ast.Attribute) else set()
    from botocore import xform_name

    services = [
        client("ec2", EAST),
        client("sqs", EAST),
        client("service-quotas", EAST),
        FakeS3(lambda: 0.0).store().read,
    ]
    possible = {xform_name(name): name for each in services for name in each.meta.service_model.operation_names}
    assert {possible[name] for name in named if name in possible} == calls.operations


def test_what_is_launched_must_carry_the_clusters_tag_and_does(calls: Calls, statements: list[dict[str, Any]]) -> None:
    ours, with_ = (next(each for each in statements if each["Sid"] == sid) for sid in ("LaunchOurs", "LaunchWith"))
    assert ours["Condition"] == {"StringEquals": {"aws:RequestTag/qm:cluster": CLUSTER}}
    kinds = [each["Fn::Sub"].rpartition(":")[2].partition("/")[0] for each in ours["Resource"]]
    for action in LAUNCHES:
        for params in calls.seen[action]:
            tagged = {
                row["ResourceType"]: {tag["Key"]: tag["Value"] for tag in row["Tags"]}
                for row in params["TagSpecifications"]
            }
            assert set(tagged) <= set(kinds)
            assert all(tags["qm:cluster"] == "test" for tags in tagged.values())
    assert {
        kind
        for params in calls.seen["ec2:CreateFleet"]
        for row in params["TagSpecifications"]
        for kind in [row["ResourceType"]]
    } == set(kinds)
    assert any("launch-template/${NodeTemplate}" in each["Fn::Sub"] for each in with_["Resource"])


@pytest.mark.parametrize(
    ("action", "condition"),
    [
        ("ec2:TerminateInstances", {"StringEquals": {"aws:ResourceTag/qm:cluster": CLUSTER}}),
        ("ec2:GetConsoleOutput", {"StringEquals": {"aws:ResourceTag/qm:cluster": CLUSTER}}),
        ("iam:PassRole", {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}),
        ("ec2:CreateTags", {"StringEquals": {"ec2:CreateAction": CREATES}}),
        ("s3:ListBucket", {"StringLike": {"s3:prefix": {"Fn::Sub": "${ClusterName}/*"}}}),
    ],
)  # fmt: skip
def test_what_can_be_limited_is(action: str, condition: dict[str, Any], statements: list[dict[str, Any]]) -> None:
    (statement,) = [each for each in statements if action in actions(each)]
    assert statement["Condition"] == condition


def test_only_what_aws_cannot_limit_is_allowed_everywhere(statements: list[dict[str, Any]]) -> None:
    everywhere = {action for each in statements if each["Resource"] == "*" for action in actions(each)}
    looks = {each for each in everywhere if each.startswith("ec2:Describe") or ":List" in each}
    assert everywhere - looks == {"ec2:PurchaseCapacityBlock"}
