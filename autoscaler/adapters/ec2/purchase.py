"""Buying a Capacity Block, which nobody can give back: EC2 takes no client token here, so nothing is ever sent again.

A purchase has a name, and a name is sent once, whatever becomes of it. The name is on disk before the call and is a tag
of what is bought, so that an open answer is settled by looking, also by the next process. May not decide what to buy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoscaler.adapters.ec2.calls import Caller
from autoscaler.ports import Misconfigured, NotFound, PortError, Refused, Throttled, Transient

TAG_PURCHASE = "qm:purchase"
LAG_S = 600.0  # a purchase that no listing shows by then was not made
PAGE = 1000
OWN_LIMIT = "OwnCallLimit"  # the only way to be throttled that says that nothing was sent


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForSale:
    """A Capacity Block on offer. Instants are UTC seconds; `fee_usd` is paid at once, for all of it."""

    offering_id: str
    instance_type: str
    zone: str
    count: int
    start_at_s: float
    end_at_s: float
    fee_usd: float


def for_sale(caller: Caller, instance_type: str, count: int, hours: int) -> tuple[BlockForSale, ...]:
    """Blocks of `count` instances for `hours`, the earliest first. Raises as ports."""
    rows: list[dict[str, Any]] = []
    wish = {"InstanceType": instance_type, "InstanceCount": count, "CapacityDurationHours": hours}
    after: dict[str, Any] = {}
    while True:
        answer = caller.read("describe_capacity_block_offerings", **wish, **after)
        rows += answer.get("CapacityBlockOfferings", ())
        if not answer.get("NextToken"):
            break
        after = {"NextToken": answer["NextToken"]}
    found = (
        BlockForSale(
            offering_id=row["CapacityBlockOfferingId"],
            instance_type=row["InstanceType"],
            zone=row["AvailabilityZone"],
            count=row["InstanceCount"],
            start_at_s=row["StartDate"].timestamp(),
            end_at_s=row["EndDate"].timestamp(),
            fee_usd=float(row["UpfrontFee"]),
        )
        for row in rows
    )
    return tuple(sorted(found, key=lambda block: (block.start_at_s, block.fee_usd, block.offering_id)))


@dataclass(frozen=True, slots=True)
class Purchases:
    """The purchases made from one folder, one file for each name."""

    caller: Caller
    folder: Path
    now_s: Callable[[], float]

    def buy(self, name: str, block: BlockForSale) -> str:
        """The id of the reservation that the purchase `name` bought, now or before.

        Raises Transient while it is not known whether it was made (ask again, the same way: it is only looked for),
        NotFound when it was certainly not, Refused when the name was refused or stands for another purchase: these want
        a new name to be tried anew. Throttled by our own limit: nothing was sent, the name is still good.
        """
        if not name or "/" in name or name.startswith("."):
            raise Misconfigured(f"purchase name {name!r}: give letters, digits and dashes", "InvalidParameterValue")
        path = self.folder / f"{name}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        if known and known["offering"] != block.offering_id:
            raise Refused(f"{name!r} is the purchase of {known['offering']}; give another name", "NameTaken")
        if bought := known.get("reservation") or self._listed(name):
            self._write(path, block, reservation=bought)
            return str(bought)
        if known:
            raise self._unsold(name, known)
        self._write(path, block, sent_at_s=self.now_s())
        bought = self._send(name, path, block)
        self._write(path, block, reservation=bought)
        return bought

    def _send(self, name: str, path: Path, block: BlockForSale) -> str:
        tags = [{"Key": TAG_PURCHASE, "Value": name}]
        try:
            answer = self.caller.write(
                "purchase_capacity_block",
                CapacityBlockOfferingId=block.offering_id,
                InstancePlatform="Linux/UNIX",
                TagSpecifications=[{"ResourceType": "capacity-reservation", "Tags": tags}],
            )
        except Throttled as error:
            if error.code == OWN_LIMIT:
                path.unlink()
            raise
        except Transient as error:
            raise Transient(f"whether {name!r} was bought is not known yet: {error}", error.code) from error
        except PortError as error:
            self._write(path, block, refused=error.code)
            raise
        return str(answer["CapacityReservation"]["CapacityReservationId"])

    def _unsold(self, name: str, known: dict[str, Any]) -> PortError:
        """What is to be said of a purchase that was sent and that no listing shows."""
        if "refused" in known:
            return Refused(f"{name!r} was refused ({known['refused']}); give another name to try again", "NameTaken")
        if self.now_s() < known["sent_at_s"] + LAG_S:
            return Transient(f"whether {name!r} was bought is not known yet; look again later", "PurchaseOpen")
        return NotFound(f"{name!r} was not bought; give another name to try again", "PurchaseNotMade")

    def _listed(self, name: str) -> str:
        """The reservation that carries the name; empty when none is listed."""
        tag = [{"Name": f"tag:{TAG_PURCHASE}", "Values": [name]}]
        rows = self.caller.read("describe_capacity_reservations", Filters=tag, MaxResults=PAGE)["CapacityReservations"]
        return str(rows[0]["CapacityReservationId"]) if rows else ""

    def _write(self, path: Path, block: BlockForSale, **known: object) -> None:
        """Durable before anything else happens."""
        text = json.dumps({"offering": block.offering_id, "fee_usd": block.fee_usd, **known})
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
