"""Scenarios: read strictly from YAML, with every problem of the file named at once.

Reads the scenario's file, its policies and the catalogue; looks for its traces but does not read them (`chaos.streams`
and `chaos.pools` do). May not read a clock or start anything. Format: docs/simulation.md, `chaos.scenario_format`.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, ValidationError

from autoscaler.catalogue import Catalogue, CatalogueProblems, load_catalogue, shapes, written_by
from autoscaler.core.model import Shape
from chaos import overrides as sets
from chaos.scenario_format import (
    MAX_DURATION_S,
    Demand,
    Dist,
    Fault,
    Fraction,
    Outages,
    Positive,
    Quota,
    Recorded,
    Steps,
    Supply,
)
from policies import tree
from policies.load import Origin, PolicyProblems, compose, documents
from policies.model import PolicySet, Strict, Unit
from policies.problems import Path as KeyPath
from policies.problems import Problem, Problems
from policies.words import show, translate

__all__ = [
    "Demand",
    "Dist",
    "Fault",
    "Outages",
    "Quota",
    "Recorded",
    "Scenario",
    "ScenarioProblems",
    "Steps",
    "Supply",
    "load_scenario",
    "public_scenarios",
    "scenario_of",
    "scenario_schema",
]
PRICES = {"spot": "spot_usd_per_h", "block": "block_usd_per_h", "interruptible": "spot_usd_per_h"}
START_VARIATION = 0.3  # of boot and load times that a scenario leaves to the catalogue
KINDS_OF_DEMAND = ("constant", "diurnal", "flash", "agents", "rag", "bursts")


class ScenarioProblems(Problems):
    """A scenario that cannot be run as it is; `problems` lists everything to mend."""


class Scenario(Strict):
    """A simulated run: who asks, what can be had, and what goes wrong. Instants are seconds from `start_at`.

    `policies` is a folder beside the file or a list of unit documents; `catalogue` overrides single values of it. The
    true constants of each variant are the catalogue's times a lognormal of `constants_sigma`, and `nodes_slow_fraction`
    of the nodes are slow.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]*[a-z0-9])?$", max_length=60)]
    seed: Annotated[int, Field(ge=0, le=2**31)] = 1
    duration_s: Annotated[float, Field(ge=60.0, le=MAX_DURATION_S)]
    tick_s: Annotated[float, Field(ge=1.0, le=3600.0)] = 10.0
    start_at: str = "2024-05-13T00:00:00Z"
    policies: tuple[Unit, ...]
    demand: tuple[Demand, ...]
    supply: tuple[Supply, ...]
    quotas: tuple[Quota, ...] = ()
    faults: tuple[Fault, ...] = ()
    catalogue: dict[str, Any] = Field(default_factory=dict)
    nodes_slow_fraction: Fraction = 0.03
    constants_sigma: Annotated[float, Field(ge=0.0, le=1.0)] = 0.15
    describe_lag_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 0.0
    api_rate_per_s: Positive = 2.0

    _folder: Path = PrivateAttr(default=Path())
    _policy_folder: Path | None = PrivateAttr(default=None)

    @cached_property
    def policy_set(self) -> PolicySet:
        """The policies in force."""
        return PolicySet(units=self.policies)

    @cached_property
    def catalogue_set(self) -> Catalogue:
        """The catalogue with the policy folder's and the scenario's overrides."""
        inline = tree.Document("catalogue", self.catalogue) if self.catalogue else None
        return load_catalogue(self._policy_folder, inline)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """What the catalogue says of every variant. The world's truth differs (`constants_sigma`)."""
        return shapes(self.policy_set, self.catalogue_set)

    @property
    def start_at_s(self) -> float:
        """UTC seconds of second 0."""
        return datetime.fromisoformat(self.start_at).astimezone(UTC).timestamp()

    def offering(self, offering: str) -> Supply:
        """The supply row. Raises KeyError."""
        found = next((row for row in self.supply if row.id == offering), None)
        if found is None:
            raise KeyError(offering)
        return found

    def price(self, offering: str) -> float:
        """USD per hour of one instance."""
        row = self.offering(offering)
        return row.price_usd_per_h if row.price_usd_per_h is not None else (self._list_price(row) or 0.0)

    def boot_s(self, offering: str) -> Dist:
        """From an accepted launch to a node in the cluster."""
        row = self.offering(offering)
        return row.boot_s or _start(self.catalogue_set.instance_types[row.instance_type].boot_s)

    def load_s(self, offering: str, service: str, variant: str) -> Dist:
        """From a replica's start on a node to its being ready."""
        stated = self.offering(offering).load_s
        if isinstance(stated, Dist):
            return stated
        shape = next(shape for shape in self.shapes if (shape.service, shape.variant) == (service, variant))
        return (stated or {}).get(variant) or _start(shape.load_prior_s)

    def file(self, trace: str) -> Path | None:
        """Where a trace lies: beside the scenario, then in $QM_DATA. None when it is in neither."""
        data = os.environ.get("QM_DATA")
        places = [self._folder / trace, *([Path(data) / trace] if data else [])]
        return next((place for place in places if place.exists()), None)

    def stand_ins(self) -> tuple[str, ...]:
        """One line for each recorded trace that is absent, so that its synthetic stand-in runs."""
        demand = [(f"demand of {row.service}", row.trace) for row in self.demand if row.trace]
        supply = [(f"supply {row.id}", row.count.trace) for row in self.supply if isinstance(row.count, Recorded)]
        absent = [(what, trace) for what, trace in demand + supply if self.file(trace) is None]
        return tuple(f"{what}: {trace} is not here ($QM_DATA), its synthetic stand-in runs" for what, trace in absent)

    def _list_price(self, row: Supply) -> float | None:
        instance = self.catalogue_set.instance_types.get(row.instance_type)
        price: float | None = getattr(instance, PRICES.get(row.market, "on_demand_usd_per_h"), None)
        return price


