"""What deploy/ holds: the stack refers to what is there and is closed to the world; its nodes start as it says."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.adapters.ec2 import notices
from autoscaler.adapters.ec2.doctor import _template_faults
from tests.cfn import nodes, template

PSEUDO = {"AWS::Region", "AWS::AccountId", "AWS::Partition", "AWS::NoValue"}
IDS = {"qm-instance-id": "i-0abc", "qm-instance-type": "p5.48xlarge", "qm-zone": "us-east-1a", "qm-market": "spot"}


@pytest.fixture(scope="module")
def stack(root: Path) -> dict[str, Any]:
    return template(root / "deploy" / "quartermaster.yaml")


def resource(stack: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = stack["Resources"][name]["Properties"]
    return found


# ---- the stack ------------------------------------------------------------------------------------------------------
def test_everything_that_is_referred_to_is_there_and_everything_there_is_used(stack: dict[str, Any]) -> None:
    known = {*stack["Parameters"], *stack["Resources"], *PSEUDO}
    used: set[str] = set()
    for node in nodes([stack["Resources"], stack["Outputs"], stack["Conditions"]]):
        used |= {node["Ref"]} if "Ref" in node else set()
        used |= {str(node["Fn::GetAtt"]).partition(".")[0]} if "Fn::GetAtt" in node else set()
        used |= set(re.findall(r"\$\{([A-Za-z:]+)[.}A-Za-z]*", node["Fn::Sub"])) if "Fn::Sub" in node else set()
    assert used - known == set()
    assert set(stack["Parameters"]) - used == set()
    conditions = {node["Fn::If"][0] for node in nodes(stack["Resources"]) if "Fn::If" in node}
    conditions |= {node["Condition"] for node in nodes(stack["Conditions"]) if "Condition" in node}
    assert conditions == set(stack["Conditions"])


def test_nothing_is_open_to_the_world_and_rays_ports_are_the_clusters_own(stack: dict[str, Any]) -> None:
    rules = [(name, row["Properties"]) for name, row in stack["Resources"].items() if row["Type"].endswith("Ingress")]
    for name, row in stack["Resources"].items():
        if row["Type"] == "AWS::EC2::SecurityGroup":
            rules += [(name, rule) for rule in row["Properties"].get("SecurityGroupIngress", ())]
    assert not [name for name, rule in rules if "CidrIp" in rule or "CidrIpv6" in rule]
    ours = ({"Ref": "NodeGroup"}, {"Ref": "HeadGroup"})
    strangers = [rule for _, rule in rules if rule["SourceSecurityGroupId"] not in ours]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in strangers] == [({"Ref": "GatewayPort"},) * 2]
    port = stack["Parameters"]["GatewayPort"]["Default"]
    assert port not in (6379, 8265)


def test_the_launch_template_is_what_the_doctor_wants_and_carries_the_bootstrap(
    stack: dict[str, Any], root: Path
) -> None:
    data = resource(stack, "NodeTemplate")["LaunchTemplateData"]
    assert list(_template_faults({key: value for key, value in data.items() if key != "UserData"}, "c")) == [
        "its user data does not make a node of the cluster c"
    ]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    header, weights, script = data["UserData"]["Fn::Base64"]["Fn::Join"][1]
    assert header["Fn::Sub"].startswith("#!/bin/bash\n")
    assert "QM_CLUSTER='${ClusterName}'\n" in header["Fn::Sub"]
    assert script == (root / "deploy" / "node" / "bootstrap.sh").read_text()
    set_here = set(re.findall(r"^(QM_\w+)=", header["Fn::Sub"], re.MULTILINE)) | {"QM_WEIGHTS_S3"}
    assert all(text.startswith("QM_WEIGHTS_S3='") for text in (weights["Fn::If"][1]["Fn::Sub"], weights["Fn::If"][2]))
    documented = re.search(r"^#   (QM_[A-Z_0-9 ]+)$", script, re.MULTILINE)
    assert documented is not None
    assert set_here == set(documented[1].split())


def test_user_data_fits_into_what_ec2_takes(root: Path) -> None:
    assert len((root / "deploy" / "node" / "bootstrap.sh").read_bytes()) < 14_000  # of 16,384


def test_every_event_that_is_understood_is_sent_to_the_queue_and_only_by_the_rule(stack: dict[str, Any]) -> None:
    kinds = set(resource(stack, "NoticesRule")["EventPattern"]["detail-type"])
    assert {notices.SPOT, *notices.RESERVED, notices.STATE, *notices.CALENDAR} <= kinds
    (statement,) = resource(stack, "NoticesPolicy")["PolicyDocument"]["Statement"]
    assert statement["Condition"] == {"ArnEquals": {"aws:SourceArn": [{"Fn::GetAtt": "NoticesRule.Arn"}]}}
    assert resource(stack, "Notices")["VisibilityTimeout"] > notices.WAIT_S + 60


def test_the_journals_bucket_is_private_encrypted_and_outlives_the_stack(stack: dict[str, Any]) -> None:
    assert set(resource(stack, "Journal")["PublicAccessBlockConfiguration"].values()) == {True}
    assert stack["Resources"]["Journal"]["DeletionPolicy"] == "Retain"


def test_the_reader_refuses_a_key_given_twice_and_a_tag_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    for text in ("a: 1\na: 2\n", "a: !Evil [x]\n"):
        path.write_text(text)
        with pytest.raises((AssertionError, yaml.YAMLError)):
            template(path)


# ---- the bootstrap, run ---------------------------------------------------------------------------------------------
STUBS = {
    "curl": """
