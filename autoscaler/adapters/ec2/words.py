"""Our nouns in EC2's words and back. Pure; may not do I/O or read a clock."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from autoscaler.adapters.aws_codes import DIED_RECLAIMED
from autoscaler.adapters.ec2.config import Ec2Config, OfferConfig
from autoscaler.core.model import CloudInstance, CloudState, Offering

TAG_CLUSTER, TAG_OFFERING, TAG_TOKEN = "qm:cluster", "qm:offering", "qm:token"
TAG_DEADLINE, TAG_EPOCH = "qm:deadline-at-s", "qm:epoch"
CONSOLE_LINES = 5
CONSOLE_CHARACTERS = 600
BLOCK_STOP_S = 1800.0  # EC2 begins to terminate a block's instances 30 min before its end
CLOSED_STATES = frozenset(
    {"expired", "cancelled", "failed", "payment-failed", "unsupported", "cancelling", "unavailable"}
)
STATES: dict[str, CloudState] = {
    "pending": "pending",
    "running": "running",
    "shutting-down": "terminating",
    "stopping": "terminating",
    "stopped": "terminating",
    "terminated": "terminated",
}
MARKET_TYPES = {"spot": "spot", "block": "capacity-block", "interruptible": "interruptible-capacity-reservation"}


def client_token(offering: str, token: str) -> str:
    """EC2's idempotency token holds within a zone for equal parameters, so each offering gets one of its own."""
    return hashlib.sha256(f"{offering}\0{token}".encode()).hexdigest()


def launch_tags(config: Ec2Config, token: str, offering: str, deadline_at_s: float, epoch: int) -> dict[str, str]:
    """What an instance says of itself for as long as it lives. A fleet's instances are of any of several offerings."""
    rows = {
        TAG_CLUSTER: config.cluster,
        TAG_TOKEN: token,
        TAG_DEADLINE: f"{deadline_at_s:.0f}",
        TAG_EPOCH: str(epoch),
    }
    return rows | ({TAG_OFFERING: offering} if offering else {})


def launch_params(
    config: Ec2Config, offer: OfferConfig, count: int, token: str, tags: Mapping[str, str]
) -> dict[str, Any]:
    """RunInstances' parameters; the same for the same arguments. What is reserved is named, all else refuses it."""
    params: dict[str, Any] = {
        "LaunchTemplate": _template(config),
        "InstanceType": offer.instance_type,
        "MinCount": 1,
        "MaxCount": count,
        "ClientToken": client_token(offer.offering, token),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": _tagged(tags, ("instance", "volume", "network-interface")),
        "CapacityReservationSpecification": {"CapacityReservationPreference": "none"},
    }
    if offer.efa_interfaces:
        params["NetworkInterfaces"] = [_card(config, offer, at) for at in range(offer.efa_interfaces)]
    else:
        params["SubnetId"] = offer.subnet
    if config.image:
        params["ImageId"] = config.image
    if offer.reservation:
        target = {"CapacityReservationId": offer.reservation}
        params["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    if offer.market in MARKET_TYPES:
        params["InstanceMarketOptions"] = {"MarketType": MARKET_TYPES[offer.market]}
    if offer.placement_group:
        params["Placement"] = {"GroupName": offer.placement_group}
    return params


def fleet_params(
    config: Ec2Config, offers: Sequence[OfferConfig], count: int, token: str, tags: Mapping[str, str]
) -> dict[str, Any]:
    """CreateFleet's parameters for `offers` of one market, best first. The launch template refuses reservations."""
    image = {"ImageId": config.image} if config.image else {}
    overrides = [
        {"InstanceType": each.instance_type, "SubnetId": each.subnet, "Priority": float(rank)} | image
        for rank, each in enumerate(offers)
    ]
    spot = offers[0].market == "spot"
    how = (
        {"SpotOptions": {"AllocationStrategy": "capacity-optimized-prioritized"}}
        if spot
        else {"OnDemandOptions": {"AllocationStrategy": "prioritized"}}
    )
    return how | {
        "Type": "instant",
        "ClientToken": client_token("\0".join(each.offering for each in offers), token),
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": _template(config), "Overrides": overrides}],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": count,
            "DefaultTargetCapacityType": "spot" if spot else "on-demand",
        },
        "TagSpecifications": _tagged(tags, ("instance", "volume", "network-interface", "fleet")),
    }


