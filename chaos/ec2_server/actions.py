"""The calls that the server answers, each in boto3's words. Pure; may not do I/O, read a clock or draw lots."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chaos.ec2_server import launch
from chaos.ec2_server.state import Instance, Kind, Pool, Refusal, Region, Reservation

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `at_s` is how old a truth a listing shows (describe lag)."""

    region: Region
    params: Params
    now_s: float
    at_s: float


STATES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48}
PAGE = 1000


def run_instances(call: Call) -> dict[str, Any]:
    """See launch.run."""
    launch_id, ids = launch.run(call.region, call.params, call.now_s)
    rows = [_instance(call.region.instances[each], call.now_s) for each in ids if each in call.region.instances]
    return {"ReservationId": launch_id, "OwnerId": "1", "Instances": rows}


def create_fleet(call: Call) -> dict[str, Any]:
    """See launch.fleet."""
    return launch.fleet(call.region, call.params, call.now_s)


def describe_instances(call: Call) -> dict[str, Any]:
    """Instances of `at_s` that pass all filters, one page."""
    shown = {key: each for key, each in call.region.instances.items() if each.launched_at_s <= call.at_s}
    asked = call.params.get("InstanceIds")
    if asked:
        missing = [each for each in asked if each not in shown]
        if missing:
            raise Refusal("InvalidInstanceID.NotFound", f"The instance IDs '{', '.join(missing)}' do not exist")
        shown = {key: shown[key] for key in asked}
    rows = [each for each in shown.values() if _passes(each, call.params.get("Filters", []), call.at_s)]
    page, after = _page(rows, call.params)
    found = [{"ReservationId": "r-1", "OwnerId": "1", "Instances": [_instance(e, call.at_s)]} for e in page]
    return {"Reservations": found} | after


def terminate_instances(call: Call) -> dict[str, Any]:
    """All or nothing: an unknown or protected instance refuses the call."""
    ids = call.params.get("InstanceIds", [])
    missing = [
        each
        for each in ids
        if each not in call.region.instances or call.region.instances[each].launched_at_s > call.at_s
    ]
    if missing:
        raise Refusal("InvalidInstanceID.NotFound", f"The instance IDs '{', '.join(missing)}' do not exist")
    if held := [each for each in ids if call.region.instances[each].protected]:
        raise Refusal("OperationNotPermitted", f"The instance '{held[0]}' may not be terminated.")
    rows = []
    for key in ids:
        instance = call.region.instances[key]
        before = instance.state(call.now_s)
        instance.stop(call.now_s, call.region.stopping_s, "Client.UserInitiatedShutdown", "User initiated shutdown")
        rows.append(
            {"InstanceId": key, "PreviousState": _state(before), "CurrentState": _state(instance.state(call.now_s))}
        )
    return {"TerminatingInstances": rows}


def describe_capacity_reservations(call: Call) -> dict[str, Any]:
    """Reservations and blocks, ended ones included, one page."""
    asked = call.params.get("CapacityReservationIds")
    rows = list(call.region.reservations.values())
    if asked:
        if missing := [each for each in asked if each not in call.region.reservations]:
            raise Refusal("InvalidCapacityReservationId.NotFound", f"The reservation {missing[0]!r} does not exist")
        rows = [call.region.reservations[each] for each in asked]
    kept = [row for row in rows if _tags_pass(row.tags, call.params.get("Filters", []))]
    page, after = _page(kept, call.params)
    return {"CapacityReservations": [_reservation(call.region, row, call.now_s) for row in page]} | after


def create_capacity_reservation(call: Call) -> dict[str, Any]:
    """Takes capacity from the pool and the quota, at once and for as long as it lives."""
    token = call.params.get("ClientToken", "")
    same = [r for r in call.region.reservations.values() if token and r.client_token == token]
    if same:
        return {"CapacityReservation": _reservation(call.region, same[0], call.now_s)}
    kind, zone, count = call.params["InstanceType"], call.params["AvailabilityZone"], call.params["InstanceCount"]
    if call.region.quota_room(kind, "on-demand", call.now_s) < count:
        raise Refusal("InstanceLimitExceeded", "the reservation exceeds your limit")
    if call.region.room(Pool(kind, zone), call.now_s) < count:
        raise Refusal("InsufficientInstanceCapacity", f"no capacity for {kind} in {zone}", 500)
    row = Reservation(
        reservation_id=call.region.new_id("cr"),
        instance_type=kind,
        zone=zone,
        total=count,
        created_at_s=call.now_s,
        start_at_s=call.now_s + call.region.pending_reservation_s,
        match=call.params.get("InstanceMatchCriteria", "open"),
        tags=_tags(call.params),
        client_token=token,
    )
    call.region.reservations[row.reservation_id] = row
    return {"CapacityReservation": _reservation(call.region, row, call.now_s)}


