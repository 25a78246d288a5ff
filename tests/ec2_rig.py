"""The EC2 adapter over the test EC2: real boto3, in-process or over a socket; time passes when somebody waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from boto3.session import Session
from botocore.config import Config

from autoscaler.adapters.ec2 import Ec2Cloud, Ec2Config, OfferConfig
from autoscaler.adapters.ec2.calls import READ_ATTEMPTS, Clients
from chaos.ec2_server import Account, Ec2Server, Fault, Region
from chaos.ec2_server.http import HttpServer
from chaos.ec2_server.inproc import Switch, VirtualClock, sleeping_on
from chaos.ec2_server.state import Pool

BIG, HUGE = "g6e.12xlarge", "p5.48xlarge"
EAST, WEST = "us-east-1", "us-west-2"
A, B = "us-east-1a", "us-east-1b"
SWITCH = Switch()
SOCKET_TIMEOUT_S = 0.4
Wire = Literal["inproc", "socket"]


@cache
def door() -> HttpServer:
    """The one socket of all tests; which server answers there may change."""
    made = HttpServer(Ec2Server(Account({}), VirtualClock().now_s))
    made.__enter__()
    return made


@cache
def client(service: str, region: str, wire: Wire = "inproc", attempts: int = 1, secret: str = "test") -> Any:
    """A client of boto3's with the test's key. Slow to make, so made once."""
    config = Config(
        retries={"mode": "standard", "total_max_attempts": attempts}, read_timeout=SOCKET_TIMEOUT_S, proxies={}
    )
    made = Session(aws_access_key_id="test", aws_secret_access_key=secret).client(
        service, region_name=region, config=config, endpoint_url=door().url if wire == "socket" else None
    )
    if wire == "inproc":
        SWITCH.attach(made)
    return made


@cache
def clients(region: str, wire: Wire = "inproc") -> Clients:
    """Made once; where they lead is the switch's or the door's matter."""
    return Clients(client("ec2", region, wire, READ_ATTEMPTS), client("ec2", region, wire))


def region(name: str = EAST, **changes: Any) -> Region:
    """A region with three on-demand and two spot instances of BIG in zone A, nine on demand in zone B."""
    rows: dict[str, Any] = {
        "types": {BIG: 48, HUGE: 192},
        "pools": {Pool(BIG, A): 3, Pool(BIG, B): 9, Pool(BIG, A, "spot"): 2},
        "subnets": {"subnet-a": (A, 200), "subnet-b": (B, 200)},
        "templates": {"nodes": {"ImageId": "ami-1"}},
        "boot_s": 0.2,
        "stopping_s": 0.2,
    }
    return Region(name=name, **(rows | changes))


def offer(name: str, zone: str = A, market: str = "on_demand", **changes: Any) -> OfferConfig:
    """An offering of BIG."""
    rows = {
        "offering": name,
        "instance_type": BIG,
        "zone": zone,
        "subnet": f"subnet-{zone[-1]}",
        "market": market,
        "gpus": 4,
        "price_usd_per_h": 10.5,
    }
    return OfferConfig.model_validate(rows | changes)


OFFERS = (offer("od-a"), offer("od-b", B), offer("spot-a", A, "spot"))


@dataclass
class Ec2Rig:
    """An account with a controller's view of it."""

    server: Ec2Server
    clock: VirtualClock
    cloud: Ec2Cloud
    _told: int = field(default=0)

    @property
    def region(self) -> Region:
        """What the active region hides."""
        return self.server.account.regions[EAST]

    def fault(self, kind: Any, action: str, times: int = 1, **more: Any) -> None:
        """The next calls of `action` go wrong."""
        self.server.faults.append(Fault(kind, action, times, **more))

    def calls(self, action: str = "") -> int:
        """How many of a kind the active region has seen."""
        return sum(name == action or not action for _, name in self.region.log)

    def states(self) -> dict[str, str]:
        """State of each listed instance."""
        return {row.instance_id: row.state for row in self.cloud.describe(self.clock.now_s()).instances}


@contextmanager
def ec2(
    *regions: Region,
    offers: tuple[OfferConfig, ...] = OFFERS,
    clock: VirtualClock | None = None,
    wire: Wire = "inproc",
    **changes: Any,
) -> Iterator[Ec2Rig]:
    """A rig; the active region first. `changes` are of the adapter's config."""
    clock = clock or VirtualClock()
    names = {each.name: each for each in regions or (region(),)}
    server = Ec2Server(Account(names), clock.now_s)
    rows = {"cluster": "test", "region": EAST, "launch_template": "nodes", "offerings": offers}
    config = Ec2Config.model_validate(rows | {"sweep_regions": tuple(name for name in names if name != EAST)} | changes)
    if wire == "socket":
        door().core = server
    else:
        SWITCH.server, SWITCH.clock = server, clock

    def notices() -> list[dict[str, Any]]:
        taken, server.account.regions[EAST].notices = server.account.regions[EAST].notices, []
        return taken

    with sleeping_on(clock):
        cloud = Ec2Cloud(config, clock.now_s, clients=lambda name: clients(name, wire), notices=notices)
        try:
            yield Ec2Rig(server, clock, cloud)
        finally:
            cloud.close()
