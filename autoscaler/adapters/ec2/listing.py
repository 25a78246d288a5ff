"""What one region's listings say, remembered: a listing lags and may step back, and what it forgets is not dead yet.

May not call EC2 itself. Rows are DescribeInstances' and DescribeCapacityReservations'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoscaler.adapters.ec2.words import STATES

Row = dict[str, Any]
AHEAD = ("scheduled", "pending")
DEAD_AFTER_S = 300.0
DEAD_AFTER_LISTINGS = 2
_RANK = {"pending": 0, "running": 1, "terminating": 2, "terminated": 3}


def rank(row: Mapping[str, Any]) -> int:
    """How far in its life the row shows an instance."""
    return _RANK[STATES[row["State"]["Name"]]]


@dataclass
class Listing:
    """Instances of a region. `at_s` is when it was last read."""

    rows: dict[str, Row] = field(default_factory=dict)
    at_s: float = float("-inf")
    _missing: dict[str, tuple[float, int]] = field(default_factory=dict)

    def put(self, row: Row) -> None:
        """One row more, from whatever call; never one that shows an earlier state than is known."""
        known = self.rows.get(row["InstanceId"])
        if known is None or rank(row) >= rank(known):
            self.rows[row["InstanceId"]] = row

    def state(self, instance_id: str, name: str) -> None:
        """The state that a call named."""
        if instance_id in self.rows:
            self.put(self.rows[instance_id] | {"State": {"Name": name}})

    def read(self, rows: Iterable[Row], now_s: float) -> None:
        """A whole listing. What it lacks is dropped after two listings and five minutes, at once when it had ended."""
        listed = {row["InstanceId"]: row for row in rows}
        for row in listed.values():
            self.put(row)
            self._missing.pop(row["InstanceId"], None)
        for key in [key for key in self.rows if key not in listed]:
            since_s, times = self._missing.get(key, (now_s, 0))
            self._missing[key] = (since_s, times + 1)
            dead = times + 1 >= DEAD_AFTER_LISTINGS and now_s - since_s > DEAD_AFTER_S
            if dead or rank(self.rows[key]) == _RANK["terminated"]:
                del self.rows[key], self._missing[key]
        self.at_s = now_s

    @property
    def settled(self) -> bool:
        """Whether every instance is listed, and neither starts nor ends."""
        return not self._missing and all(rank(row) in (1, 3) for row in self.rows.values())


@dataclass
class Reservations:
    """Reservations and blocks of the active region by id, and what is left of each."""

    rows: dict[str, Row] = field(default_factory=dict)
    at_s: float = float("-inf")

    def read(self, rows: Iterable[Row], now_s: float) -> None:
        """A whole listing."""
        self.rows, self.at_s = {row["CapacityReservationId"]: dict(row) for row in rows}, now_s

    def refusal(self, reservation: str, now_s: float) -> str:
        """Why nothing can be launched into it now, as far as is known; empty when that may be tried."""
        row = self.rows.get(reservation)
        if row is None:
            return "is not listed"
        if row["State"] in AHEAD and row["StartDate"].timestamp() <= now_s:
            return ""  # it has begun since it was listed
        if row["State"] != "active":
            return f"is {row['State']}"
        return "" if row["AvailableInstanceCount"] > 0 else "has no instance left"

    def took(self, reservation: str, count: int) -> None:
        """So many were launched into it."""
        if reservation in self.rows:
            left = self.rows[reservation]["AvailableInstanceCount"] - count
            self.rows[reservation]["AvailableInstanceCount"] = max(0, left)

    def full(self, reservation: str) -> None:
        """It refused: it has none until it is listed again."""
        if reservation in self.rows:
            self.rows[reservation]["AvailableInstanceCount"] = 0
