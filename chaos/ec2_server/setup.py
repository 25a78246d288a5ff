"""An account from a file: its regions with what they hide, who may call, and whether instances are real nodes.

Data and its checks; may not do I/O or start anything. Instants are UTC seconds.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from chaos.ec2_server.state import Account, BlockOffering, Key, Pool, Region, Reservation
from policies.model import Strict

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0.0)]


class PoolConfig(Strict):
    """`count` instances that a zone can give in all; `boot_s` from the launch until they run."""

    instance_type: Text
    zone: Text
    market: Literal["on-demand", "spot"] = "on-demand"
    count: Count
    boot_s: Seconds = 5.0


class SubnetConfig(Strict):
    """A subnet of a zone with so many free addresses."""

    subnet: Text
    zone: Text
    addresses: Count = 250


class QuotaConfig(Strict):
    """An account limit in vCPU: the family's letter is P, G, Trn, Inf or Standard."""

    family: Text
    market: Literal["on-demand", "spot"] = "on-demand"
    vcpus: Count


class BlockConfig(Strict):
    """A Capacity Block for sale."""

    offering: Text
    instance_type: Text
    zone: Text
    count: Count = 1
    start_at_s: float
    end_at_s: float
    fee_usd: Annotated[float, Field(ge=0.0)] = 0.0


class ReservationConfig(Strict):
    """A reservation that the account has already. `block`: a Capacity Block, which ends; else one without an end."""

    reservation: Text
    instance_type: Text
    zone: Text
    count: Count
    start_at_s: float = 0.0
    end_at_s: float | None = None
    block: bool = False
    interruptible: bool = False
    match: Literal["open", "targeted"] = "targeted"


class RegionConfig(Strict):
    """One region. `vcpus` by instance type, `templates` by name in RunInstances' words."""

    name: Text
    vcpus: dict[str, int] = Field(default_factory=dict)
    pools: tuple[PoolConfig, ...]
    subnets: tuple[SubnetConfig, ...] = ()
    quotas: tuple[QuotaConfig, ...] = ()
    templates: dict[str, dict[str, Any]] = Field(default_factory=dict)
    images: tuple[Text, ...] = ("ami-1",)
    placement_groups: dict[str, str] = Field(default_factory=dict)
    blocks: tuple[BlockConfig, ...] = ()
    reservations: tuple[ReservationConfig, ...] = ()
    stopping_s: Seconds = 20.0
    lag_s: Seconds = 0.0
    queue: Text = "qm-events"


class KeyConfig(Strict):
    """An access key that may call, until `expires_at_s`."""

    key: Text
    secret: Text
    session: str = ""
    expires_at_s: float | None = None


class NodesConfig(Strict):
    """Instances are raylets that join `ray_address`, each with the GPUs of its type."""

    ray_address: Text
    gpus: dict[str, int]
    env: dict[str, str] = Field(default_factory=dict)
    boot_command: tuple[str, ...] | None = None


class ServerConfig(Strict):
    """The whole file. With the clock `virtual`, time stands still but for the weather's `advance`."""

    regions: Annotated[tuple[RegionConfig, ...], Field(min_length=1)]
    keys: Annotated[tuple[KeyConfig, ...], Field(min_length=1)]
    clock: Literal["wall", "virtual"] = "wall"
    skew_s: Seconds = 300.0
    nodes: NodesConfig | None = None

    @model_validator(mode="after")
    def _real(self) -> ServerConfig:
        if self.nodes is not None and self.clock == "virtual":
            raise ValueError("nodes are real, and so must their clock be; leave out `nodes`, or `clock`")
        return self


def account(config: ServerConfig) -> Account:
    """The account that the file describes."""
    keys = {
        row.key: Key(row.secret, row.session, math.inf if row.expires_at_s is None else row.expires_at_s)
        for row in config.keys
    }
    skew_s = config.skew_s if config.clock == "wall" else math.inf
    return Account({row.name: _region(row, nodes=config.nodes is not None) for row in config.regions}, keys, skew_s)


def _region(row: RegionConfig, *, nodes: bool) -> Region:
    places = {Pool(each.instance_type, each.zone, each.market): each for each in row.pools}
    return Region(
        name=row.name,
        types=dict(row.vcpus),
        pools={pool: each.count for pool, each in places.items()},
        boots_s={pool: each.boot_s for pool, each in places.items()},
        quotas={(each.family, each.market): each.vcpus for each in row.quotas},
        subnets={each.subnet: (each.zone, each.addresses) for each in row.subnets},
        templates=dict(row.templates),
        images=set(row.images),
        groups=dict(row.placement_groups),
        blocks={each.offering: _block(each) for each in row.blocks},
        reservations={each.reservation: _reservation(each) for each in row.reservations},
        stopping_s=math.inf if nodes else row.stopping_s,
        lag_s=row.lag_s,
        queue=row.queue,
    )


def _block(row: BlockConfig) -> BlockOffering:
    return BlockOffering(
        row.offering, row.instance_type, row.zone, row.count, row.start_at_s, row.end_at_s, row.fee_usd
    )


def _reservation(row: ReservationConfig) -> Reservation:
    return Reservation(
        reservation_id=row.reservation,
        instance_type=row.instance_type,
        zone=row.zone,
        total=row.count,
        created_at_s=row.start_at_s,
        start_at_s=row.start_at_s,
        end_at_s=math.inf if row.end_at_s is None else row.end_at_s,
        kind="capacity-block" if row.block else "default",
        match=row.match,
        interruptible=row.interruptible,
    )
