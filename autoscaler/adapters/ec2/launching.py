"""Launches: one offering by RunInstances, or several at once by an instant fleet; what stays open is settled here.

May not list or decide anything. It remembers what EC2 would only say again: full subnets and placement groups, a market
that the account may not use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from autoscaler.adapters.aws_codes import port_error
from autoscaler.adapters.ec2 import words
from autoscaler.adapters.ec2.calls import Caller
from autoscaler.adapters.ec2.config import Ec2Config, OfferConfig
from autoscaler.adapters.ec2.listing import Listing, Reservations, Row
from autoscaler.adapters.ec2.quotas import Quotas
from autoscaler.ports import (
    FleetAnswer,
    Misconfigured,
    NoCapacity,
    PortError,
    Refused,
    Tenure,
    Throttled,
    Transient,
)

SETTLE_S = 60.0
SHUT_S = 300.0
NO_SPOT_S = 3600.0
NO_SPOT = "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
FLEET_MARKETS = ("on_demand", "spot")


class Launcher:
    """Launches in the active region. What it gets goes into `listing` at once; each call needs the `tenure`."""

    def __init__(
        self,
        config: Ec2Config,
        caller: Caller,
        listing: Listing,
        reservations: Reservations,
        quotas: Quotas,
        now_s: Callable[[], float],
    ) -> None:
        self._config, self._caller, self._now_s = config, caller, now_s
        self._listing, self._reservations, self._quotas = listing, reservations, quotas
        self._offers = {row.offering: row for row in config.offerings}
        self._deadline_at_s: dict[str, float] = {}
        self._shut_until_s: dict[str, float] = {}
        self._lock = threading.RLock()
        self.unsettled_until_s = 0.0
        self.tenure: Tenure | None = None

    # ---- one offering -------------------------------------------------------------------------------------------
    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        """See ports.Cloud. An answer that leaves it open is settled by the same call again, then by its token."""
        offer = self._offer(offering)
        self._check_open(offer)
        tags = self._tags(token, offering)
        params = words.launch_params(self._config, offer, self._room(offer, count), token, tags)
        self._check_tenure()
        try:
            rows = self._run(offer, params)
        except Transient:
            rows = self._settled(lambda: self._run(offer, params), token)
        except PortError as error:
            self._shut_after(offer, error)
            raise
        with self._lock:
            for row in rows:
                self._listing.put(row)
            self._reservations.took(offer.reservation, len(rows))
        return tuple(row["InstanceId"] for row in rows)

    def _run(self, offer: OfferConfig, params: dict[str, Any]) -> list[Row]:
        answer = self._caller.write("run_instances", offer.offering, **params)
        rows: list[Row] = answer.get("Instances", [])
        if not rows:
            raise Transient("the answer to a launch names no instance", "EmptyAnswer")
        return rows

    # ---- several at once ----------------------------------------------------------------------------------------
    def together(self, offerings: Sequence[str]) -> tuple[str, ...]:
        """See ports.FleetCloud: one way to buy, nothing reserved, no placement group, none that is shut."""
        found: list[str] = []
        for name in offerings:
            offer = self._offers.get(name)
            if offer is None or offer.market not in FLEET_MARKETS or offer.placement_group or offer.efa_interfaces:
                break
            if found and offer.market != self._offers[found[0]].market:
                break
            found.append(name)
        return tuple(found)

    def launch_any(self, offerings: Sequence[str], count: int, token: str) -> FleetAnswer:
        """See ports.FleetCloud."""
        offers, refused = self._askable(offerings)
        if not offers:
            return FleetAnswer(granted={}, refused=refused)
        params = words.fleet_params(self._config, offers, count, token, self._tags(token))
        self._check_tenure()
        answer: dict[str, Any]
        try:
            answer = self._fleet(params)
        except Transient:
            rows = self._settled(lambda: self._fleet_rows(self._fleet(params), offers, token), token)
        else:
            rows = self._fleet_rows(answer, offers, token)
            refused |= self._fleet_errors(answer, offers)
        return FleetAnswer(granted=self._landed(rows, offers), refused=refused)

    def _askable(self, offerings: Sequence[str]) -> tuple[list[OfferConfig], dict[str, PortError]]:
        offers, refused = [], {}
        for name in offerings:
            try:
                self._check_open(self._offer(name))
            except PortError as error:
                refused[name] = error
            else:
                offers.append(self._offers[name])
        return offers, refused

    def _fleet(self, params: dict[str, Any]) -> dict[str, Any]:
        return self._caller.write("create_fleet", **params)

    def _fleet_rows(self, answer: dict[str, Any], offers: Sequence[OfferConfig], token: str) -> list[Row]:
        """What an instant fleet got, as rows of a listing; it names ids, types and subnets only."""
        rows: list[Row] = []
        launched_at = datetime.fromtimestamp(self._now_s(), UTC)
        for group in answer.get("Instances", ()):
            offer = _asked(group, offers)
            tags = [{"Key": key, "Value": value} for key, value in self._tags(token, offer.offering).items()]
            for instance_id in group.get("InstanceIds", ()):
                row = {"InstanceId": instance_id, "InstanceType": offer.instance_type, "LaunchTime": launched_at}
                place = {"Placement": {"AvailabilityZone": offer.zone}, "SubnetId": offer.subnet, "Tags": tags}
                life = {"InstanceLifecycle": "spot"} if offer.market == "spot" else {}
                rows.append(row | place | life | {"State": {"Name": "pending"}})
        return rows

    def _fleet_errors(self, answer: dict[str, Any], offers: Sequence[OfferConfig]) -> dict[str, PortError]:
        found: dict[str, PortError] = {}
        for row in answer.get("Errors", ()):
            offer = _asked(row, offers)
            code = str(row.get("ErrorCode", ""))
            error = port_error(code, str(row.get("ErrorMessage", code)), offering=offer.offering)
            self._caller.count(code)
            self._shut_after(offer, error)
            found[offer.offering] = error
        return found

    def _landed(self, rows: Sequence[Row], offers: Sequence[OfferConfig]) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        with self._lock:
            for row in rows:
                self._listing.put(row)
                name = words.landed(row, offers) or offers[0].offering
                found[name] = (*found.get(name, ()), row["InstanceId"])
        return found

    # ---- both ---------------------------------------------------------------------------------------------------
    def _offer(self, offering: str) -> OfferConfig:
        if offering not in self._offers:
            known = ", ".join(sorted(self._offers))
            raise Misconfigured(f"no offering {offering!r}; there are {known}", "InvalidParameterValue")
        return self._offers[offering]

    def _tags(self, token: str, offering: str = "") -> dict[str, str]:
        """The same for the same launch, whenever it is asked: EC2 compares what comes with a token."""
        with self._lock:
            until_s = self._deadline_at_s.setdefault(f"{offering}\0{token}", self._now_s() + self._config.max_life_s)
        epoch = self.tenure.epoch if self.tenure else 0
        return words.launch_tags(self._config, token, offering, until_s, epoch)

    def _check_tenure(self) -> None:
        """Raises Superseded, or Throttled when it cannot be told: then nothing was sent, and no pool is to blame."""
        try:
            if self.tenure is not None:
                self.tenure.check()
        except Transient as error:
            raise Throttled(f"whether this controller may still act is not known: {error}", error.code) from error

    def _room(self, offer: OfferConfig, count: int) -> int:
        """`count`, or what the account's quota leaves. Raises Quota when that is nothing."""
        with self._lock:
            return self._quotas.room(offer, count, self._listing.rows.values())

    def _settled(self, again: Callable[[], list[Row]], token: str) -> list[Row]:
        """What became of a call without an answer. Raises Transient when that cannot be told."""
        self.unsettled_until_s = self._now_s() + SETTLE_S
        try:
            self._check_tenure()
            return again()
        except Transient as error:
            mine = [
                {"Name": f"tag:{words.TAG_TOKEN}", "Values": [token]},
                {"Name": f"tag:{words.TAG_CLUSTER}", "Values": [self._config.cluster]},
            ]
            with suppress(PortError):
                if rows := self._caller.instances(mine):
                    return rows
            raise error
        except PortError as error:
            # The first call may have been done: a no to the second is not a no to the intent.
            raise Transient(f"after an open answer: {error.code}: {error}", error.code) from error

    def _check_open(self, offer: OfferConfig) -> None:
        """Raises what EC2 would only say again."""
        now_s = self._now_s()
        for key, error in _shutters(offer).items():
            if now_s < self._shut_until_s.get(key, 0.0):
                raise error
        known = offer.reservation and self._reservations.rows
        if known and (why := self._reservations.refusal(offer.reservation, now_s)):
            raise NoCapacity(offer.offering, f"reservation {offer.reservation} {why}", "ReservationCapacityExceeded")

    def _shut_after(self, offer: OfferConfig, error: PortError) -> None:
        now_s = self._now_s()
        if error.code == "InsufficientFreeAddressesInSubnet":
            self._shut_until_s[f"subnet {offer.subnet}"] = now_s + SHUT_S
        elif isinstance(error, NoCapacity) and "placement group limit" in str(error):
            self._shut_until_s[f"group {offer.placement_group} {offer.zone}"] = now_s + SHUT_S
        elif error.code == NO_SPOT:
            self._shut_until_s["market spot"] = now_s + NO_SPOT_S
        elif error.code == "ReservationCapacityExceeded":
            self._reservations.full(offer.reservation)


def _asked(row: Row, offers: Sequence[OfferConfig]) -> OfferConfig:
    """The offering that a part of a fleet's answer is about."""
    override = row.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
    place = (override.get("InstanceType"), override.get("SubnetId"))
    return next((each for each in offers if (each.instance_type, each.subnet) == place), offers[0])


def _shutters(offer: OfferConfig) -> dict[str, PortError]:
    """What may be shut for an offering, and what is said then."""
    full = Refused(f"subnet {offer.subnet} has no free address", "InsufficientFreeAddressesInSubnet")
    rows: dict[str, PortError] = {f"subnet {offer.subnet}": full}
    if offer.placement_group:
        text = f"placement group {offer.placement_group} is full in {offer.zone}"
        rows[f"group {offer.placement_group} {offer.zone}"] = NoCapacity(offer.offering, text)
    if offer.market == "spot":
        rows["market spot"] = Misconfigured("the account may not use spot; create its service-linked role", NO_SPOT)
    return rows
