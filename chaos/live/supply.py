"""The local cloud's supply, read from a file in the scenario's `supply[]` format.

Reads one file and the catalogue; may not start anything. A row without a price gets the catalogue's for its market.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from autoscaler.catalogue import Catalogue
from policies.model import Market, Strict

PRICE_KEYS: dict[str, str] = {"on_demand": "on_demand_usd_per_h", "spot": "spot_usd_per_h", "block": "block_usd_per_h"}


class SupplyProblems(ValueError):
    """A supply file that cannot be used. `problems` are ``file: key: what is wrong, what to do``."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Constant(Strict):
    """A duration that is always the same; real instances boot when they boot, so only this one is known here."""

    dist: Literal["constant"]
    mean: Annotated[float, Field(ge=0.0)]


class Row(Strict):
    """One pool: `count` is how many instances it can hold in all."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
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

    supply: Annotated[tuple[Row, ...], Field(min_length=1)]


def bundled(engine: Literal["vllm", "sim"]) -> Path:
    """The supply that `qm up` uses for an engine."""
    return Path(__file__).with_name(f"supply_{engine}.yaml")


def read_supply(path: Path, catalogue: Catalogue) -> tuple[dict[str, Any], ...]:
    """Offerings as the local cloud's config wants them. Raises SupplyProblems."""
    try:
        document = yaml.safe_load(path.read_text())
        rows = Supply.model_validate_json(json.dumps(document, default=str)).supply  # JSON's lists may be tuples
    except ValidationError as error:
        places = ((".".join(map(str, row["loc"])), row["msg"]) for row in error.errors())
        raise SupplyProblems(tuple(f"{path}: {key}: {message}, correct it" for key, message in places)) from error
    except (OSError, yaml.YAMLError) as error:
        raise SupplyProblems((f"{path}: cannot be read ({error}), give a YAML file with `supply:`",)) from error
    problems = tuple(text for row in rows if (text := _unpriced(row, path, catalogue)))
    if problems:
        raise SupplyProblems(problems)
    return tuple(_offering(row, catalogue) for row in rows)


def _unpriced(row: Row, path: Path, catalogue: Catalogue) -> str:
    if row.instance_type not in catalogue.instance_types:
        return f"{path}: {row.id}: instance type {row.instance_type!r} is not in the catalogue, add it or use another"
    if _price(row, catalogue) is None:
        return f"{path}: {row.id}: no catalogue price for {row.instance_type} {row.market}, give price_usd_per_h"
    return ""


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
