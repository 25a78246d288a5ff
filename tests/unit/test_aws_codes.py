"""Every AWS code means one port error; what is not known is the safe class."""

from __future__ import annotations

import pytest

from autoscaler.adapters.aws_codes import ERROR_CLASSES, port_error
from autoscaler.ports import Misconfigured, NoCapacity, NotFound, PortError, Quota, Refused, Throttled, Transient


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("InsufficientInstanceCapacity", 500, NoCapacity),
        ("UnfulfillableCapacity", 400, NoCapacity),
        ("ReservationCapacityExceeded", 400, NoCapacity),
        ("VcpuLimitExceeded", 400, Quota),
        ("MaxSpotInstanceCountExceeded", 400, Quota),
        ("Unsupported", 400, Refused),
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
    ambiguous = {code for code, kind in ERROR_CLASSES.items() if kind is Transient}
    assert ambiguous == {"InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable"}