def cancel_capacity_reservation(call: Call) -> dict[str, Any]:
    """Its instances go on running, on demand. A block can not be cancelled."""
    row = call.region.reservations.get(call.params["CapacityReservationId"])
    if row is None:
        raise Refusal("InvalidCapacityReservationId.NotFound", "no such reservation")
    if row.kind == "capacity-block":
        raise Refusal("UnsupportedOperation", "a Capacity Block can not be cancelled")
    row.cancelled_at_s = min(row.cancelled_at_s, call.now_s)
    for each in call.region.instances.values():
        if each.reservation == row.reservation_id:
            each.reservation = ""
    return {"Return": True}


def describe_capacity_block_offerings(call: Call) -> dict[str, Any]:
    """Blocks for sale of one type and duration that have not begun."""
    hours = call.params["CapacityDurationHours"]
    rows = [
        {
            "CapacityBlockOfferingId": block.offering_id,
            "InstanceType": block.instance_type,
            "AvailabilityZone": block.zone,
            "InstanceCount": block.count,
            "StartDate": block.start_at_s,
            "EndDate": block.end_at_s,
            "CapacityBlockDurationHours": hours,
            "UpfrontFee": f"{block.fee_usd:.2f}",
            "CurrencyCode": "USD",
        }
        for block in call.region.blocks.values()
        if block.instance_type == call.params.get("InstanceType", block.instance_type)
        and block.count >= call.params.get("InstanceCount", 1)
        and block.start_at_s > call.now_s
        and abs(block.end_at_s - block.start_at_s - hours * 3600.0) < 86_400.0
    ]
    return {"CapacityBlockOfferings": rows}


def purchase_capacity_block(call: Call) -> dict[str, Any]:
    """Buys. There is no client token: the same call twice buys twice."""
    block = call.region.blocks.get(call.params["CapacityBlockOfferingId"])
    if block is None:
        raise Refusal("InvalidParameterValue", "no such Capacity Block offering")
    row = Reservation(
        reservation_id=call.region.new_id("cr"),
        instance_type=block.instance_type,
        zone=block.zone,
        total=block.count,
        created_at_s=call.now_s,
        start_at_s=block.start_at_s,
        end_at_s=block.end_at_s,
        kind="capacity-block",
        match="targeted",
        tags=_tags(call.params),
    )
    call.region.reservations[row.reservation_id] = row
    return {"CapacityReservation": _reservation(call.region, row, call.now_s)}


def describe_instance_type_offerings(call: Call) -> dict[str, Any]:
    """Types by zone."""
    rows = sorted({(pool.instance_type, pool.zone) for pool in call.region.pools})
    wanted = {row["Name"]: row["Values"] for row in call.params.get("Filters", [])}
    kept = [
        {"InstanceType": kind, "LocationType": "availability-zone", "Location": zone}
        for kind, zone in rows
        if any(fnmatch.fnmatch(kind, each) for each in wanted.get("instance-type", ["*"]))
    ]
    page, after = _page(kept, call.params)
    return {"InstanceTypeOfferings": page} | after


def describe_subnets(call: Call) -> dict[str, Any]:
    """Zone and free addresses of subnets."""
    wanted = {row["Name"]: row["Values"] for row in call.params.get("Filters", [])}
    named = [each for each in call.region.subnets if each in wanted.get("subnet-id", call.region.subnets)]
    asked = call.params.get("SubnetIds") or named
    if missing := [each for each in asked if each not in call.region.subnets]:
        raise Refusal("InvalidSubnetID.NotFound", f"The subnet ID '{missing[0]}' does not exist")
    used = [each.subnet for each in call.region.live(call.now_s)]
    rows = [
        {
            "SubnetId": e,
            "AvailabilityZone": call.region.subnets[e][0],
            "AvailableIpAddressCount": call.region.subnets[e][1] - used.count(e),
        }
        for e in asked
    ]
    return {"Subnets": rows}


