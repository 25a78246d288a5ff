"""The shortage: what happens to the supply during a run, by the run's clock.

May not touch the controller; it only plays the cloud's weather. At `DRY_AT` of the run the cheapest pool in use runs
dry, just before the load rises; at `RECLAIM_AT` one instance that serves gets a notice, and its pool keeps the loss.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from autoscaler.core.model import CloudInstance, CloudView, ServingView
from autoscaler.ports import PortError

DRY_AT = 0.30
RECLAIM_AT = 0.50
NOTICE_S = 120.0
RETRY_S = 1.0


class Weather(Protocol):
    """What the script needs of the local cloud (`autoscaler.adapters.local.LocalCloud`)."""

    def describe(self, now_s: float) -> CloudView:
        """Offerings and instances."""
        ...

    def set_supply(self, offering: str, count: int) -> None:
        """What the offering's pool can hold in all from now on."""
        ...

    def reclaim(self, instance_id: str, notice_s: float | None = None) -> float:
        """Give notice; returns the deadline."""
        ...


@dataclass(frozen=True, slots=True)
class Script:
    """`say` gets one line for everything that happens; `serving` is what Ray and Serve last showed."""

    cloud: Weather
    duration_s: float
    serving: Callable[[], ServingView | None]
    say: Callable[[str], None]

    async def run(self) -> None:
        """Play the script to its end. A step that finds nothing to act on is tried again until the run ends."""
        start_s = time.monotonic()
        await self._at(start_s, DRY_AT, self._go_dry)
        await self._at(start_s, RECLAIM_AT, self._reclaim)

    async def _at(self, start_s: float, fraction: float, step: Callable[[], bool]) -> None:
        await asyncio.sleep(max(0.0, start_s + fraction * self.duration_s - time.monotonic()))
        while time.monotonic() < start_s + self.duration_s:
            try:
                if await asyncio.to_thread(step):
                    return
            except PortError as error:
                self.say(f"the local cloud did not answer: {error}")
            await asyncio.sleep(RETRY_S)

    def _go_dry(self) -> bool:
        view = self.cloud.describe(time.time())
        used = in_use(view)
        rows = sorted((row for row in view.offerings if used[row.offering]), key=lambda row: row.price_usd_per_h)
        if not rows:
            return False
        self.cloud.set_supply(rows[0].offering, used[rows[0].offering])
        self.say(f"shortage: {rows[0].offering} has nothing left beyond the {used[rows[0].offering]} in use")
        return True

    def _reclaim(self) -> bool:
        view = self.cloud.describe(time.time())
        victim = pick_victim(view, self.serving())
        if victim is None:
            return False
        self.cloud.reclaim(victim.instance_id, NOTICE_S)
        self.cloud.set_supply(victim.offering, max(0, in_use(view)[victim.offering] - 1))
        self.say(f"reclaim: {victim.instance_id} ({victim.offering}) must be empty in {NOTICE_S:g} s")
        return True


def in_use(view: CloudView) -> Counter[str]:
    """Instances that occupy each offering."""
    return Counter(seen.offering for seen in view.instances if seen.state != "terminated")


def pick_victim(view: CloudView, serving: ServingView | None) -> CloudInstance | None:
    """A running instance with ready replicas and no notice: a spot one if there is any, then the oldest."""
    ready = {seen.instance_id for seen in serving.replicas if seen.state == "ready"} if serving is not None else set()
    markets = {row.offering: row.market for row in view.offerings}
    rows = [
        seen
        for seen in view.instances
        if seen.state == "running" and seen.reclaim_at_s is None and seen.instance_id in ready
    ]
    return min(rows, key=lambda seen: (markets[seen.offering] != "spot", seen.launched_at_s), default=None)