def _template(config: Ec2Config) -> dict[str, str]:
    return {"LaunchTemplateName": config.launch_template, "Version": "$Default"}


def _tagged(tags: Mapping[str, str], kinds: Sequence[str]) -> list[dict[str, Any]]:
    rows = [{"Key": key, "Value": value} for key, value in tags.items()]
    return [{"ResourceType": kind, "Tags": rows} for kind in kinds]


def _card(config: Ec2Config, offer: OfferConfig, at: int) -> dict[str, Any]:
    """The `at`-th network card. The first has the instance's address, the others carry EFA alone and need none."""
    return {
        "NetworkCardIndex": at,
        "DeviceIndex": 0 if at == 0 else 1,
        "InterfaceType": "efa" if at == 0 else "efa-only",
        "SubnetId": offer.subnet,
        "Groups": list(config.security_groups),
        "DeleteOnTermination": True,
    }


def landed(row: Mapping[str, Any], offers: Iterable[OfferConfig]) -> str:
    """The offering that an instance is really of, by where it runs and how it is paid; empty when it is of none.

    The offering of its tag wins over others that fit as well.
    """
    reservation, life = row.get("CapacityReservationId") or "", row.get("InstanceLifecycle") or ""
    place = (row.get("InstanceType"), row.get("Placement", {}).get("AvailabilityZone"))
    meant = tags(row).get(TAG_OFFERING, "")
    here = [each for each in offers if (each.instance_type, each.zone) == place]
    fits = [each.offering for each in here if each.reservation and each.reservation == reservation]
    if not fits:  # a reservation that is nobody's offering is paid like on-demand
        market = "spot" if life == "spot" else "on_demand"
        fits = [each.offering for each in here if each.market == market]
    return meant if meant in fits else next(iter(fits), "")


def offering(config: Ec2Config, offer: OfferConfig, reservation: Mapping[str, Any] | None) -> Offering:
    """The offering as the decision knows it."""
    begins = reservation is not None and reservation["State"] not in ("active",)
    return Offering(
        offering=offer.offering,
        pool=offer.pool,
        instance_type=offer.instance_type,
        zone=offer.zone,
        market=offer.market,
        gpus=offer.gpus,
        price_usd_per_h=offer.price_usd_per_h,
        region=config.region,
        reservation=offer.reservation,
        starts_at_s=_at_s(reservation.get("StartDate")) if reservation and begins else None,
        ends_at_s=_at_s(reservation.get("EndDate")) if reservation else None,
    )


def tags(row: Mapping[str, Any]) -> dict[str, str]:
    """Tags of a resource."""
    return {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())}


def console_end(output: str) -> str:
    """The last lines of a console, on one line."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    return " | ".join(lines[-CONSOLE_LINES:])[-CONSOLE_CHARACTERS:]


def instance(
    row: Mapping[str, Any], offering: str, notice_at_s: float | None, config: Ec2Config, now_s: float
) -> CloudInstance:
    """An instance of DescribeInstances. `notice_at_s` is the deadline of a notice, where there was one."""
    labels, reason = tags(row), row.get("StateReason", {})
    why = f"{reason['Code']}: {reason.get('Message', '')}" if reason.get("Code") else ""
    launched_at_s = row["LaunchTime"].timestamp()
    state = STATES[row["State"]["Name"]]
    deadlines = [notice_at_s] if notice_at_s is not None else []
    hard_at_s = float(labels.get(TAG_DEADLINE) or "inf")
    if now_s > hard_at_s - config.deadline_notice_s:
        deadlines.append(hard_at_s)
    if why.startswith(DIED_RECLAIMED):
        deadlines.append(now_s)
    return CloudInstance(
        instance_id=row["InstanceId"],
        offering=offering,
        token=labels.get(TAG_TOKEN, ""),
        state=state,
        launched_at_s=launched_at_s,
        reclaim_at_s=min(deadlines) if deadlines else None,
        state_reason=why,
    )


def _at_s(instant: datetime | None) -> float | None:
    return instant.timestamp() if instant is not None else None
