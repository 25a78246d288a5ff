"""Reads a folder of policy files into a `PolicySet`, reporting every problem of every file at once.

The package's defaults lie under each unit, the unit's own values above them; `origins` says where each value in force
was written. Reads files only: may not act, log or look at a clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from . import tree
from .checks import Finding, house_findings, service_findings, unit_findings
from .clocks import with_clock_changes
from .model import PolicySet, Service, Unit
from .problems import Path, Problem, Problems
from .words import show, translate

__all__ = ["Origin", "PolicyProblems", "Problem", "compose", "documents", "load", "origins"]
DEFAULTS_FILE = FilePath(__file__).with_name("defaults.yaml")
_REPAIRS: dict[str, Any] = {"name": "x", "model": "x", "goal": "cost", "variants": [], "unit": "x", "owner": "x"}


class PolicyProblems(Problems):
    """The folder cannot be used as it is; `problems` lists everything to mend."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One value in force and where it was written. `key` reads ``unit/service.slo.ttft_s`` or ``unit.quota_gpus``."""

    key: str
    value: Any
    file: str
    line: int


@dataclass(slots=True)
class _Draft:
    """A unit's file laid over the defaults, before validation."""

    document: tree.Document
    defaults: tree.Document
    data: dict[str, Any]
    unit: Unit | None = None


def load(folder: FilePath) -> PolicySet:
    """All units of the ``*.yaml`` and ``*.yml`` files in `folder`, by name. Raises PolicyProblems."""
    return compose(documents(folder))[0]


def origins(folder: FilePath) -> tuple[Origin, ...]:
    """Every value in force in `folder`, in the order of the files. Raises PolicyProblems."""
    return compose(documents(folder))[1]


def documents(folder: FilePath) -> tuple[tree.Document, ...]:
    """The policy files of `folder` by name, as they are written. Raises PolicyProblems when there are none."""
    return tuple(tree.read(file) for file in _files(folder))


def compose(units: Sequence[tree.Document]) -> tuple[PolicySet, tuple[Origin, ...]]:
    """The policies in `units`, one document each, and the origin of every value in force. Raises PolicyProblems."""
    defaults = tree.read(DEFAULTS_FILE)
    problems: list[Problem] = []
    drafts = [draft for document in units if (draft := _draft(document, defaults, problems)) is not None]
    problems += _named_twice(drafts)
    problems += [] if problems else _between(drafts)
    if problems:
        raise PolicyProblems(problems)
    found = sorted((draft.unit for draft in drafts if draft.unit), key=lambda unit: unit.unit)
    return PolicySet(units=tuple(found)), tuple(origin for draft in drafts for origin in _draft_origins(draft))


def _files(folder: FilePath) -> list[FilePath]:
    if not folder.is_dir():
        text = (
            "is a file; give the folder that holds it"
            if folder.exists()
            else "does not exist; give a folder of policy files"
        )
        raise PolicyProblems([Problem(str(folder), 0, "", text)])
    files = sorted(
        path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and not path.name.startswith(".")
    )
    if not files:
        raise PolicyProblems([Problem(str(folder), 0, "", "holds no .yaml file; add one file for each business unit")])
    return files


