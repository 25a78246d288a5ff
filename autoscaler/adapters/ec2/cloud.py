"""The Cloud port on EC2. May not decide anything; what it remembers are answers of EC2, to ask it seldom.

One region acquires, all configured ones are listed, so that an instance of this cluster is seen wherever it is. Every
launch names its reservation or refuses all, carries its tags and hard deadline, and is settled by its token.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from autoscaler.adapters.ec2 import words
from autoscaler.adapters.ec2.calls import Bucket, Caller, Clients, connect
from autoscaler.adapters.ec2.config import Ec2Config, OfferConfig
from autoscaler.adapters.ec2.listing import Listing, Reservations, Row
from autoscaler.core.model import CloudInstance, CloudView, Offering
from autoscaler.ports import Misconfigured, NoCapacity, NotFound, PortError, Refused, Transient

PAGE = 1000
YOUNG_S = 300.0  # a NotFound this soon after a launch is the listing's lag
SETTLE_S = 60.0
SHUT_S = 300.0
NO_SPOT_S = 3600.0
PREFLIGHT_EVERY_S = 86_400.0
NOTICES = frozenset(
    {"EC2 Spot Instance Interruption Warning", "EC2 Capacity Reservation Instance Interruption Warning"}
)  # a rebalance recommendation is advice, not a notice
NO_SPOT = "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
BLOCK_NOTICE_S = 600.0  # a block's end is announced 40 min ahead, 10 before its instances go

Notices = Callable[[], Iterable[Mapping[str, Any]]]


class Ec2Cloud:
    """`clients(region)` connects; `notices()` gives the EventBridge events since it was last called.

    `unknown` counts the error codes that no table holds, `dropped` says why a configured offering is not offered.
    """

    def __init__(
        self,
        config: Ec2Config,
        now_s: Callable[[], float],
        *,
        clients: Callable[[str], Clients] = connect,
        notices: Notices = tuple,
    ) -> None:
        self._config = config
        self._now_s = now_s
        self._notices = notices
        self._offers = {row.offering: row for row in config.offerings}
        self._callers = {name: self._caller(name, clients) for name in (config.region, *config.sweep_regions)}
        self._listings = {name: Listing() for name in self._callers}
        self._reservations = Reservations()
        self._notice_at_s: dict[str, float] = {}
        self._deadline_at_s: dict[str, float] = {}
        self._shut_until_s: dict[str, float] = {}
        self._unsettled_until_s = 0.0
        self._preflight_at_s = float("-inf")
        self._lock = threading.RLock()
        self.dropped: dict[str, str] = {}

    def _caller(self, region: str, clients: Callable[[str], Clients]) -> Caller:
        bucket = Bucket(float(self._config.calls_burst), self._config.calls_per_s, self._now_s)
        return Caller(clients(region), bucket)

    @property
    def unknown(self) -> Counter[str]:
        """Error codes that no table holds, with how often each came."""
        return sum((caller.unknown for caller in self._callers.values()), Counter[str]())

    def close(self) -> None:
        """Let go of the clients."""
        for caller in self._callers.values():
            caller.close()

    # ---- describe -----------------------------------------------------------------------------------------------
    def describe(self, now_s: float) -> CloudView:
        """See ports.Cloud. Listings are read when they are due, the idle regions' without a say in success."""
        with self._lock:
            self._preflight(now_s)
            self._read_reservations(now_s)
            self._read_instances(now_s)
            for region in self._config.sweep_regions:
                with suppress(PortError):  # the next sweep repeats it; the active region must not wait for it
                    self._sweep(region, now_s)
            self._take_notices()
            return CloudView(at_s=now_s, offerings=tuple(self._offerings()), instances=tuple(self._instances(now_s)))

    def _preflight(self, now_s: float) -> None:
        """Offerings that can not be are dropped: a type not offered in the zone, a subnet that is not in it."""
        if now_s - self._preflight_at_s < PREFLIGHT_EVERY_S:
            return
        offers, caller = self._config.offerings, self._callers[self._config.region]
        kinds = [{"Name": "instance-type", "Values": sorted({row.instance_type for row in offers})}]
        rows = self._pages(
            caller,
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=kinds,
        )
        offered = {(row["InstanceType"], row["Location"]) for row in rows}
        subnets = [{"Name": "subnet-id", "Values": sorted({row.subnet for row in offers})}]
        zones = {
            row["SubnetId"]: row["AvailabilityZone"]
            for row in self._pages(caller, "describe_subnets", "Subnets", Filters=subnets)
        }
        self.dropped = {row.offering: why for row in offers if (why := _impossible(row, offered, zones))}
        self._preflight_at_s = now_s

    def _read_instances(self, now_s: float) -> None:
        listing = self._listings[self._config.region]
        quiet = listing.settled and now_s >= self._unsettled_until_s
        every_s = self._config.describe_every_s if quiet else self._config.unsettled_every_s
        if now_s - listing.at_s >= every_s:
            self._list(self._config.region, now_s)

    def _sweep(self, region: str, now_s: float) -> None:
        if now_s - self._listings[region].at_s >= self._config.sweep_every_s:
            self._list(region, now_s)

    def _list(self, region: str, now_s: float) -> None:
        ours = [{"Name": f"tag:{words.TAG_CLUSTER}", "Values": [self._config.cluster]}]
        rows = self._pages(self._callers[region], "describe_instances", "Reservations", Filters=ours)
        self._listings[region].read((row for group in rows for row in group["Instances"]), now_s)

    def _read_reservations(self, now_s: float) -> None:
        if not any(row.reservation for row in self._config.offerings):
            return
        if now_s - self._reservations.at_s < self._config.reservations_every_s:
            return
        caller = self._callers[self._config.region]
        rows = self._pages(caller, "describe_capacity_reservations", "CapacityReservations")
        self._reservations.read(rows, now_s)

    @staticmethod
    def _pages(caller: Caller, operation: str, key: str, **params: Any) -> list[Row]:
        rows: list[Row] = []
        after: dict[str, Any] = {}
        while True:
            answer = caller.read(operation, **params, MaxResults=PAGE, **after)
            rows += answer.get(key, ())
            if not answer.get("NextToken"):
                return rows
            after = {"NextToken": answer["NextToken"]}

    def _take_notices(self) -> None:
        for event in self._notices():
            instance_id = event.get("detail", {}).get("instance-id")
            if event.get("detail-type") in NOTICES and instance_id:
                told_at_s = datetime.fromisoformat(event["time"]).timestamp()
                self._notice_at_s.setdefault(instance_id, told_at_s + self._config.spot_notice_s)

    def _offerings(self) -> Iterator[Offering]:
        for offer in self._config.offerings:
            row = self._reservations.rows.get(offer.reservation)
            gone = offer.reservation and (row is None or row["State"] in words.CLOSED_STATES)
            if offer.offering not in self.dropped and not gone:
                yield words.offering(self._config, offer, row)

    def _instances(self, now_s: float) -> Iterator[CloudInstance]:
        live = {key for listing in self._listings.values() for key in listing.rows}
        self._notice_at_s = {key: at_s for key, at_s in self._notice_at_s.items() if key in live}
        for listing in self._listings.values():
            for key, row in listing.rows.items():
                yield words.instance(self._landed(row), self._notice(key, row, now_s), self._config, now_s)

    def _notice(self, instance_id: str, row: Row, now_s: float) -> float | None:
        """When the instance must be empty: its own notice, or its block's end once that is announced."""
        told_at_s = self._notice_at_s.get(instance_id)
        block = self._reservations.rows.get(row.get("CapacityReservationId") or "", {})
        if block.get("ReservationType") != "capacity-block":
            return told_at_s
        stops_at_s = float(block["EndDate"].timestamp()) - words.BLOCK_STOP_S
        ends = now_s >= stops_at_s - BLOCK_NOTICE_S
        return min(stops_at_s, told_at_s or stops_at_s) if ends else told_at_s

    def _landed(self, row: Row) -> Row:
        """The row with the offering it is really of: an instance outside the reservation meant is paid on demand."""
        offer = self._offers.get(words.tags(row).get(words.TAG_OFFERING, ""))
        if offer is None or row.get("CapacityReservationId", "") == offer.reservation:
            return row
        if offer.market == "odcr" and offer.reservation not in self._reservations.rows:
            return row  # a cancelled reservation leaves its instances running
        place = (offer.instance_type, offer.zone, "on_demand")
        real = [o.offering for o in self._config.offerings if (o.instance_type, o.zone, o.market) == place]
        return row | {"Tags": [*row["Tags"], {"Key": words.TAG_OFFERING, "Value": real[0]}]} if real else row

    # ---- launch -------------------------------------------------------------------------------------------------
    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        """See ports.Cloud. An answer that leaves it open is settled by the same call again, then by its token."""
        offer = self._offers.get(offering)
        if offer is None:
            known = ", ".join(sorted(self._offers))
            raise Misconfigured(f"no offering {offering!r}; there are {known}", "InvalidParameterValue")
        self._check_open(offer)
        with self._lock:
            deadline_at_s = self._deadline_at_s.setdefault(
                f"{offering}\0{token}", self._now_s() + self._config.max_life_s
            )
        params = words.launch_params(self._config, offer, count, token, deadline_at_s)
        try:
            rows = self._run(offer, params)
        except Transient:
            rows = self._settle(offer, params)
        except PortError as error:
            self._shut_after(offer, error)
            raise
        with self._lock:
            for row in rows:
                self._listings[self._config.region].put(row)
            self._reservations.took(offer.reservation, len(rows))
        return tuple(row["InstanceId"] for row in rows)

    def _run(self, offer: OfferConfig, params: dict[str, Any]) -> list[Row]:
        answer = self._callers[self._config.region].write("run_instances", offer.offering, **params)
        rows: list[Row] = answer.get("Instances", [])
        if not rows:
            raise Transient("the answer to a launch names no instance", "EmptyAnswer")
        return rows

    def _settle(self, offer: OfferConfig, params: dict[str, Any]) -> list[Row]:
        self._unsettled_until_s = self._now_s() + SETTLE_S
        try:
            return self._run(offer, params)
        except Transient as error:
            token = [{"Name": "client-token", "Values": [params["ClientToken"]]}]
            with suppress(PortError):
                groups = self._pages(
                    self._callers[self._config.region], "describe_instances", "Reservations", Filters=token
                )
                if rows := [row for group in groups for row in group["Instances"]]:
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
        if offer.reservation and self._reservations.rows and (why := self._reservations.refusal(offer.reservation)):
            words_ = f"reservation {offer.reservation} {why}"
            raise NoCapacity(offer.offering, words_, "ReservationCapacityExceeded")

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

    # ---- terminate ----------------------------------------------------------------------------------------------
    def terminate(self, instance_id: str) -> None:
        """See ports.Cloud. One instance a call: EC2 refuses all of a call for one that is protected."""
        region = next((name for name, rows in self._listings.items() if instance_id in rows.rows), self._config.region)
        row = self._listings[region].rows.get(instance_id)
        try:
            answer = self._callers[region].write("terminate_instances", InstanceIds=[instance_id])
        except NotFound as error:
            if row is not None and self._now_s() - row["LaunchTime"].timestamp() < YOUNG_S:
                raise Transient(f"not to be found yet: {error}", error.code) from error
            raise
        with self._lock:
            for change in answer.get("TerminatingInstances", ()):
                self._listings[region].state(change["InstanceId"], change["CurrentState"]["Name"])
            if row is not None and row.get("CapacityReservationId"):
                self._reservations.at_s = float("-inf")


def _impossible(offer: OfferConfig, offered: set[tuple[str, str]], zones: Mapping[str, str]) -> str:
    if (offer.instance_type, offer.zone) not in offered:
        return f"{offer.instance_type} is not offered in {offer.zone}"
    if offer.subnet not in zones:
        return f"subnet {offer.subnet} does not exist"
    return "" if zones[offer.subnet] == offer.zone else f"subnet {offer.subnet} is in {zones[offer.subnet]}"


def _shutters(offer: OfferConfig) -> dict[str, PortError]:
    """What may be shut for an offering, and what is said then."""
    full = Refused(f"subnet {offer.subnet} has no free address", "InsufficientFreeAddressesInSubnet")
    rows: dict[str, PortError] = {f"subnet {offer.subnet}": full}
    if offer.placement_group:
        words_ = f"placement group {offer.placement_group} is full in {offer.zone}"
        rows[f"group {offer.placement_group} {offer.zone}"] = NoCapacity(offer.offering, words_)
    if offer.market == "spot":
        rows["market spot"] = Misconfigured("the account may not use spot; create its service-linked role", NO_SPOT)
    return rows
