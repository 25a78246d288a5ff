"""On-Demand Capacity Reservations and Capacity Blocks: listed, made, bought, cancelled.

Pure; may not do I/O, read a clock or draw lots. A purchase has no client token: the same call twice buys twice.
"""

from __future__ import annotations

import math
from typing import Any

from chaos.ec2_server.call import Action, Call, page, passes, tag_list, tags_of
from chaos.ec2_server.state import Pool, Refusal, Region, Reservation


def describe_capacity_reservations(call: Call) -> dict[str, Any]:
    """Reservations and blocks, ended ones included, one page."""
    asked = call.params.get("CapacityReservationIds")
    rows = list(call.region.reservations.values())
    if asked:
        if missing := [each for each in asked if each not in call.region.reservations]:
            raise Refusal("InvalidCapacityReservationId.NotFound", f"The reservation {missing[0]!r} does not exist")
        rows = [call.region.reservations[each] for each in asked]
    filters = call.params.get("Filters", ())
    kept = [row for row in rows if passes(_facts(row, call.now_s), row.tags, filters)]
    part, after = page(kept, call.params)
    return {"CapacityReservations": [_reservation(call.region, row, call.now_s) for row in part]} | after


def create_capacity_reservation(call: Call) -> dict[str, Any]:
    """Takes capacity from the pool and the quota, at once and for as long as it lives."""
    params, region = call.params, call.region
    token = params.get("ClientToken", "")
    same = [r for r in region.reservations.values() if token and r.client_token == token]
    if same:
        return {"CapacityReservation": _reservation(region, same[0], call.now_s)}
    kind, zone, count = params["InstanceType"], params.get("AvailabilityZone", ""), params["InstanceCount"]
    if not 1 <= count <= 1000:
        raise Refusal("InvalidParameterValue", f"InstanceCount {count}: need 1 to 1000")
    if region.quota_room(kind, "on-demand", call.now_s) < count:
        raise Refusal("InstanceLimitExceeded", "the reservation exceeds your limit")
    if region.room(Pool(kind, zone), call.now_s) < count:
        raise Refusal("InsufficientInstanceCapacity", f"no capacity for {kind} in {zone}", 500)
    row = Reservation(
        reservation_id=region.new_id("cr"),
        instance_type=kind,
        zone=zone,
        total=count,
        created_at_s=call.now_s,
        start_at_s=call.now_s + region.pending_reservation_s,
        end_at_s=params.get("EndDate", math.inf) if params.get("EndDateType") == "limited" else math.inf,
        match=params.get("InstanceMatchCriteria", "open"),
        tags=tags_of(params, "capacity-reservation"),
        client_token=token,
    )
    region.reservations[row.reservation_id] = row
    return {"CapacityReservation": _reservation(region, row, call.now_s)}


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
    """Blocks for sale of one type and duration that have not begun, one page."""
    params = call.params
    rows = [
        {
            "CapacityBlockOfferingId": block.offering_id,
            "InstanceType": block.instance_type,
            "AvailabilityZone": block.zone,
            "InstanceCount": block.count,
            "StartDate": block.start_at_s,
            "EndDate": block.end_at_s,
            "CapacityBlockDurationHours": block.hours,
            "UpfrontFee": f"{block.fee_usd:.2f}",
            "CurrencyCode": "USD",
        }
        for block in call.region.blocks.values()
        if block.instance_type == params.get("InstanceType", block.instance_type)
        and block.count >= params.get("InstanceCount", 1)
        and block.start_at_s > call.now_s
        and block.hours == params["CapacityDurationHours"]
        and params.get("StartDateRange", -math.inf) <= block.start_at_s
        and block.end_at_s <= params.get("EndDateRange", math.inf)
    ]
    part, after = page(rows, params)
    return {"CapacityBlockOfferings": part} | after


def purchase_capacity_block(call: Call) -> dict[str, Any]:
    """Buys. There is no client token: the same call twice buys twice."""
    region, block = call.region, call.region.blocks.get(call.params["CapacityBlockOfferingId"])
    if block is None or block.start_at_s <= call.now_s:
        raise Refusal("InvalidParameterValue", "no such Capacity Block offering")
    row = Reservation(
        reservation_id=region.new_id("cr"),
        instance_type=block.instance_type,
        zone=block.zone,
        total=block.count,
        created_at_s=call.now_s,
        start_at_s=block.start_at_s,
        end_at_s=block.end_at_s,
        kind="capacity-block",
        match="targeted",
        tags=tags_of(call.params, "capacity-reservation"),
        paid_at_s=call.now_s + region.payment_s,
    )
    region.reservations[row.reservation_id] = row
    return {"CapacityReservation": _reservation(region, row, call.now_s)}


# ---- parts of answers -----------------------------------------------------------------------------------------------
def _facts(row: Reservation, now_s: float) -> dict[str, str]:
    return {
        "instance-type": row.instance_type,
        "availability-zone": row.zone,
        "state": row.state(now_s),
        "instance-match-criteria": row.match,
    }


def _reservation(region: Region, row: Reservation, now_s: float) -> dict[str, Any]:
    ends = row.end_at_s < math.inf
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
        "ReservationType": row.kind,
        "Interruptible": row.interruptible,
        "Tags": tag_list(row.tags),
    }
    return answer | ({"EndDate": row.end_at_s} if ends else {})


ACTIONS: dict[str, Action] = {
    "DescribeCapacityReservations": describe_capacity_reservations,
    "CreateCapacityReservation": create_capacity_reservation,
    "CancelCapacityReservation": cancel_capacity_reservation,
    "DescribeCapacityBlockOfferings": describe_capacity_block_offerings,
    "PurchaseCapacityBlock": purchase_capacity_block,
}
