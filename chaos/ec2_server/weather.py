"""What happens to an account from outside: pools change, notices are given, calls go wrong. May not do I/O.

Acts for the server's `/weather` door: JSON objects in and out. Each raises Refusal, ValueError, KeyError or TypeError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from chaos.ec2_server.faults import Fault
from chaos.ec2_server.server import Ec2Server
from chaos.ec2_server.state import Instance, Pool, Refusal, Region

Given = dict[str, Any]


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

    def _region(self, given: Given) -> Region:
        regions = self._core.account.regions
        return regions[given.get("region", next(iter(regions)))]

    def _instance(self, given: Given) -> tuple[Region, Instance]:
        for region in self._core.account.regions.values():
            if given["instance_id"] in region.instances:
                return region, region.instances[given["instance_id"]]
        raise Refusal("InvalidInstanceID.NotFound", f"no instance {given['instance_id']!r}")
