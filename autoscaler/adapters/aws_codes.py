"""AWS error codes, each with the one port error it means. A table; may not do I/O or import an AWS package.

A code is looked at before the HTTP status, because EC2 answers InsufficientInstanceCapacity with status 500.
"""

from __future__ import annotations

from autoscaler.ports import Misconfigured, NoCapacity, NotFound, PortError, Quota, Refused, Throttled, Transient

ERROR_CLASSES: dict[str, type[PortError]] = {
    # The pool is dry: cool it, next offering at once. A full placement group answers with the first of these codes.
    "InsufficientInstanceCapacity": NoCapacity,
    "UnfulfillableCapacity": NoCapacity,
    "SpotMaxPriceTooLow": NoCapacity,
    "InsufficientHostCapacity": NoCapacity,
    "InsufficientReservedInstanceCapacity": NoCapacity,
    "InsufficientCapacityOnOutpost": NoCapacity,
    # A reservation is an offering with a pool of its own: dry says nothing about on-demand; gone drops the offering.
    "ReservationCapacityExceeded": NoCapacity,
    "InvalidCapacityReservationId.NotFound": NotFound,
    # An account limit of the family and market in the whole region.
    "VcpuLimitExceeded": Quota,
    "MaxSpotInstanceCountExceeded": Quota,
    "InstanceLimitExceeded": Quota,
    "MaxFleetCountExceeded": Quota,
    # This place can not, others may, and it says nothing about capacity.
    "Unsupported": Refused,
    "InsufficientFreeAddressesInSubnet": Refused,
    # The request or the account is wrong everywhere: never rotate.
    "InvalidLaunchTemplateName.NotFoundException": Misconfigured,
    "IdempotentParameterMismatch": Misconfigured,
    "MissingParameter": Misconfigured,
    "UnauthorizedOperation": Misconfigured,
    "AuthFailure": Misconfigured,
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": Misconfigured,
    "ExpiredToken": Misconfigured,
    "RequestExpired": Misconfigured,
    # Certainly not done, and no evidence about capacity.
    "RequestLimitExceeded": Throttled,
    "EC2ThrottledException": Throttled,
    "ThrottlingException": Throttled,
    "Throttling": Throttled,
    # Nobody knows: same token in the same place again, then describe by token.
    "InternalError": Transient,
    "InternalFailure": Transient,
    "ServiceUnavailable": Transient,
    "Unavailable": Transient,
    "InvalidInstanceID.NotFound": NotFound,
}
PREFIXES: tuple[tuple[str, type[PortError]], ...] = (
    ("InvalidParameter", Misconfigured),
    ("InvalidAMIID.", Misconfigured),
    ("InvalidSubnet", Misconfigured),
)


def error_class(code: str, status: int = 400) -> type[PortError]:
    """The port error of an AWS `code` received with HTTP `status`. Unknown codes: Transient for 5xx, else Refused."""
    if code in ERROR_CLASSES:
        return ERROR_CLASSES[code]
    for prefix, kind in PREFIXES:
        if code.startswith(prefix):
            return kind
    return Transient if status >= 500 else Refused


def port_error(code: str, message: str, *, offering: str = "", status: int = 400) -> PortError:
    """The exception to raise for an AWS `code`; `offering` is the place the call was about."""
    kind = error_class(code, status)
    return NoCapacity(offering, message, code) if kind is NoCapacity else kind(message, code)
