"""What is there to launch with: types, subnets, images, launch templates, placement groups. Pure; may not do I/O."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from typing import Any

from chaos.ec2_server.call import Action, Call, page
from chaos.ec2_server.state import Refusal


def describe_instance_type_offerings(call: Call) -> dict[str, Any]:
    """Types by zone."""
    rows = sorted(call.region.places())
    wanted = _filters(call, "instance-type", "location")
    kept = [
        {"InstanceType": kind, "LocationType": "availability-zone", "Location": zone}
        for kind, zone in rows
        if any(fnmatch.fnmatch(kind, each) for each in wanted.get("instance-type", ["*"]))
        and zone in wanted.get("location", [zone])
    ]
    part, after = page(kept, call.params)
    return {"InstanceTypeOfferings": part} | after


def describe_subnets(call: Call) -> dict[str, Any]:
    """Zone and free addresses of subnets."""
    subnets = call.region.subnets
    wanted = _filters(call, "subnet-id", "availability-zone")
    asked = _asked(call, "SubnetIds", subnets, "InvalidSubnetID.NotFound", "The subnet ID '{}' does not exist")
    used = [each.subnet for each in call.region.live(call.now_s)]
    rows = [
        {
            "SubnetId": each,
            "AvailabilityZone": subnets[each][0],
            "AvailableIpAddressCount": subnets[each][1] - used.count(each),
        }
        for each in asked
        if each in wanted.get("subnet-id", [each])
        and subnets[each][0] in wanted.get("availability-zone", [subnets[each][0]])
    ]
    part, after = page(rows, call.params)
    return {"Subnets": part} | after


def describe_images(call: Call) -> dict[str, Any]:
    """The images there are."""
    words = "The image id '[{}]' does not exist"
    asked = _asked(call, "ImageIds", sorted(call.region.images), "InvalidAMIID.NotFound", words)
    return {"Images": [{"ImageId": each, "State": "available"} for each in asked]}


def describe_launch_template_versions(call: Call) -> dict[str, Any]:
    """The one version that each template has."""
    name = call.params.get("LaunchTemplateName") or call.params.get("LaunchTemplateId")
    if name is None:
        raise Refusal("MissingParameter", "LaunchTemplateId or LaunchTemplateName is required")
    known = call.region.templates.get(name)
    if known is None:
        kind = "Name" if "LaunchTemplateName" in call.params else "Id"
        words = f"The specified launch template, with template {kind.lower()} {name}, does not exist."
        raise Refusal(f"InvalidLaunchTemplate{kind}.NotFoundException", words)
    row = {"LaunchTemplateName": name, "VersionNumber": 1, "DefaultVersion": True, "LaunchTemplateData": known}
    return {"LaunchTemplateVersions": [row]}


def describe_placement_groups(call: Call) -> dict[str, Any]:
    """The placement groups there are."""
    groups = call.region.groups
    words = "The Placement Group '{}' is unknown."
    asked = _asked(call, "GroupNames", groups, "InvalidPlacementGroup.Unknown", words)
    return {"PlacementGroups": [{"GroupName": e, "State": "available", "Strategy": groups[e]} for e in asked]}


def _filters(call: Call, *known: str) -> dict[str, list[str]]:
    wanted = {row["Name"]: row["Values"] for row in call.params.get("Filters", ())}
    if strange := [name for name in wanted if name not in known]:
        raise Refusal("InvalidParameterValue", f"The filter '{strange[0]}' is invalid")
    return wanted


def _asked(call: Call, key: str, known: Collection[str], code: str, words: str) -> list[str]:
    asked = call.params.get(key) or list(known)
    if missing := [each for each in asked if each not in known]:
        raise Refusal(code, words.format(missing[0]))
    return list(asked)


ACTIONS: dict[str, Action] = {
    "DescribeInstanceTypeOfferings": describe_instance_type_offerings,
    "DescribeSubnets": describe_subnets,
    "DescribeImages": describe_images,
    "DescribeLaunchTemplateVersions": describe_launch_template_versions,
    "DescribePlacementGroups": describe_placement_groups,
}
