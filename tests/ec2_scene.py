"""The whole loop on the test EC2: the controller as it is, real boto3, and replicas that follow EC2's instances."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autoscaler.adapters.ec2 import OfferConfig
from autoscaler.core.model import CloudState
from chaos.ec2_server import Region
from chaos.ec2_server.state import Pool
from chaos.ec2_server.weather import STATES
from policies.model import PolicySet, Unit
from tests.ec2_rig import EAST, A, B, Ec2Rig, ec2, offer
from tests.fakes import FakeServing
from tests.scene import Scene, service, shapes_of, unit

SMALL, OTHER = "g6.2xlarge", "g5.2xlarge"  # one GPU each
MARKETS = {"on_demand": "on-demand", "spot": "spot"}


def place(name: str, zone: str = A, market: str = "on_demand", **changes: Any) -> OfferConfig:
    """An offering of one-GPU instances."""
    return offer(name, zone, market, **({"instance_type": SMALL, "gpus": 1, "price_usd_per_h": 1.0} | changes))


def hidden(pools: dict[Pool, int], **changes: Any) -> Region:
    """A region of one-GPU instances that run after half a minute."""
    rows: dict[str, Any] = {
        "name": EAST,
        "types": {SMALL: 8, OTHER: 8},
        "pools": pools,
        "subnets": {"subnet-a": (A, 200), "subnet-b": (B, 200)},
        "templates": {"nodes": {"ImageId": "ami-1"}},
        "boot_s": 30.0,
    }
    return Region(**(rows | changes))


@dataclass(frozen=True)
class Machine:
    """An instance as replicas see it."""

    instance_id: str
    offering: str
    state: CloudState
    boots_at_s: float


@dataclass
class Fleet:
    """What FakeServing wants of a cloud, out of EC2's own books. Those in `lost` never join."""

    rig: Ec2Rig
    offerings: dict[str, OfferConfig]
    lost: set[str] = field(default_factory=set)

    @property
    def supply(self) -> Fleet:
        return self

    def settle(self) -> None:
        self.rig.region.advance(self.rig.clock.now_s())

    @property
    def machines(self) -> dict[str, Machine]:
        now_s = self.rig.clock.now_s()
        return {
            key: Machine(
                key,
                self._offering(row.instance_type, row.zone, row.market, row.reservation),
                "pending" if key in self.lost else STATES[row.state(now_s)],
                row.running_at_s,
            )
            for key, row in self.rig.region.instances.items()
        }

    def _offering(self, kind: str, zone: str, market: str, reservation: str) -> str:
        return next(
            name
            for name, row in self.offerings.items()
            if (row.instance_type, row.zone, row.reservation) == (kind, zone, reservation)
            and (reservation or MARKETS[row.market] == market)
        )


@dataclass
class Ec2Scene(Scene):
    """A Scene whose cloud is EC2's adapter. `rig` is the account; time moves for all of them together."""

    rig: Ec2Rig = field(kw_only=True)
    offers: tuple[OfferConfig, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        self.policy = PolicySet(units=tuple(self.units))
        self.clock = self.rig.clock  # type: ignore[assignment]  # both stand still until somebody waits
        self.fleet = Fleet(self.rig, {row.offering: row for row in self.offers})
        self.cloud = self.rig.cloud  # type: ignore[assignment]
        self.serving = FakeServing(self.fleet, self.clock, shapes_of(self.policy), load_s=self.load_s)  # type: ignore[arg-type]
        self.start()

    def running(self) -> list[str]:
        """Offerings of the instances that exist now, sorted."""
        return sorted(row.offering for row in self.fleet.machines.values() if row.state in ("pending", "running"))

    def asked(self) -> int:
        """Launch calls so far."""
        return self.rig.calls("RunInstances") + self.rig.calls("CreateFleet")


@contextmanager
def scene(
    region: Region, *offers: OfferConfig, units: tuple[Unit, ...] = (), replicas: int = 1, **changes: Any
) -> Iterator[Ec2Scene]:
    """A scene of one service with `replicas` at least; `changes` are of the adapter's config."""
    with ec2(region, offers=offers, **changes) as rig:
        made = Ec2Scene(
            units=units or (unit(service(min_replicas=replicas, max_replicas=max(8, replicas))),),
            offerings=(),
            rig=rig,
            offers=offers,
        )
        made.load("support/chat", 0.5)
        yield made
