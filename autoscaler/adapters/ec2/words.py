"""Our nouns in EC2's words and back. Pure; may not do I/O or read a clock."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from autoscaler.adapters.aws_codes import DIED_RECLAIMED
from autoscaler.adapters.ec2.config import Ec2Config, OfferConfig
from autoscaler.core.model import CloudInstance, CloudState, Offering

TAG_CLUSTER, TAG_OFFERING, TAG_TOKEN, TAG_DEADLINE = "qm:cluster", "qm:offering", "qm:token", "qm:deadline-at-s"
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


def launch_params(
    config: Ec2Config, offer: OfferConfig, count: int, token: str, deadline_at_s: float
) -> dict[str, Any]:
    """RunInstances' parameters; the same for the same arguments. What is reserved is named, all else refuses it."""
    tags = {
        TAG_CLUSTER: config.cluster,
        TAG_OFFERING: offer.offering,
        TAG_TOKEN: token,
        TAG_DEADLINE: f"{deadline_at_s:.0f}",
    }
    rows = [{"Key": key, "Value": value} for key, value in tags.items()]
    kinds = ("instance", "volume", "network-interface")
    params: dict[str, Any] = {
        "LaunchTemplate": {"LaunchTemplateName": config.launch_template, "Version": "$Default"},
        "InstanceType": offer.instance_type,
        "SubnetId": offer.subnet,
        "MinCount": 1,
        "MaxCount": count,
        "ClientToken": client_token(offer.offering, token),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": [{"ResourceType": kind, "Tags": rows} for kind in kinds],
        "CapacityReservationSpecification": {"CapacityReservationPreference": "none"},
    }
    if offer.reservation:
        target = {"CapacityReservationId": offer.reservation}
        params["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    if offer.market in MARKET_TYPES:
        params["InstanceMarketOptions"] = {"MarketType": MARKET_TYPES[offer.market]}
    if offer.placement_group:
        params["Placement"] = {"GroupName": offer.placement_group}
    return params


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


def instance(row: Mapping[str, Any], notice_at_s: float | None, config: Ec2Config, now_s: float) -> CloudInstance:
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
        offering=labels.get(TAG_OFFERING, ""),
        token=labels.get(TAG_TOKEN, ""),
        state=state,
        launched_at_s=launched_at_s,
        reclaim_at_s=min(deadlines) if deadlines else None,
        state_reason=why,
    )


def _at_s(instant: datetime | None) -> float | None:
    return instant.timestamp() if instant is not None else None