def _start(mean_s: float) -> Dist:
    return Dist(dist="lognormal", mean=mean_s, cv=START_VARIATION, min=mean_s / 2, max=4 * mean_s)


def public_scenarios() -> dict[str, Path]:
    """The shipped scenarios by name."""
    return {path.stem: path for path in sorted(Path(__file__).with_name("scenarios").glob("*.yaml"))}


def load_scenario(path: Path | str, overrides: Sequence[str] = (), policies: Path | None = None) -> Scenario:
    """The scenario in the file `path`, or the shipped one of that name, with ``a.0.b=c`` overrides applied in order.
    The folder `policies` takes the place of its own.

    Raises ScenarioProblems, PolicyProblems or another `Problems` with everything that is wrong.
    """
    file = Path(path)
    if not file.exists() and str(path) in public_scenarios():
        file = public_scenarios()[str(path)]
    if file.is_dir():
        raise ScenarioProblems([Problem(str(path), 0, "", "is a folder; give a scenario's file")])
    if not file.exists():
        known = ", ".join(public_scenarios())
        raise ScenarioProblems(
            [Problem(str(path), 0, "", f"does not exist; give a scenario's file, or one of {known}")]
        )
    document = tree.read(file)
    if policies is not None and isinstance(document.data, dict):
        document.data["policies"] = str(policies.resolve())
    return _read(document, file.parent, overrides)