def _draft(document: tree.Document, defaults: tree.Document, problems: list[Problem]) -> _Draft | None:
    """The unit in `document` over the defaults; its problems are added to `problems`."""
    problems += document.problems
    if not isinstance(document.data, dict):
        if not document.problems:
            found = "is empty" if document.data is None else f"holds {show(document.data)} instead of keys"
            problems.append(Problem(document.file, 1, "", f"{found}; start with unit: NAME"))
        return None
    draft = _Draft(document, defaults, _merge(defaults.data["unit"], document.data))
    entries = draft.data.get("services")
    if isinstance(entries, list):
        base = defaults.data["service"]
        draft.data["services"] = [_merge(base, entry) if isinstance(entry, dict) else entry for entry in entries]
    problems += [document.problem(path, text) for path, text in _validate(draft)]
    return draft


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` above `under`, in the order of `over`: maps merge key by key, everything else is replaced."""
    merged = dict(over)
    for key, below in under.items():
        above = over.get(key)
        if key not in over:
            merged[key] = below
        elif isinstance(below, dict) and isinstance(above, dict):
            merged[key] = _merge(below, above)
    return merged


def _validate(draft: _Draft) -> Iterator[tuple[Path, str]]:
    """Problems of the whole unit; sets `draft.unit`. A broken key hides no other key's problem."""
    entries = draft.data.get("services")
    entries = entries if isinstance(entries, list) else []
    services: list[Service] = []
    for index, entry in enumerate(entries):
        service, found = _build(Service, entry)
        yield from ((("services", index, *path), text) for path, text in found)
        if service is not None:
            bad = {path[0] for path, _ in found}
            more = list(_kept(service_findings(service), bad))
            yield from ((("services", index, *path), text) for path, text in more)
            services.append(service if more else with_clock_changes(service))
    given = (
        {**draft.data, "services": []}
        if "services" in draft.data and isinstance(draft.data["services"], list)
        else draft.data
    )
    unit, found = _build(Unit, given)
    yield from found
    if unit is not None:
        bad = {path[0] for path, _ in found} | ({"services"} if len(services) < len(entries) else set())
        draft.unit = unit.model_copy(update={"services": tuple(services)})
        yield from _kept(unit_findings(draft.unit), bad)


def _kept(findings: Iterator[Finding], bad: set[str | int]) -> Iterator[tuple[Path, str]]:
    """Findings that do not rest on a key already reported."""
    return ((path, text) for keys, path, text in findings if not bad.intersection(keys))


M = TypeVar("M", bound=BaseModel)


def _build(model: type[M], data: Any) -> tuple[M | None, list[tuple[Path, str]]]:
    """The model in `data` and its problems; broken keys fall back to defaults so that the other keys can be checked."""
    try:
        return model.model_validate_json(json.dumps(data)), []
    except ValidationError as error:
        found = list(translate(error, model))
    if not isinstance(data, dict):
        return None, found
    bad = {path[0] for path, _ in found}
    repaired = {key: value for key, value in data.items() if key not in bad}
    repaired |= {key: value for key, value in _REPAIRS.items() if key in bad and key in model.model_fields}
    return model.model_validate_json(json.dumps(repaired | ({"services": []} if model is Unit else {}))), found


def _named_twice(drafts: list[_Draft]) -> Iterator[Problem]:
    first: dict[str, tree.Document] = {}
    for draft in drafts:
        name = draft.document.data.get("unit")
        if isinstance(name, str) and name in first:
            text = f"the unit {name} is also defined in {first[name].file}; merge the files or rename one"
            yield draft.document.problem(("unit",), text)
        elif isinstance(name, str):
            first[name] = draft.document


def _between(drafts: list[_Draft]) -> Iterator[Problem]:
    """What is wrong between units that are each in order."""
    for number, path, text in house_findings([draft.unit for draft in drafts if draft.unit is not None]):
        yield drafts[number].document.problem(path, text)


def _draft_origins(draft: _Draft) -> Iterator[Origin]:
    unit = draft.data["unit"]
    for path, value in _leaves(draft.data, ()):
        document, where = draft.document, path
        if not document.wrote(path):
            document = draft.defaults
            where = ("service", *path[2:]) if path[0] == "services" else ("unit", *path)
        yield Origin(_origin_key(unit, path, draft.data), value, *document.origin(where))


def _leaves(data: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every scalar or list of scalars, with its path."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(data, list) and any(isinstance(item, dict) for item in data):
        for index, item in enumerate(data):
            yield from _leaves(item, (*path, index))
    else:
        yield path, data


def _origin_key(unit: str, path: Path, data: dict[str, Any]) -> str:
    if path[0] != "services" or len(path) < 3:
        return f"{unit}.{tree.spell(path, data)}"
    service = data["services"][path[1]]
    return f"{unit}/{service['name']}.{tree.spell(path[2:], service)}"
