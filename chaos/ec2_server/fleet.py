"""CreateFleet of type instant: overrides in their order until the target is met, some granted and some refused.

The answer is a success that names errors and instances side by side. Instances carry a token of the fleet's own, never
the caller's. Pure; may not do I/O, read a clock or draw a random number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos.ec2_server import launch
from chaos.ec2_server.state import Refusal, Region

Params = Mapping[str, Any]
TARGETS = ("on-demand", "spot", "capacity-block", "reserved-capacity")


@dataclass(slots=True)
class _Fleet:
    """A fleet being filled. `left` instances are still wanted."""

    region: Region
    params: Params
    now_s: float
    fleet_id: str
    market: str
    left: int
    errors: list[dict[str, Any]] = field(default_factory=list)
    granted: list[dict[str, Any]] = field(default_factory=list)

    @property
    def lifecycle(self) -> str:
        """As the answer says it."""
        return "spot" if self.market == "spot" else "on-demand"

    @property
    def options(self) -> Params:
        """What is wished for the kind of capacity asked for."""
        found: Params = self.params.get("SpotOptions" if self.market == "spot" else "OnDemandOptions", {})
        return found


def create(region: Region, params: Params, now_s: float) -> dict[str, Any]:
    """The answer to CreateFleet. Raises Refusal."""
    if params.get("Type") != "instant":
        raise Refusal("InvalidParameterValue", "only instant fleets are served")
    token, body = params.get("ClientToken", ""), json.dumps(params, sort_keys=True, default=str)
    known = region.fleets.get(token) if token else None
    if known is not None:
        if known[0] != body:
            raise Refusal("IdempotentParameterMismatch", "The client token was used with other parameters.")
        return known[1]
    target = params["TargetCapacitySpecification"]
    market = target.get("DefaultTargetCapacityType", "on-demand")
    if market not in TARGETS:
        raise Refusal("InvalidParameterValue", f"DefaultTargetCapacityType {market!r}")
    for config in params["LaunchTemplateConfigs"]:
        launch.with_template(region, {"LaunchTemplate": config["LaunchTemplateSpecification"]})
    made = _Fleet(region, params, now_s, region.new_id("fleet"), market, int(target["TotalTargetCapacity"]))
    answer = _fill(made)
    if token:
        region.fleets[token] = (body, answer)
    return answer


def _fill(made: _Fleet) -> dict[str, Any]:
    total = made.left
    for number, (config, override) in enumerate(_in_order(made)):
        if made.left > 0:
            _ask(made, config, override, number)
    if total - made.left < int(made.options.get("MinTargetCapacity", 0)):
        for row in made.granted:
            for key in row["InstanceIds"]:
                del made.region.instances[key]
        made.granted.clear()
    return {"FleetId": made.fleet_id, "Errors": made.errors, "Instances": made.granted}


def _in_order(made: _Fleet) -> Iterator[tuple[Params, Params]]:
    rows = [(row, each) for row in made.params["LaunchTemplateConfigs"] for each in row.get("Overrides") or [{}]]
    if "prioritized" in made.options.get("AllocationStrategy", ""):
        rows.sort(key=lambda row: float(row[1].get("Priority", float("inf"))))
    return iter(rows)


def _ask(made: _Fleet, config: Params, override: Params, number: int) -> None:
    spec = config["LaunchTemplateSpecification"]
    shown = {
        "LaunchTemplateAndOverrides": {"LaunchTemplateSpecification": dict(spec), "Overrides": dict(override)},
        "Lifecycle": made.lifecycle,
    }
    order = {key: override[key] for key in ("InstanceType", "SubnetId", "Placement", "ImageId") if key in override}
    if "AvailabilityZone" in override:
        order["Placement"] = order.get("Placement", {}) | {"AvailabilityZone": override["AvailabilityZone"]}
    order |= {"LaunchTemplate": spec, "MinCount": 1, "MaxCount": made.left}
    order |= {"ClientToken": f"{made.fleet_id}-{number}", "TagSpecifications": made.params.get("TagSpecifications", [])}
    if made.market in ("spot", "capacity-block"):
        order["InstanceMarketOptions"] = {"MarketType": made.market}
    if made.market == "reserved-capacity":
        order["CapacityReservationSpecification"] = {"CapacityReservationPreference": "capacity-reservations-only"}
    try:
        checked = launch.checked(made.region, launch.with_template(made.region, order))
        granted = launch.grant(made.region, checked, made.now_s)
    except Refusal as refusal:
        made.errors.append(shown | {"ErrorCode": refusal.code, "ErrorMessage": str(refusal)})
        return
    made.left -= len(granted)
    ids = [each.instance_id for each in granted]
    made.granted.append(shown | {"InstanceIds": ids, "InstanceType": granted[0].instance_type})