case "${@: -1}" in
  */api/token) echo token-1 ;;
  *instance-id) echo i-0abc ;;
  *instance-type) echo p5.48xlarge ;;
  *availability-zone) echo us-east-1a ;;
  *instance-life-cycle) echo spot ;;
  *region) echo us-east-1 ;;
  *qm:offering) echo 'p5.48xlarge/us-east-1a/spot' ;;
  *qm:deadline-at-s) echo "$DEADLINE" ;;
  *) exit 22 ;;
esac""",
    "aws": """
echo "aws $*" >> "$CALLS"
case "$*" in
  *get-secret-value*|*get-parameter*) echo the-token ;;
  *"s3 sync"*) [ "$S3" = yes ] ;;
esac""",
    "lsblk": "printf '%s' \"$DISKS\"",
    "mount": 'echo "mount $*" >> "$CALLS"; case "$*" in *lustre*) [ "$FSX" = yes ] ;; esac',
    "docker": 'echo "docker $*" >> "$CALLS"; [ "$1 $2" != "image inspect" ]',
}
RECORDED = ("systemctl", "mdadm", "mkfs.xfs", "shutdown")


class Node:
    """A root file system in a folder, and commands that write down how they were called."""

    def __init__(self, folder: Path, script: Path) -> None:
        self.folder, self.script = folder, script
        (folder / "bin").mkdir()
        for name in RECORDED:
            self._stub(name, f'echo "{name} $*" >> "$CALLS"')
        for name, body in STUBS.items():
            self._stub(name, body)
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "QM_ROOT": str(folder),
            "QM_CLUSTER": "prod", "QM_RAY_ADDRESS": "10.0.0.5:6379", "QM_TOKEN_SOURCE": "", "QM_IMAGE": "",
            "QM_WEIGHTS_FSX": "", "QM_WEIGHTS_S3": "", "QM_SILENCE_S": "1800", "DEADLINE": "9999999999", "DISKS": "",
            "S3": "yes", "FSX": "yes",
        }  # fmt: skip

    def _stub(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def run(self, **changes: str) -> subprocess.CompletedProcess[str]:
        return self.command("bash", str(self.script), **changes)

    def command(self, *command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        env = self.environment | changes
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=30)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def unit(self, name: str) -> str:
        return (self.folder / "etc/systemd/system" / name).read_text()

    def deadman(self, *, silent_s: float = 0.0) -> list[str]:
        beat = self.folder / "run/quartermaster/heartbeat"
        os.utime(beat, (time.time() - silent_s,) * 2)
        before = len(self.calls)
        self.command(str(self.folder / "opt/quartermaster/bin/deadman"))
        return self.calls[before:]


@pytest.fixture
def node(tmp_path: Path, root: Path) -> Node:
    return Node(tmp_path, root / "deploy" / "node" / "bootstrap.sh")


def test_a_node_joins_with_its_labels_and_knows_its_instance(node: Node) -> None:
    done = node.run()
    assert done.returncode == 0, done.stderr
    raylet = node.unit("qm-raylet.service")
    labels = dict(pair.split("=") for pair in re.findall(r"--labels=(\S+)", raylet)[0].split(","))
    assert labels == IDS | {"qm-offering": "p5.48xlarge_us-east-1a_spot"}
    assert "/venv/bin/ray start --address=10.0.0.5:6379 " in raylet
    env = (node.folder / "run/quartermaster/env").read_text()
    assert "RAY_CLOUD_INSTANCE_ID=i-0abc\n" in env
    assert "RAY_AUTH_MODE" not in env
    assert "--instance-id i-0abc --imds --gpus --heartbeat" in node.unit("qm-agent.service")
    assert node.calls[-1] == "systemctl start qm-raylet.service qm-agent.service"


def test_the_deadman_is_set_before_anything_that_can_fail(node: Node) -> None:
    done = node.run(QM_TOKEN_SOURCE="/qm/token", PATH=f"{node.folder / 'bin'}:/usr/bin:/bin")
    timer = node.calls.index("systemctl enable --now qm-deadman.timer")
    assert timer < next(at for at, call in enumerate(node.calls) if call.startswith("aws ssm"))
    assert done.returncode == 0


def test_the_deadman_ends_a_node_that_hears_nothing_or_has_outlived_its_deadline(node: Node) -> None:
    node.run()
    assert node.deadman() == []
    assert node.deadman(silent_s=1700) == []
    assert node.deadman(silent_s=1900) == ["shutdown -h now"]
    node.run(DEADLINE="1000")
    assert node.deadman() == ["shutdown -h now"]


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("arn:aws:secretsmanager:us-east-1:1:secret:ray", "aws secretsmanager get-secret-value --secret-id arn:aws:"),
        ("/qm/ray-token", "aws ssm get-parameter --with-decryption --name /qm/ray-token"),
    ],
)
def test_the_token_comes_from_where_it_is_kept_and_is_never_shown(node: Node, source: str, call: str) -> None:
    done = node.run(QM_TOKEN_SOURCE=source)
    path = node.folder / "run/quartermaster/ray-token"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("the-token", 0o600)
    assert any(each.startswith(call) for each in node.calls)
    assert "RAY_AUTH_MODE=token\n" in (node.folder / "run/quartermaster/env").read_text()
    assert "the-token" not in done.stdout + done.stderr + node.unit("qm-raylet.service")


def test_weights_come_from_the_first_source_that_works(node: Node) -> None:
    both = {"QM_WEIGHTS_FSX": "fs-1.fsx@tcp:/x", "QM_WEIGHTS_S3": "s3://b/weights"}
    assert "weights: FSx\n" in node.run(**both).stdout
    said = node.run(**both, FSX="no").stdout
    assert "FSx does not mount" in said
    assert "weights: S3\n" in said
    assert "engines fetch their own" in node.run(**both, FSX="no", S3="no").stdout
    (node.folder / "opt/quartermaster/baked-weights").mkdir()
    assert "weights: in the image\n" in node.run(**both).stdout


def test_an_instance_store_of_several_disks_becomes_one_and_takes_the_weights(node: Node) -> None:
    disks = "/dev/nvme1n1 Amazon EC2 NVMe Instance Storage\n/dev/nvme2n1 Amazon EC2 NVMe Instance Storage\n"
    node.run(DISKS=disks, QM_WEIGHTS_S3="s3://b/w")
    assert any("--raid-devices=2 /dev/nvme1n1 /dev/nvme2n1" in call for call in node.calls)
    assert any(
        call.endswith("s3://b/w " + str(node.folder / "opt/quartermaster/scratch/weights")) for call in node.calls
    )


def test_a_container_image_is_pulled_once_and_runs_the_node(node: Node) -> None:
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/qm:1"
    node.run(QM_IMAGE=image)
    assert any(call == f"docker pull -q {image}" for call in node.calls)
    assert re.search(rf"ExecStart=/usr/bin/docker run .* {image} ray start ", node.unit("qm-raylet.service"))


def test_a_node_that_cannot_find_out_who_it_is_says_so_on_the_console(node: Node) -> None:
    node._stub("curl", "exit 7")
    done = node.run()
    assert (done.returncode, done.stdout.strip()) == (1, "qm-node: no answer from the metadata service")


def test_the_image_recipe_says_what_it_needs_before_it_begins(root: Path, tmp_path: Path) -> None:
    recipe = str(root / "deploy" / "ami" / "build.sh")
    assert subprocess.run(["bash", "-n", recipe], check=False).returncode == 0
    none = subprocess.run(["bash", recipe, str(tmp_path / "no.whl")], capture_output=True, text=True, check=False)
    assert none.returncode == 2
    assert "run as root" in none.stderr or "is not there; build it with" in none.stderr
