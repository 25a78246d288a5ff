"""What the EC2 adapter is told: where it may launch, and how often it looks. Data; may not do I/O."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from policies.model import Market, Strict

Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0.0)]
RESERVED: frozenset[Market] = frozenset({"odcr", "block", "interruptible"})


class OfferConfig(Strict):
    """A place to get instances. A reservation or block is an offering of its own, named by its id in `reservation`.

    With `efa_interfaces` a launch asks for so many network cards of that kind; `vcpus` of one instance are what it
    takes of a quota (0: not known).
    """

    offering: Text
    instance_type: Text
    zone: Text
    subnet: Text
    market: Market = "on_demand"
    gpus: Annotated[int, Field(ge=0)]
    price_usd_per_h: Annotated[float, Field(ge=0.0)]
    reservation: str = ""
    placement_group: str = ""
    efa_interfaces: Annotated[int, Field(ge=0)] = 0
    vcpus: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _reserved(self) -> OfferConfig:
        if self.market == "overflow":
            raise ValueError("EC2 has no market 'overflow'; it is a service's own endpoint")
        if (self.market in RESERVED) != bool(self.reservation):
            raise ValueError("name the `reservation` of the markets odcr, block and interruptible, and of no other")
        return self

    @property
    def pool(self) -> str:
        """What fails together: a reservation alone, else type, zone, market and placement group."""
        place = (self.instance_type, self.zone, self.market, self.placement_group)
        return self.reservation or "/".join(part for part in place if part)


class Ec2Config(Strict):
    """One cluster's account. `region` acquires; `sweep_regions` are only looked at, so that nothing is lost there.

    The launch template holds everything else about an instance; `image` overrides its image, `security_groups` are for
    launches with EFA, which name their network cards themselves. `notices_queue` is the SQS queue of EventBridge's
    events. `max_life_s` is the hard deadline written on each instance at its launch, from which it is announced as a
    reclaim `deadline_notice_s` before. Listings are renewed every `describe_every_s`, at once after a change of ours.
    """

    cluster: Text
    region: Text
    launch_template: Text
    offerings: Annotated[tuple[OfferConfig, ...], Field(min_length=1)]
    sweep_regions: tuple[Text, ...] = ()
    image: str = ""
    security_groups: tuple[Text, ...] = ()
    notices_queue: str = ""
    max_life_s: Seconds = 7 * 86_400.0
    deadline_notice_s: Seconds = 1800.0
    spot_notice_s: Seconds = 120.0
    describe_every_s: Seconds = 20.0
    unsettled_every_s: Seconds = 5.0
    reservations_every_s: Seconds = 60.0
    sweep_every_s: Seconds = 60.0
    calls_burst: Annotated[int, Field(ge=1)] = 40
    calls_per_s: Seconds = 2.0

    @model_validator(mode="after")
    def _once(self) -> Ec2Config:
        names = [row.offering for row in self.offerings]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"offering {twice[0]!r} is given twice; give each a name of its own")
        if self.region in self.sweep_regions:
            raise ValueError(f"region {self.region!r} acquires, so it is swept anyway; leave it out of sweep_regions")
        return self
