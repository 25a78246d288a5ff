"""RunInstances and CreateFleet: who gets capacity, from where, and in which words it is refused.

Semantics of docs/ec2.md: a client token holds within one zone, a reservation is taken as the launch says, capacity is
given as far as it goes between MinCount and MaxCount. Pure; may not do I/O, read a clock or draw a random number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos.ec2_server.state import Instance, Pool, Refusal, Region, Reservation

Params = Mapping[str, Any]
DRY_RUN = ("DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412)
MARKETS = ("on-demand", "spot", "capacity-block", "interruptible-capacity-reservation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A launch, checked."""

    instance_type: str
    zone: str
    subnet: str
    market: str
    low: int
    high: int
    token: str
    preference: str = "open"
    target: str = ""
    group: str = ""
    shutdown: str = "stop"
    user_data: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    volumes_tagged: bool = False
    spec: dict[str, Any] = field(default_factory=dict)


def run(region: Region, params: Params, now_s: float) -> tuple[str, tuple[str, ...]]:
    """Reservation id of the launch and its instances' ids. Raises Refusal."""
    params = with_template(region, params)
    order = checked(region, params)
    if params.get("DryRun"):
        raise Refusal(*DRY_RUN)
    body = json.dumps(params, sort_keys=True, default=str)
    known = region.launches.get((order.zone, order.token)) if order.token else None
    if known is not None:
        if known[0] != body:
            raise Refusal("IdempotentParameterMismatch", "The client token was used with other parameters.")
        return region.new_id("r"), known[1]
    ids = tuple(each.instance_id for each in grant(region, order, now_s))
    if order.token:
        region.launches[order.zone, order.token] = (body, ids)
    return region.new_id("r"), ids


def with_template(region: Region, params: Params) -> dict[str, Any]:
    """The parameters laid over their launch template's."""
    template = params.get("LaunchTemplate")
    if not template:
        return dict(params)
    name = template.get("LaunchTemplateName") or template.get("LaunchTemplateId", "")
    if name not in region.templates:
        by_name = "LaunchTemplateName" in template
        code = "InvalidLaunchTemplateName.NotFoundException" if by_name else "InvalidLaunchTemplateId.NotFound"
        raise Refusal(code, f"The launch template {name!r} does not exist.")
    if template.get("Version", "$Default") not in ("$Default", "$Latest", "1"):
        raise Refusal("InvalidLaunchTemplateId.VersionNotFound", f"{name!r} has no version {template['Version']}")
    return region.templates[name] | dict(params)


def checked(region: Region, params: Params) -> Order:
    """What the parameters ask for. Raises Refusal where EC2 would."""
    low, high = int(params.get("MinCount", 0)), int(params.get("MaxCount", 0))
    if low < 1 or high < low:
        raise Refusal("InvalidParameterValue", f"MinCount {low} and MaxCount {high}: need 1 <= MinCount <= MaxCount")
    if "InstanceType" not in params:
        raise Refusal("MissingParameter", "The request must contain the parameter InstanceType")
    if params.get("ImageId") not in region.images:
        raise Refusal("InvalidAMIID.NotFound", f"The image id '[{params.get('ImageId')}]' does not exist")
    zone, subnet = _place(region, params)
    group = params.get("Placement", {}).get("GroupName", "")
    if group and group not in region.groups:
        raise Refusal("InvalidPlacementGroup.Unknown", f"The Placement Group '{group}' is unknown.")
    token = params.get("ClientToken", "")
    if len(token) > 64 or not token.isascii():
        raise Refusal("InvalidParameterValue", "ClientToken: at most 64 ASCII characters")
    market = params.get("InstanceMarketOptions", {}).get("MarketType", "on-demand")
    if market not in MARKETS:
        raise Refusal("InvalidParameterValue", f"MarketType {market!r}")
    wish = params.get("CapacityReservationSpecification", {})
    target = wish.get("CapacityReservationTarget", {}).get("CapacityReservationId", "")
    if target and "CapacityReservationPreference" in wish and wish["CapacityReservationPreference"] == "none":
        raise Refusal("InvalidParameterCombination", "a reservation is named and none is preferred")
    if market == "spot" and not region.spot_role:
        code = "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
        raise Refusal(code, "The provided credentials do not have permission to create the role for Spot.", 403)
    rows = {
        row["ResourceType"]: {t["Key"]: t["Value"] for t in row["Tags"]} for row in params.get("TagSpecifications", [])
    }
    return Order(
        instance_type=params["InstanceType"],
        zone=zone,
        subnet=subnet,
        market=market,
        low=low,
        high=high,
        token=token,
        preference=wish.get("CapacityReservationPreference", "open"),
        target=target,
        group=group,
        shutdown=params.get("InstanceInitiatedShutdownBehavior", "stop"),
        user_data=params.get("UserData", ""),
        tags=rows.get("instance", {}),
        volumes_tagged="volume" in rows,
        spec=dict(params),
    )


def _place(region: Region, params: Params) -> tuple[str, str]:
    nets = params.get("NetworkInterfaces", [])
    if nets and params.get("SubnetId"):
        raise Refusal("InvalidParameterCombination", "Network interfaces and a subnet may not be given together")
    subnet = params.get("SubnetId") or (nets[0].get("SubnetId") if nets else None)
    if subnet is None:
        return params.get("Placement", {}).get("AvailabilityZone", ""), ""
    if subnet not in region.subnets:
        raise Refusal("InvalidSubnetID.NotFound", f"The subnet ID '{subnet}' does not exist")
    return region.subnets[subnet][0], subnet


