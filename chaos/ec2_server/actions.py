"""The calls about instances, each in boto3's words, and the table of all. Pure; may not do I/O or read a clock."""

from __future__ import annotations

import base64
from typing import Any

from chaos.ec2_server import fleet, launch, lookups, reserve
from chaos.ec2_server.call import Action, Call, page, passes, tag_list
from chaos.ec2_server.state import Instance, Refusal

STATES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48}
LIFECYCLES = ("spot", "capacity-block", "interruptible-capacity-reservation")


def run_instances(call: Call) -> dict[str, Any]:
    """See launch.run."""
    launch_id, ids = launch.run(call.region, call.params, call.now_s)
    rows = [_instance(call.region.instances[each], call.now_s) for each in ids if each in call.region.instances]
    return {"ReservationId": launch_id, "OwnerId": "1", "Instances": rows}


def create_fleet(call: Call) -> dict[str, Any]:
    """See fleet.create."""
    return fleet.create(call.region, call.params, call.now_s)


def describe_instances(call: Call) -> dict[str, Any]:
    """Instances of `at_s` that pass all filters, one page."""
    shown = {key: each for key, each in call.region.instances.items() if each.launched_at_s <= call.at_s}
    asked = call.params.get("InstanceIds")
    if asked:
        if "MaxResults" in call.params:
            raise Refusal("InvalidParameterCombination", "MaxResults and InstanceIds can not be used together")
        _all_there(asked, shown)
        shown = {key: shown[key] for key in asked}
    filters = call.params.get("Filters", ())
    rows = [each for each in shown.values() if passes(_facts(each, call.at_s), each.tags, filters)]
    part, after = page(rows, call.params)
    found = [{"ReservationId": "r-1", "OwnerId": "1", "Instances": [_instance(e, call.at_s)]} for e in part]
    return {"Reservations": found} | after


def terminate_instances(call: Call) -> dict[str, Any]:
    """All or nothing: an unknown or protected instance refuses the call."""
    ids, instances = call.params["InstanceIds"], call.region.instances
    _all_there(ids, {key for key, each in instances.items() if each.launched_at_s <= call.at_s})
    if held := [each for each in ids if instances[each].protected]:
        raise Refusal("OperationNotPermitted", f"The instance '{held[0]}' may not be terminated.")
    rows = []
    for key in ids:
        before = instances[key].state(call.now_s)
        instances[key].stop(
            call.now_s, call.region.stopping_s, "Client.UserInitiatedShutdown", "User initiated shutdown"
        )
        after = instances[key].state(call.now_s)
        rows.append({"InstanceId": key, "PreviousState": _state(before), "CurrentState": _state(after)})
    return {"TerminatingInstances": rows}


def get_console_output(call: Call) -> dict[str, Any]:
    """What an instance has printed."""
    key = call.params["InstanceId"]
    _all_there([key], call.region.instances)
    text = call.region.console.get(key, "")
    return {"InstanceId": key, "Timestamp": call.now_s, "Output": base64.b64encode(text.encode()).decode()}


# ---- parts of answers -----------------------------------------------------------------------------------------------
def _all_there(asked: list[str], known: Any) -> None:
    missing = [each for each in asked if each not in known]
    if len(missing) == 1:
        raise Refusal("InvalidInstanceID.NotFound", f"The instance ID '{missing[0]}' does not exist")
    if missing:
        raise Refusal("InvalidInstanceID.NotFound", f"The instance IDs '{', '.join(missing)}' do not exist")


def _state(name: str) -> dict[str, Any]:
    return {"Code": STATES[name], "Name": name}


def _facts(instance: Instance, at_s: float) -> dict[str, str]:
    return {
        "client-token": instance.client_token,
        "instance-state-name": instance.state(at_s),
        "availability-zone": instance.zone,
        "instance-type": instance.instance_type,
        "subnet-id": instance.subnet,
        "capacity-reservation-id": instance.reservation,
    }


def _instance(each: Instance, at_s: float) -> dict[str, Any]:
    code, words = each.reason if at_s >= each.stops_at_s else ("", "")
    row: dict[str, Any] = {
        "InstanceId": each.instance_id,
        "ImageId": each.spec.get("ImageId"),
        "InstanceType": each.instance_type,
        "ClientToken": each.client_token,
        "LaunchTime": each.launched_at_s,
        "State": _state(each.state(at_s)),
        "Placement": {"AvailabilityZone": each.zone, "GroupName": each.group},
        "SubnetId": each.subnet or None,
        "InstanceLifecycle": each.market if each.market in LIFECYCLES else None,
        "CapacityReservationId": each.reservation or None,
        "Tags": tag_list(each.tags),
    }
    if code:
        row |= {"StateReason": {"Code": code, "Message": words}, "StateTransitionReason": words}
    return row


ACTIONS: dict[str, Action] = {
    "RunInstances": run_instances,
    "CreateFleet": create_fleet,
    "DescribeInstances": describe_instances,
    "TerminateInstances": terminate_instances,
    "GetConsoleOutput": get_console_output,
    **reserve.ACTIONS,
    **lookups.ACTIONS,
}
