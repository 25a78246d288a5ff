"""What happens to an account from outside: pools change, notices are given, calls go wrong. May not do I/O.

Acts for the server's `/weather` door: JSON objects in and out. Each raises Refusal, ValueError, KeyError or TypeError.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from autoscaler.core.model import CloudState
from chaos.ec2_server.faults import Fault
from chaos.ec2_server.server import Ec2Server
from chaos.ec2_server.state import Instance, Pool, Refusal, Region

Given = dict[str, Any]
STATES: dict[str, CloudState] = {
    "pending": "pending",
    "running": "running",
    "shutting-down": "terminating",
    "terminated": "terminated",
}
MARKETS = {"on-demand": "on_demand", "spot": "spot", "capacity-block": "block"}


class Weather:
    """`advance(by_s)` moves a virtual clock; there is none on a wall clock. A region is the first one if not named."""

    def __init__(self, core: Ec2Server, advance: Callable[[float], None] | None = None) -> None:
        self._core = core
        self._advance = advance

    def acts(self) -> Mapping[str, Callable[[Given], dict[str, Any]]]:
        """By name."""
        return {
            "pool": self.pool,
            "interrupt": self.interrupt,
            "advise": self.advise,
            "fault": self.fault,
            "deny": self.deny,
            "expire": self.expire,
            "advance": self.advance,
            "log": self.log,
            "instances": self.instances,
        }

    def pool(self, given: Given) -> dict[str, Any]:
        """``{instance_type, zone, market, count}``: what a pool holds from now on; nothing is stopped."""
        market = given.get("market", "on-demand")
        pool = Pool(given["instance_type"], given["zone"], market)
        if pool not in self._region(given).pools:
            raise ValueError(f"no pool of {pool.instance_type} {market} in {pool.zone}")
        self._region(given).pools[pool] = int(given["count"])
        return {}

    def interrupt(self, given: Given) -> dict[str, Any]:
        """``{instance_id, notice_s}``: the instance gets its notice; answers when it is taken."""
        region, instance = self._instance(given)
        at_s = region.interrupt(instance.instance_id, self._core.now_s(), float(given.get("notice_s", 120.0)))
        return {"at_s": at_s}

    def advise(self, given: Given) -> dict[str, Any]:
        """``{instance_id}``: a rebalance recommendation."""
        region, instance = self._instance(given)
        region.advise(instance.instance_id, self._core.now_s())
        return {}

    def fault(self, given: Given) -> dict[str, Any]:
        """The next calls go wrong; see `Fault`."""
        self._core.faults.append(Fault(**given))
        return {}

    def deny(self, given: Given) -> dict[str, Any]:
        """``{action, denied}``: the permission for one action is taken away, or given back."""
        change = set.add if given.get("denied", True) else set.discard
        change(self._region(given).denied, given["action"])
        return {}

    def expire(self, given: Given) -> dict[str, Any]:
        """``{key}``: the access key is no longer good."""
        self._core.account.keys[given["key"]].expires_at_s = self._core.now_s()
        return {}

    def advance(self, given: Given) -> dict[str, Any]:
        """``{by_s}``: time passes, on a virtual clock."""
        if self._advance is None:
            raise ValueError("the clock is the wall's")
        self._advance(float(given["by_s"]))
        return {"now_s": self._core.now_s()}

    def log(self, given: Given) -> dict[str, Any]:
        """How often each action was called."""
        return dict(Counter(action for _, action in self._region(given).log))

    def instances(self, given: Given) -> dict[str, Any]:
        """All instances of a region as they are, in the controller's words."""
        now_s = self._core.now_s()
        rows = self._region(given).instances.values()
        return {"instances": [listed(row, now_s) for row in rows]}

    def _region(self, given: Given) -> Region:
        regions = self._core.account.regions
        return regions[given.get("region", next(iter(regions)))]

    def _instance(self, given: Given) -> tuple[Region, Instance]:
        for region in self._core.account.regions.values():
            if given["instance_id"] in region.instances:
                return region, region.instances[given["instance_id"]]
        raise Refusal("InvalidInstanceID.NotFound", f"no instance {given['instance_id']!r}")


def listed(row: Instance, now_s: float) -> dict[str, Any]:
    """An instance in the words of `CloudInstance`, as it is and without lag."""
    noticed = row.stops_at_s < math.inf and row.reason[0] == "Server.SpotInstanceTermination"
    return {
        "instance_id": row.instance_id,
        "offering": offering(row),
        "token": row.tags.get("qm:token", ""),
        "state": STATES[row.state(now_s)],
        "launched_at_s": row.launched_at_s,
        "reclaim_at_s": row.stops_at_s if noticed else None,
    }


def offering(row: Instance) -> str:
    """Where an instance is, as ``cloud/ec2.yaml`` has its offerings named."""
    market = "odcr" if row.reservation and row.market == "on-demand" else MARKETS.get(row.market, "interruptible")
    return "/".join(part for part in (row.instance_type, row.zone, market, row.reservation) if part)