def grant(region: Region, order: Order, now_s: float) -> list[Instance]:
    """The instances that `order` gets, `order.low` at least. Raises Refusal."""
    if (order.instance_type, order.zone) not in region.places():
        raise Refusal("Unsupported", f"{order.instance_type} is not supported in {order.zone}")
    if not region.launch_tokens.take(now_s, float(order.low)):
        raise Refusal("RequestLimitExceeded", "Request limit exceeded.", 503)
    count = min(order.high, _addresses(region, order, now_s), _group_room(region, order, now_s))
    if order.market == "capacity-block" or order.target:
        reservation = _targeted(region, order, now_s)
        return _make(
            region, order, reservation.reservation_id, _enough(region, order, reservation, count, now_s), now_s
        )
    made: list[Instance] = []
    if order.market == "on-demand" and order.preference != "none":
        made = _from_open(region, order, count, now_s)
        if order.preference == "capacity-reservations-only":
            if not made:
                raise Refusal("ReservationCapacityExceeded", "no open reservation has capacity")
            return made
    left = count - len(made)
    return made + (_from_pool(region, order, left, bool(made), now_s) if left > 0 else [])


def _addresses(region: Region, order: Order, now_s: float) -> int:
    if not order.subnet:
        return order.high
    free = region.subnets[order.subnet][1] - sum(each.subnet == order.subnet for each in region.live(now_s))
    if free < order.low:
        raise Refusal("InsufficientFreeAddressesInSubnet", f"There are not enough free addresses in {order.subnet}.")
    return free


def _group_room(region: Region, order: Order, now_s: float) -> int:
    if not order.group or region.group_limit is None:
        return order.high
    used = sum((each.group, each.zone) == (order.group, order.zone) for each in region.live(now_s))
    if region.group_limit - used < order.low:
        words = "We currently do not have sufficient capacity: the spread placement group limit is reached"
        raise Refusal("InsufficientInstanceCapacity", words, 500)
    return region.group_limit - used


def _targeted(region: Region, order: Order, now_s: float) -> Reservation:
    found = region.reservations.get(order.target)
    if found is None:
        raise Refusal("InvalidCapacityReservationId.NotFound", f"The reservation {order.target!r} does not exist")
    if (found.instance_type, found.zone) != (order.instance_type, order.zone):
        raise Refusal("InvalidParameterValue", "type or zone are not those of the capacity reservation")
    wanted = (
        "capacity-block"
        if found.kind == "capacity-block"
        else ("interruptible-capacity-reservation" if found.interruptible else "on-demand")
    )
    if order.market != wanted:
        raise Refusal("InvalidParameterCombination", f"reservation {order.target} needs the market {wanted}")
    if found.state(now_s) != "active":
        raise Refusal("ReservationCapacityExceeded", f"reservation {order.target} is {found.state(now_s)}")
    return found


def _enough(region: Region, order: Order, reservation: Reservation, count: int, now_s: float) -> int:
    free = region.free(reservation, now_s)
    if free < order.low:
        raise Refusal("ReservationCapacityExceeded", f"reservation {reservation.reservation_id} has {free} left")
    return min(count, free)


def _from_open(region: Region, order: Order, count: int, now_s: float) -> list[Instance]:
    made: list[Instance] = []
    for each in sorted(region.reservations.values(), key=lambda r: r.reservation_id):
        fits = (each.instance_type, each.zone) == (order.instance_type, order.zone)
        if fits and each.match == "open" and each.kind == "default" and not each.interruptible:
            taken = min(count - len(made), region.free(each, now_s))
            made += _make(region, order, each.reservation_id, taken, now_s)
    return made


def _from_pool(region: Region, order: Order, count: int, partly: bool, now_s: float) -> list[Instance]:
    low = 0 if partly else order.low
    spot = order.market == "spot"
    quota = region.quota_room(order.instance_type, order.market, now_s)
    if quota < low or quota <= 0:
        code = "MaxSpotInstanceCountExceeded" if spot else "VcpuLimitExceeded"
        if not partly:
            raise Refusal(code, "You have requested more vCPU capacity than your current limit allows.")
        return []
    room = region.room(Pool(order.instance_type, order.zone, "spot" if spot else "on-demand"), now_s)
    if room < low or room <= 0:
        if not partly:
            words = f"We currently do not have sufficient {order.instance_type} capacity in {order.zone}."
            raise Refusal("InsufficientInstanceCapacity", words, 500)
        return []
    return _make(region, order, "", min(count, quota, room), now_s)


def _make(region: Region, order: Order, reservation: str, count: int, now_s: float) -> list[Instance]:
    made = []
    pool = Pool(order.instance_type, order.zone, "spot" if order.market == "spot" else "on-demand")
    boot_s = region.boots_s.get(pool, region.boot_s)
    for _ in range(count):
        instance = Instance(
            instance_id=region.new_id("i"),
            instance_type=order.instance_type,
            zone=order.zone,
            market=order.market,
            subnet=order.subnet,
            client_token=order.token,
            tags=dict(order.tags),
            launched_at_s=now_s,
            running_at_s=now_s + boot_s,
            shutdown=order.shutdown,
            reservation=reservation,
            preference=order.preference,
            group=order.group,
            volumes_tagged=order.volumes_tagged,
            user_data=order.user_data,
            spec=order.spec,
        )
        if region.dies is not None:
            instance.stop(now_s + boot_s, 0.0, *region.dies)
        region.instances[instance.instance_id] = instance
        made.append(instance)
    return made