def scenario_of(data: dict[str, Any], folder: Path | None = None, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario in plain values, checked like a file's; paths are relative to `folder`. Raises as load_scenario."""
    return _read(tree.Document("scenario", copy.deepcopy(data)), folder or Path(), overrides)


def scenario_schema() -> dict[str, Any]:
    """JSON Schema of the file."""
    schema = Scenario.model_json_schema()
    units = schema["properties"]["policies"]
    schema["properties"]["policies"] = {
        "anyOf": [{"type": "string", "description": "a folder of policy files, relative to this file"}, units]
    }
    return schema


# ---- reading --------------------------------------------------------------------------------------------------------
def _read(document: tree.Document, folder: Path, overrides: Sequence[str]) -> Scenario:
    if not document.problems and not isinstance(document.data, dict):
        found = "is empty" if document.data is None else f"holds {show(document.data)} instead of keys"
        document.problems.append(document.problem((), f"{found}; start with name: NAME"))
    if document.problems:
        raise ScenarioProblems(document.problems)
    units, policy_folder = _overridden(document, folder, overrides)
    return _validated(document, folder, units, policy_folder)


def _overridden(
    document: tree.Document, folder: Path, overrides: Sequence[str]
) -> tuple[tuple[tree.Document, ...], Path | None]:
    """Applies overrides; the unit documents and the folder they lie in (None: inline)."""
    wanted = [(text, *sets.split(text)) for text in overrides]
    inside = [each for each in wanted if each[1][0] == "policies" and len(each[1]) > 1]
    for text, steps, value in wanted:
        if (text, steps, value) not in inside or not isinstance(document.data.get("policies"), str):
            sets.apply(document, text, steps, value)
    named = document.data.get("policies")
    if not isinstance(named, str):
        items = named if isinstance(named, list) else []
        return tuple(document.part(("policies", index)) for index in range(len(items))), None
    units = list(_folder_documents(document, folder / named))
    for text, steps, value in inside:
        index = sets.find([unit.data for unit in units], steps[1], text)
        sets.apply(units[index], text, steps[2:], value)
    return tuple(units), folder / named


def _folder_documents(document: tree.Document, folder: Path) -> tuple[tree.Document, ...]:
    try:
        return documents(folder)
    except PolicyProblems as error:
        texts = [f"the folder {each.file} {each.text}" for each in error.problems]
        raise ScenarioProblems([document.problem(("policies",), text) for text in texts]) from error


def _validated(
    document: tree.Document, folder: Path, units: tuple[tree.Document, ...], policy_folder: Path | None
) -> Scenario:
    """The checked scenario. A broken part hides no other part's problems."""
    from chaos.scenario_checks import findings

    problems: list[Problem] = []
    policy = PolicySet(units=())
    written: tuple[Origin, ...] = ()
    try:
        if units:
            policy, written = compose(units)
    except PolicyProblems as error:
        problems += error.problems
    given = {**document.data}
    if units:
        given["policies"] = policy.model_dump(mode="json")["units"]
    elif given.get("policies") == []:
        problems.append(document.problem(("policies",), "is empty; give at least one unit"))
    try:
        scenario = Scenario.model_validate_json(json.dumps(given))
    except ValidationError as error:
        found = [(_clean(path), text) for path, text in translate(error, Scenario)]
        raise ScenarioProblems(problems + [document.problem(path, text) for path, text in found]) from error
    scenario._folder, scenario._policy_folder = folder, policy_folder
    problems += _catalogue_problems(document, scenario, written)
    if problems:
        raise ScenarioProblems(problems)
    problems += [document.problem(path, text) for path, text in findings(scenario)]
    if problems:
        raise ScenarioProblems(problems)
    return scenario


def _catalogue_problems(document: tree.Document, scenario: Scenario, written: tuple[Origin, ...]) -> list[Problem]:
    """Overrides that do not fit the catalogue, and variants that no hardware can run."""
    inline = document.part(("catalogue",)) if document.data.get("catalogue") else None
    try:
        vars(scenario)["catalogue_set"] = load_catalogue(scenario._policy_folder, inline)  # read once, with its lines
        scenario.shapes  # noqa: B018 - computed now, so that what is wrong is said before anything starts
    except CatalogueProblems as error:
        return list(written_by(error, written))
    except Problems as error:
        return list(error.problems)
    return []


def _clean(path: KeyPath) -> KeyPath:
    """The path as the file has it: without the names of alternatives that pydantic adds."""
    kept: list[str | int] = []
    for step in path:
        tag = isinstance(step, str) and (
            step.startswith("<") or (step in KINDS_OF_DEMAND and kept[-1:] == ["synthetic"])
        )
        kept += [] if tag else [step]
    return tuple(kept)
