"""The local cloud's supply, read from a file in the scenario's `supply[]` format.

Reads one file and the catalogue; may not start anything. A row without a price gets the catalogue's for its market. The
file goes through the policies' parser, which refuses what is hostile or huge before anything is built from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from autoscaler.catalogue import Catalogue
from policies import tree
from policies.model import Market, Strict
from policies.problems import Problem, Problems
from policies.words import show, translate

PRICE_KEYS: dict[str, str] = {"on_demand": "on_demand_usd_per_h", "spot": "spot_usd_per_h", "block": "block_usd_per_h"}


class SupplyProblems(Problems):
    """A supply file that cannot be used as it is; `problems` lists everything to mend."""


class Constant(Strict):
    """A duration that is always the same; real instances boot when they boot, so only this one is known here."""

    dist: Literal["constant"]
    mean: Annotated[float, Field(ge=0.0)]


class Row(Strict):
    """One pool: `count` is how many instances it can hold in all."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    instance_type: str
    region: str
    zone: str
    market: Market
    count: Annotated[int, Field(ge=0)]
    boot_s: Constant
    notice_s: Annotated[float, Field(ge=0.0)] = 120.0
    price_usd_per_h: Annotated[float, Field(ge=0.0)] | None = None


class Supply(Strict):
    """The whole file."""

    supply: tuple[Row, ...]


def bundled(engine: Literal["vllm", "sim"]) -> Path:
    """The supply that `qm up` uses for an engine."""
    return Path(__file__).with_name(f"supply_{engine}.yaml")


def read_supply(path: Path, catalogue: Catalogue) -> tuple[dict[str, Any], ...]:
    """Offerings as the local cloud's config wants them. Raises SupplyProblems."""
    document = tree.read(path)
    rows, problems = _rows(document)
    problems += [document.problem(("supply", *place), text) for place, text in _findings(rows, catalogue)]
    if problems:
        raise SupplyProblems(problems)
    return tuple(_offering(row, catalogue) for row in rows)


def _rows(document: tree.Document) -> tuple[tuple[Row, ...], list[Problem]]:
    """The file's rows, none when anything in it is wrong, and what is wrong."""
    if document.problems:
        return (), document.problems
    if not isinstance(document.data, dict):
        found = "is empty" if document.data is None else f"holds {show(document.data)} instead of keys"
        return (), [document.problem((), f"{found}; start with supply:")]
    try:
        rows = Supply.model_validate_json(json.dumps(document.data)).supply  # JSON's lists may be tuples
    except ValidationError as error:
        return (), [document.problem(path, text) for path, text in translate(error, Supply)]
    return rows, [] if rows else [document.problem(("supply",), "is empty; give at least one pool")]


def _findings(rows: tuple[Row, ...], catalogue: Catalogue) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What one row alone does not show: place below `supply`, and text."""
    for index, row in enumerate(rows):
        if row.id in (other.id for other in rows[:index]):
            yield (index, "id"), f"{row.id} is given twice; rename one"
        if row.instance_type not in catalogue.instance_types:
            yield (index, "instance_type"), f"{row.instance_type} is not in the catalogue; add it or use another"
        elif _price(row, catalogue) is None:
            text = f"is missing and the catalogue has none for {row.instance_type} {row.market}; add it"
            yield (index, "price_usd_per_h"), text


def _price(row: Row, catalogue: Catalogue) -> float | None:
    if row.price_usd_per_h is not None:
        return row.price_usd_per_h
    price: float | None = getattr(catalogue.instance_types[row.instance_type], PRICE_KEYS.get(row.market, ""), None)
    return price


def _offering(row: Row, catalogue: Catalogue) -> dict[str, Any]:
    return {
        "offering": row.id,
        "pool": row.id,
        "instance_type": row.instance_type,
        "zone": row.zone,
        "region": row.region,
        "market": row.market,
        "gpus": catalogue.instance_types[row.instance_type].gpus,
        "price_usd_per_h": _price(row, catalogue),
        "count": row.count,
        "boot_s": row.boot_s.mean,
        "notice_s": row.notice_s,
    }
