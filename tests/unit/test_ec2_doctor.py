"""`qm doctor` and the start of `qm run --cloud ec2`: every bad input is one clear finding, and nothing is changed."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autoscaler.adapters.ec2.config import OfferConfig
from autoscaler.adapters.ec2.doctor import Doctor, Finding
from autoscaler.adapters.ec2.remedies import told
from autoscaler.ports import PortError
from chaos.ec2_server.state import Pool, Region, Reservation
from tests.ec2_rig import BIG, EAST, HUGE, WEST, A, B, Ec2Rig, client, clients, ec2, offer, region

SCRIPT = base64.b64encode(b"#!/bin/bash\nQM_CLUSTER='test'\n").decode()
DATA: dict[str, Any] = {
    "ImageId": "ami-1",
    "UserData": SCRIPT,
    "IamInstanceProfile": {"Arn": "arn:aws:iam::1:instance-profile/n"},
    "InstanceInitiatedShutdownBehavior": "terminate",
    "CapacityReservationSpecification": {"CapacityReservationPreference": "none"},
    "MetadataOptions": {"InstanceMetadataTags": "enabled"},
}
OFFERS = (
    offer("od-a", vcpus=48),
    offer("od-b", B, vcpus=48),
    offer("odcr", market="odcr", reservation="cr-1", vcpus=48),
    offer("gang", instance_type=HUGE, zone=B, placement_group="pg", vcpus=192),
)


def sound(**changes: Any) -> Region:
    rows: dict[str, Any] = {
        "templates": {"qm-node": DATA},
        "pools": {Pool(BIG, A): 3, Pool(BIG, B): 9, Pool(HUGE, B): 1},
        "reservations": {"cr-1": Reservation("cr-1", BIG, A, 2, 0.0, 0.0, match="targeted")},
        "groups": {"pg": "cluster"},
        "quotas": {("G", "on-demand"): 480, ("P", "on-demand"): 192},
    }
    return region(**(rows | changes))


@cache
def with_quotas(name: str) -> Any:
    return replace(clients(name), quotas=client("service-quotas", name))


@contextmanager
def examined(
    east: Region | None = None, offers: tuple[OfferConfig, ...] = OFFERS, **changes: Any
) -> Iterator[tuple[Ec2Rig, Doctor]]:
    config: dict[str, Any] = {"launch_template": "qm-node"} | changes
    with ec2(east or sound(), region(WEST), offers=offers, **config) as rig:
        doctor = Doctor(rig.cloud._config, rig.clock.now_s, with_quotas)
        yield rig, doctor
        doctor.close()


def look(east: Region | None = None, **changes: Any) -> list[Finding]:
    with examined(east, **changes) as (_, doctor):
        return list(doctor.examine())


def bad(found: list[Finding]) -> list[tuple[str, str]]:
    assert all(each.remedy for each in found if each.level == "bad")
    return [(each.check, each.subject) for each in found if each.level == "bad"]


def test_where_all_is_well_nothing_is_broken_and_nothing_was_changed() -> None:
    with examined() as (rig, doctor):
        (instance_id,) = rig.cloud.launch("od-a", 1, "t")
        before = dict(rig.region.instances)
        found = list(doctor.examine())
        assert bad(found) == []
        assert rig.region.instances == before
        assert rig.region.instances[instance_id].reason == ("", "")
        said = {(each.check, each.subject): each.text for each in found}
    assert said["quota", f"{BIG} on_demand"] == "480 vCPU: room for 9 more of ours"
    assert said["reservation", "cr-1"] == "active: 2 of 2 instances free"
    assert said["subnet", "subnet-a"] == "us-east-1a: 199 free addresses"
    assert said["instance type", BIG] == "offered in us-east-1a, us-east-1b"
    assert {key[1] for key in said if key[0] == "permission"} == {
        "ec2:RunInstances", "ec2:CreateFleet", "ec2:TerminateInstances",
    }  # fmt: skip
    assert said["sweep", WEST] == "0 instances of the cluster"


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"denied": {"RunInstances"}}, [("permission", "ec2:RunInstances")]),
        ({"denied": {"CreateFleet"}}, [("permission", "ec2:CreateFleet")]),
        ({"denied": {"DescribeCapacityReservations"}}, [("reservation", EAST)]),
        ({"denied": {"DescribeImages"}}, [("image", "ami-1")]),
        ({"images": set()}, [("image", "ami-1"), ("permission", "ec2:RunInstances")]),
        ({"subnets": {"subnet-a": (A, 0), "subnet-b": (B, 200)}}, [("subnet", "subnet-a")]),
        ({"subnets": {"subnet-a": (A, 9)}}, [("subnet", "subnet-b")]),
        ({"subnets": {"subnet-a": (A, 99), "subnet-b": (A, 99)}}, [("subnet", "subnet-b")]),
        ({"quotas": {("G", "on-demand"): 0, ("P", "on-demand"): 192}}, [("quota", f"{BIG} on_demand")]),
        ({"reservations": {}}, [("reservation", "cr-1")]),
        ({"reservations": {"cr-1": Reservation("cr-1", HUGE, A, 2, 0.0, 0.0)}}, [("reservation", "cr-1")]),
        ({"groups": {}}, [("placement group", "pg")]),
        ({"pools": {Pool(BIG, A): 3, Pool(BIG, B): 1}}, [("instance type", HUGE)]),
    ],
)  # fmt: skip
def test_what_is_broken_is_found_and_only_that(change: dict[str, Any], broken: list[tuple[str, str]]) -> None:
    assert bad(look(sound(**change))) == broken


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("CapacityReservationSpecification", {}, "CapacityReservationPreference is not none"),
        ("InstanceInitiatedShutdownBehavior", "stop", "InstanceInitiatedShutdownBehavior is not terminate"),
        ("MetadataOptions", {}, "InstanceMetadataTags is not enabled"),
        ("IamInstanceProfile", {}, "IamInstanceProfile is missing"),
        ("UserData", base64.b64encode(b"QM_CLUSTER='other'").decode(), "does not make a node of the cluster test"),
    ],
)
def test_a_launch_template_that_would_not_do_is_told_by_its_key(key: str, value: Any, words: str) -> None:
    found = look(sound(templates={"qm-node": DATA | {key: value}}))
    assert [each.text for each in found if each.level == "bad"] == [
        next(each.text for each in found if words in each.text)
    ]


def test_a_template_that_is_gone_is_one_finding_a_check() -> None:
    found = look(sound(templates={}))
    assert ("launch template", "qm-node") in bad(found)
    assert {each.remedy for each in found if each.check == "launch template"} == {
        "correct `launch_template`, or deploy the stack of deploy/ in this region"
    }


def test_without_a_queue_of_notices_that_is_noted_and_with_one_it_is_left_alone() -> None:
    assert [each.level for each in look() if each.check == "notices"] == ["note"]
    with examined(notices_queue="https://sqs/q") as (rig, doctor):
        assert [each.level for each in doctor.examine() if each.check == "notices"] == ["ok"]
        assert not any(name == "ReceiveMessage" for _, name in rig.region.log)


# ---- bad input: one clear error each, from doctor and from the start of `qm run` ------------------------------------
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("error", {"code": "ExpiredToken", "status": 403}, "ExpiredToken", "renew the credentials"),
    ("error", {"code": "RequestExpired", "status": 400}, "RequestExpired", "set the machine's clock"),
    ("error", {"code": "UnauthorizedOperation", "status": 403}, "UnauthorizedOperation", "deploy/README.md lists"),
    ("error", {"code": "AuthFailure", "status": 401}, "AuthFailure", "correct `region`"),
    ("error", {"code": "OptInRequired", "status": 403}, "OptInRequired", "enable the region"),
    ("error", {"code": "GpusSoldOut", "status": 400}, "GpusSoldOut", "look the code up"),
    ("html", {}, "502", "check the route, the proxy"),
    ("page", {}, "ResponseParserError", "something else than AWS answered"),
    ("error", {"code": "403", "status": 403}, "403", "check the route, the proxy"),
    ("hang", {}, "ReadTimeoutError", "check the route, the proxy"),
    ("lost_before", {}, "ConnectionClosedError", "check the route, the proxy"),
    ("garbled", {}, "ResponseParserError", "something else than AWS answered"),
]


@pytest.mark.parametrize(("kind", "more", "code", "remedy"), BAD)
def test_an_answer_that_is_none_is_one_finding(kind: Any, more: dict[str, Any], code: str, remedy: str) -> None:
    with examined() as (rig, doctor):
        rig.fault(kind, "*", 30, **more)
        (found,) = doctor.examine()
    assert (found.check, found.level) == ("access", "bad")
    assert code in found.text
    assert remedy in found.remedy


@pytest.mark.parametrize(("kind", "more", "code", "remedy"), BAD)
def test_a_run_that_cannot_begin_says_why_and_what_to_do(
    kind: Any, more: dict[str, Any], code: str, remedy: str
) -> None:
    with examined() as (rig, _):
        rig.fault(kind, "*", 30, **more)
        with pytest.raises(PortError) as wrong:
            rig.cloud.describe(rig.clock.now_s())
    words = told("policies/cloud/ec2.yaml", wrong.value)
    assert words.startswith("policies/cloud/ec2.yaml: ")
    assert code in words
    assert remedy in words


@pytest.mark.parametrize(
    ("change", "code", "remedy"),
    [
        ({"images": set()}, "InvalidAMIID.NotFound", "build the image again"),
        ({"templates": {}}, "InvalidLaunchTemplateName.NotFoundException", "deploy the stack"),
        ({"subnets": {"subnet-a": (A, 0), "subnet-b": (B, 0)}}, "InsufficientFreeAddressesInSubnet", "a larger subnet"),
        ({"denied": {"RunInstances"}}, "UnauthorizedOperation", "deploy/README.md lists"),
        ({"spot_role": False}, "AuthFailure.ServiceLinkedRoleCreationNotPermitted", "create-service-linked-role"),
    ],
)
def test_a_launch_that_cannot_be_has_a_code_with_a_remedy(change: dict[str, Any], code: str, remedy: str) -> None:
    spot = offer("spot-a", A, "spot")
    pools = {Pool(BIG, A): 1, Pool(BIG, A, "spot"): 1}
    offers = (spot,) if "spot_role" in change else OFFERS[:1]
    with examined(sound(pools=pools, **change), offers=offers) as (rig, _), pytest.raises(PortError) as wrong:
        rig.cloud.launch(offers[0].offering, 1, "t")
    assert wrong.value.code == code
    assert remedy in told("x", wrong.value)
