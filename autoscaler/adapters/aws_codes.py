"""AWS error codes, each with the one port error it means and the one right reaction to it.

Tables; may not do I/O or import an AWS package. A code is looked at before the HTTP status, because EC2 answers
InsufficientInstanceCapacity with status 500. The reactions are carried out by `core.learn` (what cools, and for how
long), `act` (whether the next offering is asked) and `adapters.ec2` (what else is shut); docs/ec2.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoscaler.ports import Misconfigured, NoCapacity, NotFound, PortError, Quota, Refused, Throttled, Transient


@dataclass(frozen=True, slots=True)
class ErrorClass:
    """Codes that want the same reaction. `prefixes` and `suffixes` catch whole families of codes."""

    name: str
    error: type[PortError]
    reaction: str
    codes: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()

    def holds(self, code: str) -> bool:
        """Whether `code` belongs to one of the families."""
        return code.startswith(self.prefixes) or code.endswith(self.suffixes)


CLASSES: tuple[ErrorClass, ...] = (
    ErrorClass(
        "pool_dry",
        NoCapacity,
        "cool type, zone and market; next offering at once",
        (
            "InsufficientInstanceCapacity",
            "UnfulfillableCapacity",
            "SpotMaxPriceTooLow",
            "InsufficientHostCapacity",
            "InsufficientReservedInstanceCapacity",
            "InsufficientCapacityOnOutpost",
            "InsufficientCapacity",
            "InsufficientVolumeCapacity",
        ),
    ),
    ErrorClass(
        "reservation_full",
        NoCapacity,
        "that reservation has none until it is described again; on-demand is not cooled",
        ("ReservationCapacityExceeded",),
    ),
    ErrorClass(
        "reservation_gone",
        NotFound,
        "drop the offering",
        ("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.NotFoundException"),
    ),
    ErrorClass(
        "quota",
        Quota,
        "cool family, market and region for 30 minutes",
        (
            "VcpuLimitExceeded",
            "MaxSpotInstanceCountExceeded",
            "InstanceLimitExceeded",
            "MaxFleetCountExceeded",
            "MaxSpotFleetRequestCountExceeded",
            "VolumeLimitExceeded",
            "MaxIOPSLimitExceeded",
            "NetworkInterfaceLimitExceeded",
        ),
    ),
    ErrorClass(
        "structural",
        NotFound,
        "this type is not to be had there: block the offering for 24 hours",
        ("Unsupported", "UnsupportedOperation", "UnsupportedHostConfiguration"),
    ),
    ErrorClass(
        "subnet_full",
        Refused,
        "shut the subnet only; says nothing about capacity",
        ("InsufficientFreeAddressesInSubnet",),
    ),
    ErrorClass(
        "gone",
        NotFound,
        "just after a launch the listing lags; later the instance is gone",
        ("InvalidInstanceID.NotFound",),
    ),
    ErrorClass(
        "spot_not_permitted",
        Misconfigured,
        "stop, tell the operator, shut the spot market",
        ("AuthFailure.ServiceLinkedRoleCreationNotPermitted",),
    ),
    ErrorClass(
        "auth",
        Misconfigured,
        "stop and tell the operator",
        (
            "UnauthorizedOperation",
            "AccessDenied",
            "AccessDeniedException",
            "AuthFailure",
            "ExpiredToken",
            "ExpiredTokenException",
            "RequestExpired",
            "InvalidClientTokenId",
            "UnrecognizedClientException",
            "SignatureDoesNotMatch",
            "MissingAuthenticationToken",
            "OptInRequired",
            "Blocked",
            "PendingVerification",
        ),
    ),
    ErrorClass(
        "throttle",
        Throttled,
        "slow down for the whole account and region; says nothing about capacity",
        (
            "RequestLimitExceeded",
            "EC2ThrottledException",
            "ThrottlingException",
            "Throttling",
            "RequestThrottled",
            "RequestThrottledException",
            "SlowDown",
        ),
    ),
    ErrorClass(
        "ambiguous",
        Transient,
        "same token in the same place again, then list by token, then move on",
        ("InternalError", "InternalFailure", "InternalServiceError", "ServiceUnavailable", "Unavailable"),
    ),
    ErrorClass(
        "protected",
        Refused,
        "keep it and say so; repeat when the state's time is over",
        ("OperationNotPermitted", "IncorrectInstanceState"),
    ),
    ErrorClass(
        "config",
        Misconfigured,
        "the request is wrong everywhere: never ask the next offering",
        (
            "IdempotentParameterMismatch",
            "MissingParameter",
            "MissingAction",
            "UnknownParameter",
            "UnknownAction",
            "InvalidAction",
            "InvalidRequest",
            "ValidationError",
        ),
        prefixes=(
            "InvalidParameter",
            "InvalidAMIID.",
            "InvalidSubnet",
            "InvalidLaunchTemplate",
            "InvalidGroup",
            "InvalidSecurityGroup",
            "InvalidKeyPair",
            "InvalidPlacementGroup",
            "InvalidSnapshot",
            "InvalidBlockDeviceMapping",
            "InvalidNetworkInterface",
            "InvalidUserData",
            "InvalidTag",
            "InvalidIAM",
            "InvalidVpc",
            "InvalidAvailabilityZone",
            "InvalidInstanceType",
            "InvalidZone",
        ),
        suffixes=(".Malformed",),
    ),
)
ERROR_CLASSES: dict[str, ErrorClass] = {code: row for row in CLASSES for code in row.codes}

# `StateReason.Code` of an instance that ended before it served, and what that is evidence of.
DIED_DRY = "Server.InsufficientInstanceCapacity"  # granted, and then there was none after all: the pool is dry
DIED_RECLAIMED = ("Server.SpotInstanceTermination", "Server.SpotInstanceShutdown")  # of the market, not of the spec
DIED_BROKEN = (  # of the spec: a breaker after three, and nothing is said about capacity
    "Server.InternalError",
    "Client.InternalError",
    "Client.InvalidSnapshot.NotFound",
    "Client.VolumeLimitExceeded",
    "Client.InvalidKMSKey.InvalidState",
)


def known(code: str) -> ErrorClass | None:
    """The class of a code; None for one that no table holds, which the caller counts."""
    return ERROR_CLASSES.get(code) or next((row for row in CLASSES if row.holds(code)), None)


def error_class(code: str, status: int = 400) -> type[PortError]:
    """The port error of an AWS `code` received with HTTP `status`. Unknown codes: Transient for 5xx, else Refused."""
    row = known(code)
    if row is not None:
        return row.error
    return Transient if status >= 500 else Refused


def port_error(code: str, message: str, *, offering: str = "", status: int = 400) -> PortError:
    """The exception to raise for an AWS `code`; `offering` is the place the call was about."""
    kind = error_class(code, status)
    return NoCapacity(offering, message, code) if kind is NoCapacity else kind(message, code)
