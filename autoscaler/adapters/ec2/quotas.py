"""What the account's limits leave, by Service Quotas: vCPUs by family and market. May not launch anything.

Quotas that cannot be read are not known, and then EC2 alone says no. Others in the account count too, so that what is
left here is the most, never a promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoscaler.adapters.ec2 import words
from autoscaler.adapters.ec2.config import OfferConfig
from autoscaler.core.learn import family
from autoscaler.ports import Quota

# Source: Service Quotas' codes of "Running (On-Demand|All Spot) P|G and VT instances".
CODES = {
    "L-417A185B": ("p", "on_demand"),
    "L-DB2E81BA": ("g", "on_demand"),
    "L-7212CCBC": ("p", "spot"),
    "L-3819A6DF": ("g", "spot"),
}
FAMILIES = {"p": "p", "g": "g", "gr": "g", "vt": "g"}
UNCOUNTED = ("block", "interruptible")  # paid for otherwise; the others count whether reserved or not


def quota_of(offer: OfferConfig) -> tuple[str, str] | None:
    """The quota that an instance of `offer` takes vCPUs from; None for one that no limit of ours counts."""
    letters = FAMILIES.get(family(offer.instance_type))
    if letters is None or offer.market in UNCOUNTED:
        return None
    return letters, "spot" if offer.market == "spot" else "on_demand"


@dataclass
class Quotas:
    """Limits in vCPU by family and market, as last read."""

    offers: tuple[OfferConfig, ...]
    vcpus: dict[tuple[str, str], float] = field(default_factory=dict)

    def read(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of ListServiceQuotas."""
        self.vcpus = {CODES[row["QuotaCode"]]: float(row["Value"]) for row in rows if row.get("QuotaCode") in CODES}

    def used(self, quota: tuple[str, str], rows: Iterable[Mapping[str, Any]]) -> int:
        """vCPUs that instances of a listing take from `quota`."""
        by_name = {each.offering: each for each in self.offers}
        live = (row for row in rows if words.STATES[row["State"]["Name"]] in ("pending", "running"))
        offers = (by_name.get(words.landed(row, self.offers)) for row in live)
        return sum(each.vcpus for each in offers if each is not None and quota_of(each) == quota)

    def room(self, offer: OfferConfig, count: int, rows: Iterable[Mapping[str, Any]]) -> int:
        """As many of `count` instances as the limit leaves. Raises Quota when that is none."""
        quota = quota_of(offer)
        limit = self.vcpus.get(quota) if quota else None
        if quota is None or limit is None or not offer.vcpus:
            return count
        left = int(limit - self.used(quota, rows)) // offer.vcpus
        if left < 1:
            code = "MaxSpotInstanceCountExceeded" if offer.market == "spot" else "VcpuLimitExceeded"
            raise Quota(f"the quota of {quota[0].upper()} {quota[1]} instances is {limit:.0f} vCPU, all in use", code)
        return min(count, left)
