"""Reads ``cloud/ec2.yaml`` of a policy folder: where instances may come from. Reads files; may not call AWS.

The file names types, zones and markets; what follows from them (GPUs, prices, network cards) is the catalogue's. Every
combination is an offering, a reservation or block one of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from autoscaler.adapters.ec2.config import Ec2Config, OfferConfig, Seconds, Text
from autoscaler.catalogue import Catalogue, load_catalogue
from policies import tree
from policies.model import Market, Strict
from policies.problems import Path as Key
from policies.problems import Problem, Problems, suggestion
from policies.words import translate

FOLDER, FILE = "cloud", "ec2.yaml"
Finding = tuple[Key, str]


class CloudProblems(Problems):
    """The cloud's file cannot be used as it is; `problems` lists everything to mend."""


class ReservationFile(Strict):
    """A reservation or Capacity Block that this cluster may use."""

    id: Annotated[str, Field(pattern=r"^cr-[0-9a-z]+$")]
    market: Literal["odcr", "block", "interruptible"]
    instance_type: Text
    zone: Text


class GangFile(Strict):
    """Instances of a type in a zone that talk to each other: one placement group, and EFA."""

    instance_type: Text
    zone: Text
    placement_group: Text


class Ec2File(Strict):
    """``cloud/ec2.yaml`` as written. Docs: docs/ec2.md."""

    cluster: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$", max_length=64)]
    region: Text
    launch_template: Annotated[str, Field(pattern=r"^[a-zA-Z0-9().\-/_]{3,128}$")]
    subnets: Annotated[dict[str, Annotated[str, Field(pattern=r"^subnet-[0-9a-z]+$")]], Field(min_length=1)]
    instance_types: Annotated[tuple[Text, ...], Field(min_length=1)]
    markets: tuple[Literal["on_demand", "spot"], ...] = ("on_demand", "spot")
    reservations: tuple[ReservationFile, ...] = ()
    gangs: tuple[GangFile, ...] = ()
    security_groups: tuple[Annotated[str, Field(pattern=r"^sg-[0-9a-z]+$")], ...] = ()
    image: Annotated[str, Field(pattern=r"^ami-[0-9a-z]+$")] | None = None
    notices_queue: Annotated[str, Field(pattern=r"^https?://")] | None = None
    sweep_regions: tuple[Text, ...] = ()
    max_life_s: Seconds = 7 * 86_400.0


def load_ec2(folder: Path) -> Ec2Config:
    """What ``cloud/ec2.yaml`` in `folder` amounts to, with the folder's catalogue. Raises CloudProblems, Problems."""
    path = folder / FOLDER / FILE
    if not path.exists():
        raise CloudProblems([Problem(str(path), 0, "", "does not exist; write it as docs/ec2.md shows")])
    document = tree.read(path)
    problems = list(document.problems)
    if not problems and not isinstance(document.data, dict):
        problems = [document.problem((), "holds no keys; write it as docs/ec2.md shows")]
    if problems:
        raise CloudProblems(problems)
    try:
        written = Ec2File.model_validate_json(json.dumps(document.data))
    except ValidationError as error:
        raise CloudProblems(document.problem(key, text) for key, text in translate(error, Ec2File)) from error
    catalogue = load_catalogue(folder)
    if found := list(_findings(written, catalogue)):
        raise CloudProblems(document.problem(key, text) for key, text in found)
    return _config(written, catalogue)


# ---- what is wrong with it ------------------------------------------------------------------------------------------
def _findings(written: Ec2File, catalogue: Catalogue) -> Iterator[Finding]:
    yield from _places(written)
    for key, kind in _types(written):
        if kind not in catalogue.instance_types:
            yield key, f"{kind} is not in the catalogue; {suggestion(kind, catalogue.instance_types)}"
    yield from _prices(written, catalogue)
    yield from _gangs(written, catalogue)


def _places(written: Ec2File) -> Iterator[Finding]:
    for zone in written.subnets:
        if not zone.startswith(written.region) or zone == written.region:
            yield ("subnets", zone), f"{zone} is no zone of the region {written.region}; correct one of the two"
    rows: list[tuple[Key, str]] = [
        (("reservations", at, "zone"), row.zone) for at, row in enumerate(written.reservations)
    ]
    rows += [(("gangs", at, "zone"), row.zone) for at, row in enumerate(written.gangs)]
    for key, zone in rows:
        if zone not in written.subnets:
            yield key, f"{zone} has no subnet; {suggestion(zone, written.subnets)}"
    ids = [row.id for row in written.reservations]
    for at, name in enumerate(ids):
        if name in ids[:at]:
            yield ("reservations", at, "id"), f"{name} is given twice; keep one"
    for at, region in enumerate(written.sweep_regions):
        if region == written.region:
            yield ("sweep_regions", at), f"{region} acquires, so it is swept anyway; leave it out"


