"""Looks whether ``cloud/ec2.yaml`` can work: what is there, what is allowed, what is left. Launches are dry runs.

Each finding names its remedy. A call that fails is a finding of its own, and hides no other check's.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from autoscaler.adapters.ec2 import remedies, words
from autoscaler.adapters.ec2.calls import Bucket, Caller, Clients
from autoscaler.adapters.ec2.config import Ec2Config
from autoscaler.adapters.ec2.quotas import Quotas, quota_of
from autoscaler.ports import PortError, Quota

DRY = "DryRunOperation"
CLOCK_WARN_S, CLOCK_BAD_S = 30.0, 240.0  # AWS refuses a request that is 300 s off
FEW_ADDRESSES = 16
Level = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: `check` and `subject` name it, `remedy` says what to do where it is not ok."""

    check: str
    subject: str
    level: Level
    text: str
    remedy: str = ""


class Doctor:
    """One look at everything. `clients(region)` connects."""

    def __init__(self, config: Ec2Config, now_s: Callable[[], float], clients: Callable[[str], Clients]) -> None:
        self._config, self._now_s = config, now_s
        bucket = Bucket(float(config.calls_burst), config.calls_per_s, now_s)
        self._callers = {
            name: Caller(clients(name), bucket if name == config.region else Bucket(10.0, 1.0, now_s))
            for name in (config.region, *config.sweep_regions)
        }
        self._caller = self._callers[config.region]

    def close(self) -> None:
        """Let go of the clients."""
        for caller in self._callers.values():
            caller.close()

    def examine(self) -> tuple[Finding, ...]:
        """All findings; only the first when nobody answers or nobody is let in."""
        try:
            answer = self._caller.read("describe_instances", Filters=self._ours(), MaxResults=5)
        except PortError as error:
            return (_failed("access", self._config.region, error),)
        mine = [row for group in answer.get("Reservations", ()) for row in group["Instances"]]
        found = [Finding("access", self._config.region, "ok", "the listing of instances answers"), self._clock(answer)]
        for check in (self._template, self._subnets, self._types, self._quotas, self._reservations, self._groups):
            found += check()
        found += [*self._permissions(mine), *self._sweeps(), self._queue()]
        return tuple(found)

    def _ours(self) -> list[dict[str, Any]]:
        return [{"Name": f"tag:{words.TAG_CLUSTER}", "Values": [self._config.cluster]}]

    def _clock(self, answer: Mapping[str, Any]) -> Finding:
        sent = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if not sent:
            return Finding("clock", "here", "note", "the answer has no date", "compare the clock with another machine")
        off_s = self._now_s() - parsedate_to_datetime(sent).timestamp()
        level: Level = "ok" if abs(off_s) < CLOCK_WARN_S else "note" if abs(off_s) < CLOCK_BAD_S else "bad"
        return Finding("clock", "here", level, f"{off_s:+.0f} s against AWS", "" if level == "ok" else remedies.CLOCK)

    # ---- what launches start from -------------------------------------------------------------------------------
    def _template(self) -> Iterator[Finding]:
        name = self._config.launch_template
        try:
            answer = self._caller.read(
                "describe_launch_template_versions", LaunchTemplateName=name, Versions=["$Default"]
            )
        except PortError as error:
            yield _failed("launch template", name, error)
            return
        data = answer["LaunchTemplateVersions"][0].get("LaunchTemplateData", {})
        faults = list(_template_faults(data, self._config.cluster))
        yield from (Finding("launch template", name, "bad", text, remedies.TEMPLATE) for text in faults)
        if not faults:
            yield Finding("launch template", name, "ok", "is there, and says what it must")
        yield self._image(self._config.image or str(data.get("ImageId", "")))

    def _image(self, image: str) -> Finding:
        if not image:
            return Finding("image", "none", "bad", "neither the launch template nor `image` names one", remedies.IMAGE)
        try:
            rows = self._caller.read("describe_images", ImageIds=[image]).get("Images", ())
        except PortError as error:
            return _failed("image", image, error)
        state = rows[0].get("State", "") if rows else "gone"
        if state != "available":
            return Finding("image", image, "bad", f"is {state}", remedies.IMAGE)
        return Finding("image", image, "ok", "is available")

    # ---- where they may run -------------------------------------------------------------------------------------
    def _subnets(self) -> Iterator[Finding]:
        wanted = {row.subnet: row.zone for row in self._config.offerings}
        filters = [{"Name": "subnet-id", "Values": sorted(wanted)}]
        try:
            rows = {row["SubnetId"]: row for row in self._caller.pages("describe_subnets", "Subnets", Filters=filters)}
        except PortError as error:
            yield _failed("subnet", self._config.region, error)
            return
        for subnet, zone in wanted.items():
            row = rows.get(subnet)
            if row is None:
                yield Finding("subnet", subnet, "bad", "does not exist", remedies.remedy("InvalidSubnetID.NotFound"))
                continue
            free, real = int(row.get("AvailableIpAddressCount", 0)), row["AvailabilityZone"]
            level: Level = "bad" if real != zone or not free else "note" if free < FEW_ADDRESSES else "ok"
            text = f"is in {real}, not in {zone}" if real != zone else f"{zone}: {free} free addresses"
            code = "InvalidSubnetID.NotFound" if real != zone else "InsufficientFreeAddressesInSubnet"
            yield Finding("subnet", subnet, level, text, "" if level == "ok" else remedies.remedy(code))

    def _types(self) -> Iterator[Finding]:
        kinds = sorted({row.instance_type for row in self._config.offerings})
        filters = [{"Name": "instance-type", "Values": kinds}]
        place = {"LocationType": "availability-zone", "Filters": filters}
        try:
            rows = self._caller.pages("describe_instance_type_offerings", "InstanceTypeOfferings", **place)
        except PortError as error:
            yield _failed("instance type", self._config.region, error)
            return
        there = {(row["InstanceType"], row["Location"]) for row in rows}
        for kind in kinds:
            asked = sorted({row.zone for row in self._config.offerings if row.instance_type == kind})
            zones = [zone for zone in asked if (kind, zone) in there]
            missing = ", ".join(zone for zone in asked if zone not in zones)
            level: Level = "bad" if not zones else "note" if missing else "ok"
            text = f"offered in {', '.join(zones) or 'none of the zones'}" + (f"; not in {missing}" if missing else "")
            yield Finding("instance type", kind, level, text, "leave it out, or add a zone" if missing else "")

    def _quotas(self) -> Iterator[Finding]:
        quotas = Quotas(self._config.offerings)
        try:
            quotas.read(self._caller.quotas())
            rows = self._caller.instances(self._ours())
        except PortError as error:
            yield _failed("quota", self._config.region, error)
            return
        kinds = {(row.instance_type, quota_of(row)): row for row in self._config.offerings if quota_of(row)}
        for (kind, quota), offer in sorted(kinds.items(), key=str):
            assert quota is not None
            subject, limit = f"{kind} {quota[1]}", quotas.vcpus.get(quota)
            if limit is None:
                yield Finding("quota", subject, "note", "is not known", "look at Service Quotas yourself")
                continue
            try:
                room = quotas.room(offer, 1_000_000, rows)
            except Quota as error:
                yield Finding("quota", subject, "bad", str(error), remedies.remedy(error.code))
            else:
                yield Finding("quota", subject, "ok", f"{limit:.0f} vCPU: room for {room} more of ours")

    def _reservations(self) -> Iterator[Finding]:
        offers = {row.reservation: row for row in self._config.offerings if row.reservation}
        if not offers:
            return
        try:
            listed = self._caller.pages("describe_capacity_reservations", "CapacityReservations")
        except PortError as error:
            yield _failed("reservation", self._config.region, error)
            return
        rows = {row["CapacityReservationId"]: row for row in listed}
        for name, offer in offers.items():
            row = rows.get(name)
            if row is None or row["State"] in words.CLOSED_STATES:
                state = "does not exist" if row is None else f"is {row['State']}"
                yield Finding("reservation", name, "bad", state, "take it out of `reservations`")
            elif (row["InstanceType"], row["AvailabilityZone"]) != (offer.instance_type, offer.zone):
                text = f"is of {row['InstanceType']} in {row['AvailabilityZone']}"
                yield Finding("reservation", name, "bad", text, "correct `instance_type` and `zone`")
            else:
                left, total = row["AvailableInstanceCount"], row["TotalInstanceCount"]
                yield Finding("reservation", name, "ok", f"{row['State']}: {left} of {total} instances free")

    def _groups(self) -> Iterator[Finding]:
        for name in sorted({row.placement_group for row in self._config.offerings if row.placement_group}):
            try:
                rows = self._caller.read("describe_placement_groups", GroupNames=[name]).get("PlacementGroups", ())
            except PortError as error:
                text = "create it with the strategy `cluster`, or correct `placement_group`"
                yield Finding("placement group", name, "bad", f"{error} ({error.code})", text)
                continue
            state = rows[0].get("State", "") if rows else "gone"
            yield Finding("placement group", name, "ok" if state == "available" else "bad", f"is {state}")

    # ---- what is allowed ----------------------------------------------------------------------------------------
    def _permissions(self, mine: list[dict[str, Any]]) -> Iterator[Finding]:
        offer = self._config.offerings[0]
        tags = words.launch_tags(self._config, "doctor", offer.offering, self._now_s(), 0)
        launch = words.launch_params(self._config, offer, 1, "doctor", tags)
        yield self._dry("ec2:RunInstances", "run_instances", launch)
        loose = [row for row in self._config.offerings if not row.reservation and not row.placement_group]
        if loose:
            yield self._dry(
                "ec2:CreateFleet", "create_fleet", words.fleet_params(self._config, loose[:1], 1, "doctor", tags)
            )
        if mine:
            yield self._dry("ec2:TerminateInstances", "terminate_instances", {"InstanceIds": [mine[0]["InstanceId"]]})
        else:
            text = "not tried: the cluster has no instance yet"
            yield Finding("permission", "ec2:TerminateInstances", "note", text, "look again when it has one")

    def _dry(self, action: str, operation: str, params: dict[str, Any]) -> Finding:
        try:
            self._caller.write(operation, **params, DryRun=True)
        except PortError as error:
            if error.code == DRY:
                return Finding("permission", action, "ok", "a dry run would have succeeded")
            return _failed("permission", action, error)
        return Finding("permission", action, "bad", "the dry run was answered as if it were none", remedies.UNKNOWN)

    def _sweeps(self) -> Iterable[Finding]:
        for region in self._config.sweep_regions:
            try:
                rows = self._callers[region].instances(self._ours())
            except PortError as error:
                yield _failed("sweep", region, error)
            else:
                yield Finding("sweep", region, "ok", f"{len(rows)} instances of the cluster")

    def _queue(self) -> Finding:
        if self._config.notices_queue:
            return Finding("notices", self._config.notices_queue, "ok", "is named; only `qm run` reads it")
        text = "no queue: notices come from the nodes alone"
        return Finding("notices", "none", "note", text, "set `notices_queue` to the queue of deploy/")


def _failed(check: str, subject: str, error: PortError) -> Finding:
    return Finding(check, subject, "bad", f"{error} ({error.code})", remedies.remedy(error.code))


def _template_faults(data: Mapping[str, Any], cluster: str) -> Iterator[str]:
    """What launches cannot say themselves, because a fleet takes it from the template."""
    if data.get("CapacityReservationSpecification", {}).get("CapacityReservationPreference") != "none":
        yield "its fleets would take open reservations: CapacityReservationPreference is not none"
    if data.get("InstanceInitiatedShutdownBehavior") != "terminate":
        yield "a node that ends itself would only stop: InstanceInitiatedShutdownBehavior is not terminate"
    if data.get("MetadataOptions", {}).get("InstanceMetadataTags") != "enabled":
        yield "nodes cannot read their own tags: InstanceMetadataTags is not enabled"
    if not data.get("IamInstanceProfile"):
        yield "nodes have no role: IamInstanceProfile is missing"
    try:
        script = base64.b64decode(data.get("UserData", ""), validate=True).decode(errors="replace")
    except (binascii.Error, ValueError):
        script = ""
    if f"QM_CLUSTER='{cluster}'" not in script:
        yield f"its user data does not make a node of the cluster {cluster}"
