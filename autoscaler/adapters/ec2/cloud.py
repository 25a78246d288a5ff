"""The Cloud port on EC2. May not decide anything; what it remembers are answers of EC2, to ask it seldom.

One region acquires, all configured ones are listed, so that an instance of this cluster is seen wherever it is. Every
launch names its reservation or refuses all, carries its tags and hard deadline, and is settled by its token.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autoscaler.adapters.ec2 import words
from autoscaler.adapters.ec2.calls import Bucket, Caller, Clients, connect
from autoscaler.adapters.ec2.config import Ec2Config, OfferConfig
from autoscaler.adapters.ec2.launching import Launcher
from autoscaler.adapters.ec2.listing import Listing, Reservations, Row
from autoscaler.adapters.ec2.notices import told
from autoscaler.adapters.ec2.quotas import Quotas
from autoscaler.core.model import CloudInstance, CloudView, Offering
from autoscaler.ports import FleetAnswer, NotFound, PortError, Tenure, Transient
from serve_apps.wire import NodeReport

YOUNG_S = 300.0  # a NotFound this soon after a launch is the listing's lag
PREFLIGHT_EVERY_S = 86_400.0
BLOCK_NOTICE_S = 600.0  # a block's end is announced 40 min ahead, 10 before its instances go

FAULT_DRAIN_S = 300.0  # a node with a fatal fault is given up within this

Notices = Callable[[], Iterable[Mapping[str, Any]]]
Notes = Callable[[], Mapping[str, NodeReport]]


class Ec2Cloud:
    """`clients(region)` connects; `notices()` gives the EventBridge events since it was last called, `notes()` what
    nodes say of themselves.

    `unknown` counts the error codes that no table holds, `dropped` says why a configured offering is not offered.
    """

    def __init__(
        self,
        config: Ec2Config,
        now_s: Callable[[], float],
        *,
        clients: Callable[[str], Clients] = connect,
        notices: Notices = tuple,
        notes: Notes = dict,
    ) -> None:
        self._config = config
        self._now_s = now_s
        self._notices = notices
        self._offers = {row.offering: row for row in config.offerings}
        self._callers = {name: self._caller(name, clients) for name in (config.region, *config.sweep_regions)}
        self._listings = {name: Listing() for name in self._callers}
        self._reservations = Reservations()
        self._notice_at_s: dict[str, float] = {}
        self._quotas = Quotas(config.offerings)
        self._launcher = Launcher(
            config,
            self._callers[config.region],
            self._listings[config.region],
            self._reservations,
            self._quotas,
            now_s,
        )
        self._notes = notes
        self._fault: dict[str, str] = {}
        self._progress: dict[str, float] = {}
        self._tenure: Tenure | None = None
        self._preflight_at_s = float("-inf")
        self._lock = threading.RLock()
        self.dropped: dict[str, str] = {}

    def _caller(self, region: str, clients: Callable[[str], Clients]) -> Caller:
        bucket = Bucket(float(self._config.calls_burst), self._config.calls_per_s, self._now_s)
        return Caller(clients(region), bucket)

    def hold(self, tenure: Tenure) -> None:
        """From now on launch and terminate for whoever holds `tenure` only. Without it nobody else acts."""
        self._tenure = self._launcher.tenure = tenure

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
            self._take_notes(now_s)
            return CloudView(at_s=now_s, offerings=tuple(self._offerings()), instances=tuple(self._instances(now_s)))

    def _preflight(self, now_s: float) -> None:
        """Offerings that can not be are dropped: a type not offered in the zone, a subnet that is not in it."""
        if now_s - self._preflight_at_s < PREFLIGHT_EVERY_S:
            return
        offers, caller = self._config.offerings, self._callers[self._config.region]
        kinds = [{"Name": "instance-type", "Values": sorted({row.instance_type for row in offers})}]
        rows = caller.pages(
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=kinds,
        )
        offered = {(row["InstanceType"], row["Location"]) for row in rows}
        subnets = [{"Name": "subnet-id", "Values": sorted({row.subnet for row in offers})}]
        zones = {
            row["SubnetId"]: row["AvailabilityZone"]
            for row in caller.pages("describe_subnets", "Subnets", Filters=subnets)
        }
        self.dropped = {row.offering: why for row in offers if (why := _impossible(row, offered, zones))}
        with suppress(PortError):  # without limits EC2 alone says no
            self._quotas.read(caller.quotas())
        self._preflight_at_s = now_s

    def _read_instances(self, now_s: float) -> None:
        listing = self._listings[self._config.region]
        quiet = listing.settled and now_s >= self._launcher.unsettled_until_s
        every_s = self._config.describe_every_s if quiet else self._config.unsettled_every_s
        if now_s - listing.at_s >= every_s:
            self._list(self._config.region, now_s)

    def _sweep(self, region: str, now_s: float) -> None:
        if now_s - self._listings[region].at_s >= self._config.sweep_every_s:
            self._list(region, now_s)

    def _list(self, region: str, now_s: float) -> None:
        ours = [{"Name": f"tag:{words.TAG_CLUSTER}", "Values": [self._config.cluster]}]
        self._listings[region].read(self._callers[region].instances(ours), now_s)

    def _read_reservations(self, now_s: float) -> None:
        if not any(row.reservation for row in self._config.offerings):
            return
        if now_s - self._reservations.at_s < self._config.reservations_every_s:
            return
        caller = self._callers[self._config.region]
        rows = caller.pages("describe_capacity_reservations", "CapacityReservations")
        self._reservations.read(rows, now_s)

    def _take_notices(self) -> None:
        """An event may make a listing that is not due be read at the next look."""
        said = told(self._notices(), self._config.spot_notice_s)
        for instance_id, at_s in said.reclaim_at_s.items():
            self._notice_at_s.setdefault(instance_id, at_s)
        if said.instances_changed:
            self._listings[self._config.region].at_s = float("-inf")
        if said.reservations_changed:
            self._reservations.at_s = float("-inf")

    def _take_notes(self, now_s: float) -> None:
        """A node's own notice, and a fault after which it can not serve: it must be empty soon, as if reclaimed, which
        says nothing about its type or pool.
        """
        for instance_id, note in self._notes().items():
            if note.reclaim_at_s is not None:
                known_s = self._notice_at_s.get(instance_id, note.reclaim_at_s)
                self._notice_at_s[instance_id] = min(known_s, note.reclaim_at_s)
            if note.progress_bytes is not None:
                self._progress[instance_id] = note.progress_bytes
            if note.fault and instance_id not in self._fault:
                self._fault[instance_id] = note.fault
                self._notice_at_s.setdefault(instance_id, now_s + FAULT_DRAIN_S)

    def _offerings(self) -> Iterator[Offering]:
        for offer in self._config.offerings:
            row = self._reservations.rows.get(offer.reservation)
            gone = offer.reservation and (row is None or row["State"] in words.CLOSED_STATES)
            if offer.offering not in self.dropped and not gone:
                yield words.offering(self._config, offer, row)

    def _instances(self, now_s: float) -> Iterator[CloudInstance]:
        live = {key for listing in self._listings.values() for key in listing.rows}
        self._notice_at_s = {key: at_s for key, at_s in self._notice_at_s.items() if key in live}
        self._fault = {key: words_ for key, words_ in self._fault.items() if key in live}
        self._progress = {key: count for key, count in self._progress.items() if key in live}
        for listing in self._listings.values():
            for key, row in listing.rows.items():
                notice_at_s = self._notice(key, row, now_s)
                seen = words.instance(row, self._offering_of(row), notice_at_s, self._config, now_s)
                seen = replace(seen, progress_bytes=self._progress.get(key))
                yield replace(seen, state_reason=f"NodeFault: {fault}") if (fault := self._fault.get(key)) else seen

    def _notice(self, instance_id: str, row: Row, now_s: float) -> float | None:
        """When the instance must be empty: its own notice, or its block's end once that is announced."""
        told_at_s = self._notice_at_s.get(instance_id)
        block = self._reservations.rows.get(row.get("CapacityReservationId") or "", {})
        if block.get("ReservationType") != "capacity-block":
            return told_at_s
        stops_at_s = float(block["EndDate"].timestamp()) - words.BLOCK_STOP_S
        ends = now_s >= stops_at_s - BLOCK_NOTICE_S
        return min(stops_at_s, told_at_s or stops_at_s) if ends else told_at_s

    def _offering_of(self, row: Row) -> str:
        """What the instance really is of: one outside the reservation meant is paid on demand."""
        meant = words.tags(row).get(words.TAG_OFFERING, "")
        offer = self._offers.get(meant)
        if offer and offer.market == "odcr" and offer.reservation not in self._reservations.rows:
            return meant  # a cancelled reservation leaves its instances running
        return words.landed(row, self._config.offerings) or meant

    # ---- launch -------------------------------------------------------------------------------------------------
    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        """See ports.Cloud."""
        return self._launcher.launch(offering, count, token)

    def together(self, offerings: Sequence[str]) -> tuple[str, ...]:
        """See ports.FleetCloud."""
        return self._launcher.together(offerings)

    def launch_any(self, offerings: Sequence[str], count: int, token: str) -> FleetAnswer:
        """See ports.FleetCloud."""
        return self._launcher.launch_any(offerings, count, token)

    def last_words(self, instance_id: str) -> str:
        """See ports.FleetCloud."""
        with suppress(PortError):
            answer = self._callers[self._region_of(instance_id)].read(
                "get_console_output", InstanceId=instance_id, Latest=True
            )
            return words.console_end(answer.get("Output", ""))
        return ""

    # ---- terminate ----------------------------------------------------------------------------------------------
    def terminate(self, instance_id: str) -> None:
        """See ports.Cloud. One instance a call: EC2 refuses all of a call for one that is protected."""
        region = self._region_of(instance_id)
        row = self._listings[region].rows.get(instance_id)
        if self._tenure is not None:
            self._tenure.check()
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

    def _region_of(self, instance_id: str) -> str:
        return next((name for name, rows in self._listings.items() if instance_id in rows.rows), self._config.region)


def _impossible(offer: OfferConfig, offered: set[tuple[str, str]], zones: Mapping[str, str]) -> str:
    if (offer.instance_type, offer.zone) not in offered:
        return f"{offer.instance_type} is not offered in {offer.zone}"
    if offer.subnet not in zones:
        return f"subnet {offer.subnet} does not exist"
    return "" if zones[offer.subnet] == offer.zone else f"subnet {offer.subnet} is in {zones[offer.subnet]}"