def _types(written: Ec2File) -> Iterator[tuple[Key, str]]:
    yield from ((("instance_types", at), kind) for at, kind in enumerate(written.instance_types))
    yield from (
        (("reservations", at, "instance_type"), row.instance_type) for at, row in enumerate(written.reservations)
    )
    yield from ((("gangs", at, "instance_type"), row.instance_type) for at, row in enumerate(written.gangs))


def _prices(written: Ec2File, catalogue: Catalogue) -> Iterator[Finding]:
    """A market without a price cannot be compared with the others."""
    remedy = "add one to catalogue/prices.yaml beside the policies"
    for at, kind in enumerate(written.instance_types):
        for market in written.markets:
            if kind in catalogue.instance_types and _price(catalogue, kind, written.region, market) is None:
                yield ("instance_types", at), f"{kind} has no price in {written.region} for {market}; {remedy}"
    for at, row in enumerate(written.reservations):
        known = row.instance_type in catalogue.instance_types
        if known and _price(catalogue, row.instance_type, written.region, row.market) is None:
            text = f"{row.instance_type} has no price in {written.region} for {row.market}; {remedy}"
            yield ("reservations", at, "instance_type"), text


def _gangs(written: Ec2File, catalogue: Catalogue) -> Iterator[Finding]:
    for at, row in enumerate(written.gangs):
        kind = catalogue.instance_types.get(row.instance_type)
        if kind is not None and not kind.efa_interfaces:
            yield ("gangs", at, "instance_type"), f"{row.instance_type} has no EFA; name a type that has"
    if written.gangs and not written.security_groups:
        yield ("security_groups",), "is empty; launches with EFA name their security groups, so give at least one"


# ---- what it amounts to ---------------------------------------------------------------------------------------------
def _config(written: Ec2File, catalogue: Catalogue) -> Ec2Config:
    places: list[tuple[str, str, Market, str]] = [
        (kind, zone, market, "")
        for kind in written.instance_types
        for zone in written.subnets
        for market in written.markets
    ]
    places += [(row.instance_type, row.zone, row.market, row.id) for row in written.reservations]
    return Ec2Config(
        cluster=written.cluster,
        region=written.region,
        launch_template=written.launch_template,
        offerings=tuple(_offer(written, catalogue, *place) for place in places),
        sweep_regions=written.sweep_regions,
        image=written.image or "",
        security_groups=written.security_groups,
        notices_queue=written.notices_queue or "",
        max_life_s=written.max_life_s,
    )


def _offer(
    written: Ec2File, catalogue: Catalogue, kind: str, zone: str, market: Market, reservation: str
) -> OfferConfig:
    facts = catalogue.instance_types[kind]
    group = next((row.placement_group for row in written.gangs if (row.instance_type, row.zone) == (kind, zone)), "")
    price = _price(catalogue, kind, written.region, market)
    assert price is not None
    return OfferConfig(
        offering="/".join(part for part in (kind, zone, market, reservation) if part),
        instance_type=kind,
        zone=zone,
        subnet=written.subnets[zone],
        market=market,
        gpus=facts.gpus,
        price_usd_per_h=price,
        reservation=reservation,
        placement_group=group,
        efa_interfaces=facts.efa_interfaces if group else 0,
        vcpus=facts.vcpus,
    )


def _price(catalogue: Catalogue, kind: str, region: str, market: str) -> float | None:
    """Reserved capacity costs what on-demand costs, a block its own price, and spot the usual saving less, where no
    other price is known.
    """
    if (own := catalogue.price(kind, region, market)) is not None:
        return own.usd_per_h
    full = catalogue.price(kind, region, "on_demand")
    if full is None or market != "spot":
        return full.usd_per_h if full else None
    pools = catalogue.spot_pools.get(kind)
    pool = pools.regions.get(region) if pools else None
    return full.usd_per_h * (1.0 - pool.saving) if pool and pool.saving is not None else None
