"""How many of a service's requests kept their limits over the last hour, as the gateways told it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from autoscaler.core.model import Measured, Missing, Observation, ServiceLoad

WINDOW_S = 3600.0
GAP_S = 300.0  # between observations beyond which a rate says nothing of the time between them


@dataclass(slots=True)
class Kept:
    """Sums over the window of requests that `ended` and of those that were `met`."""

    rows: deque[tuple[float, float, float]] = field(default_factory=deque)
    ended: float = 0.0
    met: float = 0.0

    def add(self, at_s: float, ended: float, met: float) -> None:
        """So many until `at_s`; what is older than the window is forgotten."""
        self.rows.append((at_s, ended, met))
        self.ended, self.met = self.ended + ended, self.met + met
        while self.rows[0][0] <= at_s - WINDOW_S:
            _, old_ended, old_met = self.rows.popleft()
            self.ended, self.met = self.ended - old_ended, self.met - old_met

    def fraction(self) -> float | None:
        """The part that was met, None before any request ended."""
        return min(1.0, max(0.0, self.met / self.ended)) if self.ended > 1e-6 else None


def counted(seen: Observation, before: Observation | None) -> list[tuple[ServiceLoad, float, float]]:
    """(load, ended, met) of every service that was seen, since the observation before."""
    over_s = seen.at_s - before.at_s if before is not None else 0.0
    if isinstance(seen.loads, Missing) or not 0.0 < over_s <= GAP_S:
        return []
    return [
        (load, load.ended_rps.value * over_s, load.met_rps.value * over_s)
        for load in seen.loads
        if isinstance(load.ended_rps, Measured) and isinstance(load.met_rps, Measured)
    ]
