"""Every AWS code means one port error; what is not known is the safe class."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.adapters.aws_codes import CLASSES, ERROR_CLASSES, known, port_error
from autoscaler.ports import Misconfigured, NoCapacity, NotFound, PortError, Quota, Refused, Throttled, Transient


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("InsufficientInstanceCapacity", 500, NoCapacity),
        ("UnfulfillableCapacity", 400, NoCapacity),
        ("ReservationCapacityExceeded", 400, NoCapacity),
        ("VcpuLimitExceeded", 400, Quota),
        ("MaxSpotInstanceCountExceeded", 400, Quota),
        ("Unsupported", 400, NotFound),
        ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403, Misconfigured),
        ("OperationNotPermitted", 400, Refused),
        ("InsufficientFreeAddressesInSubnet", 400, Refused),
        ("InvalidParameterValue", 400, Misconfigured),
        ("InvalidParameterCombination", 400, Misconfigured),
        ("InvalidAMIID.NotFound", 400, Misconfigured),
        ("InvalidSubnetID.NotFound", 400, Misconfigured),
        ("UnauthorizedOperation", 403, Misconfigured),
        ("RequestLimitExceeded", 503, Throttled),
        ("EC2ThrottledException", 400, Throttled),
        ("InternalError", 500, Transient),
        ("InvalidInstanceID.NotFound", 400, NotFound),
        ("InvalidCapacityReservationId.NotFound", 400, NotFound),
        ("SomethingNewIn2031", 400, Refused),
        ("SomethingNewIn2031", 500, Transient),
    ],
)
def test_a_code_becomes_its_port_error(code: str, status: int, kind: type[PortError]) -> None:
    error = port_error(code, "words", offering="od-a", status=status)
    assert type(error) is kind
    assert error.code == code
    assert str(error) == "words"


def test_a_dry_pool_is_named() -> None:
    error = port_error("SpotMaxPriceTooLow", "words", offering="spot-a")
    assert isinstance(error, NoCapacity)
    assert error.offering == "spot-a"


def test_only_definite_answers_are_definite() -> None:
    ambiguous = {code for code, row in ERROR_CLASSES.items() if row.error is Transient}
    assert ambiguous == {
        "InternalError", "InternalFailure", "InternalServiceError", "ServiceUnavailable", "Unavailable",
    }  # fmt: skip


def test_every_code_is_in_one_class_only_and_every_class_has_a_reaction() -> None:
    codes = [code for row in CLASSES for code in row.codes]
    assert sorted(codes) == sorted(set(codes))
    assert all(row.reaction for row in CLASSES)
    assert {row.name for row in CLASSES if any(row.holds(code) for code in codes)} <= {"config"}


def test_an_unknown_code_is_known_to_be_unknown() -> None:
    assert known("SomethingNewIn2031") is None
    assert (known("InvalidInstanceType.Odd") or CLASSES[0]).name == "config"


def test_the_document_has_the_table_as_it_is() -> None:
    rows = [f"| {row.name} | {row.error.__name__} | {row.reaction} |" for row in CLASSES]
    lines = (Path(__file__).parents[2] / "docs" / "ec2.md").read_text().splitlines()
    assert [line for line in lines if line in rows] == rows