# ---- parts of answers -----------------------------------------------------------------------------------------------
def _page(rows: list[Any], params: Params) -> tuple[list[Any], dict[str, Any]]:
    start, size = int(params.get("NextToken") or 0), int(params.get("MaxResults") or PAGE)
    more = {"NextToken": str(start + size)} if start + size < len(rows) else {}
    return rows[start : start + size], more


def _tags(params: Params) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for row in params.get("TagSpecifications", []) for tag in row["Tags"]}


def _tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _state(name: str) -> dict[str, Any]:
    return {"Code": STATES[name], "Name": name}


def _tags_pass(tags: Mapping[str, str], filters: list[dict[str, Any]]) -> bool:
    rows = [row for row in filters if row["Name"].startswith("tag:")]
    return all(tags.get(row["Name"][4:]) in row["Values"] for row in rows)


def _passes(instance: Instance, filters: list[dict[str, Any]], at_s: float) -> bool:
    facts = {
        "client-token": instance.client_token,
        "instance-state-name": instance.state(at_s),
        "availability-zone": instance.zone,
        "instance-type": instance.instance_type,
    }
    unknown = [row["Name"] for row in filters if row["Name"] not in facts and not row["Name"].startswith("tag:")]
    if unknown:
        raise Refusal("InvalidParameterValue", f"The filter '{unknown[0]}' is invalid")
    return all(facts[r["Name"]] in r["Values"] for r in filters if r["Name"] in facts) and _tags_pass(
        instance.tags, filters
    )


def _instance(each: Instance, at_s: float) -> dict[str, Any]:
    lifecycle = {"spot": "spot", "capacity-block": "capacity-block"}.get(each.market)
    code, words = each.reason if at_s >= each.stops_at_s else ("", "")
    row: dict[str, Any] = {
        "InstanceId": each.instance_id,
        "InstanceType": each.instance_type,
        "ClientToken": each.client_token,
        "LaunchTime": each.launched_at_s,
        "State": _state(each.state(at_s)),
        "Placement": {"AvailabilityZone": each.zone, "GroupName": each.group},
        "SubnetId": each.subnet or None,
        "InstanceLifecycle": lifecycle,
        "CapacityReservationId": each.reservation or None,
        "Tags": _tag_list(each.tags),
    }
    if code:
        row |= {"StateReason": {"Code": code, "Message": words}, "StateTransitionReason": words}
    return row


def _reservation(region: Region, row: Reservation, now_s: float) -> dict[str, Any]:
    ends = row.end_at_s < float("inf")
    kind: Kind = row.kind
    answer = {
        "CapacityReservationId": row.reservation_id,
        "InstanceType": row.instance_type,
        "AvailabilityZone": row.zone,
        "TotalInstanceCount": row.total,
        "AvailableInstanceCount": region.free(row, now_s),
        "State": row.state(now_s),
        "StartDate": row.start_at_s,
        "EndDateType": "limited" if ends else "unlimited",
        "InstanceMatchCriteria": row.match,
        "CreateDate": row.created_at_s,
        "ReservationType": kind,
        "Interruptible": row.interruptible,
        "Tags": _tag_list(row.tags),
    }
    return answer | ({"EndDate": row.end_at_s} if ends else {})


Action = Callable[[Call], dict[str, Any]]
ACTIONS: dict[str, Action] = {
    "RunInstances": run_instances,
    "CreateFleet": create_fleet,
    "DescribeInstances": describe_instances,
    "TerminateInstances": terminate_instances,
    "DescribeCapacityReservations": describe_capacity_reservations,
    "CreateCapacityReservation": create_capacity_reservation,
    "CancelCapacityReservation": cancel_capacity_reservation,
    "DescribeCapacityBlockOfferings": describe_capacity_block_offerings,
    "PurchaseCapacityBlock": purchase_capacity_block,
    "DescribeInstanceTypeOfferings": describe_instance_type_offerings,
    "DescribeSubnets": describe_subnets,
}
