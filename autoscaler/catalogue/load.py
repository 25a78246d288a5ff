"""Reads the catalogue's files and a policy folder's overrides. May not act, log or look at a clock.

An override file has the name of the file it changes and lies in `catalogue/` beside the policies. Maps are merged key
by key, so one figure can be changed alone; measurements and dated prices are added and win over the package's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from policies import tree
from policies.problems import Problem, Problems, suggestion
from policies.words import translate

from .model import Catalogue

FILES = ("instance_types.yaml", "models.yaml", "performance.yaml", "prices.yaml")
LISTS = ("measurements", "prices")
OVERRIDES_FOLDER = "catalogue"


class CatalogueFileProblems(Problems):
    """A catalogue file cannot be used as it is; `problems` lists everything to mend."""


def load_catalogue(overrides: Path | None = None, inline: tree.Document | None = None) -> Catalogue:
    """The package's catalogue under the `catalogue/` subfolder of the policy folder `overrides`, where there is one.

    `inline` holds further overrides, of all files in one. Raises CatalogueFileProblems.
    """
    documents = [tree.read(Path(__file__).with_name(name)) for name in FILES]
    folder = overrides / OVERRIDES_FOLDER if overrides is not None else None
    problems: list[Problem] = []
    if folder is not None and folder.is_dir():
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        problems += [_stranger(folder / name) for name in names if name not in FILES]
        documents += [tree.read(folder / name) for name in FILES if name in names]
    documents += [inline] if inline is not None else []
    problems += [problem for document in documents for problem in document.problems]
    problems += [
        document.problem((), "holds no keys; remove it, or fill it") for document in documents if _empty(document)
    ]
    if problems:
        raise CatalogueFileProblems(problems)
    return _validated(documents)


def _stranger(path: Path) -> Problem:
    return Problem(str(path), 1, "", f"is not a catalogue file; {suggestion(path.name, FILES)}")


def _empty(document: tree.Document) -> bool:
    return not document.problems and not isinstance(document.data, dict)


def _validated(documents: list[tree.Document]) -> Catalogue:
    merged: dict[str, Any] = {}
    origin: dict[tuple[str | int, ...], tuple[tree.Document, tuple[str | int, ...]]] = {}
    for document in documents:
        _lay_over(merged, document, origin)
    try:
        catalogue = Catalogue.model_validate_json(json.dumps(merged))
    except ValidationError as error:
        raise CatalogueFileProblems(
            _located(path, text, documents, origin) for path, text in translate(error, Catalogue)
        ) from error
    problems = [_located(path, text, documents, origin) for path, text in _dangling(catalogue)]
    if problems:
        raise CatalogueFileProblems(problems)
    return catalogue


def _lay_over(merged: dict[str, Any], document: tree.Document, origin: dict[Any, Any]) -> None:
    """Merges `document` into `merged` in place, noting which document each path came from."""
    data = dict(document.data)
    for name in LISTS:
        rows = data.pop(name, [])
        below = merged.setdefault(name, []) if rows else []
        if isinstance(rows, list) and isinstance(below, list):
            for index, row in enumerate(rows):
                origin[(name, len(below))] = (document, (name, index))
                below.append(row)
        else:
            merged[name] = rows
    _deep(merged, data)
    for path in (*document.lines, *document.replaced):
        if path[:1] not in [(name,) for name in LISTS]:
            origin[path] = (document, path)


def _deep(under: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        below = under.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            _deep(below, value)
        else:
            under[key] = value


def _located(path: tuple[str | int, ...], text: str, documents: list[tree.Document], origin: dict[Any, Any]) -> Problem:
    """The problem at `path` of the merged data, in the file that wrote it (or its nearest parent)."""
    cut = len(path)
    while cut and path[:cut] not in origin:
        cut -= 1
    document, where = origin.get(path[:cut], (documents[0], ()))
    problem: Problem = document.problem((*where, *path[cut:]), text)
    return problem


def _dangling(catalogue: Catalogue) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """References to sources, GPUs and models that do not exist."""
    for path, entry in catalogue.entries():
        for name in entry.source:
            if name not in catalogue.sources:
                yield (*path, "source"), f"{name} is not in sources; {suggestion(name, catalogue.sources)}"
    for name, instance in catalogue.instance_types.items():
        if instance.gpu not in catalogue.gpus:
            yield (
                ("instance_types", name, "gpu"),
                f"{instance.gpu} is not in gpus; {suggestion(instance.gpu, catalogue.gpus)}",
            )
    yield from _unknown_types(catalogue)
    for index, row in enumerate(catalogue.measurements):
        if row.gpu != "any" and row.gpu not in catalogue.gpus:
            yield ("measurements", index, "gpu"), f"{row.gpu} is not in gpus; {suggestion(row.gpu, catalogue.gpus)}"
        if row.model not in catalogue.models:
            yield (
                ("measurements", index, "model"),
                f"{row.model} is not in models; {suggestion(row.model, catalogue.models)}",
            )


def _unknown_types(catalogue: Catalogue) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Prices and spot pools of types that are not there."""
    named: list[tuple[tuple[str | int, ...], str]] = [(("spot_pools", name), name) for name in catalogue.spot_pools]
    named += [(("prices", at, "instance_type"), price.instance_type) for at, price in enumerate(catalogue.prices)]
    for path, name in named:
        if name not in catalogue.instance_types:
            yield path, f"{name} is not in instance_types; {suggestion(name, catalogue.instance_types)}"
