"""One call from a policy folder to everything that decisions need. Reads files; may not act, log or look at a clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autoscaler.core.model import Shape
from policies.load import Origin, PolicyProblems, load, origins
from policies.model import PolicySet
from policies.problems import Problem, Problems

from .load import load_catalogue
from .model import Catalogue
from .shapes import CatalogueProblems, ShapeProblem, shapes


@dataclass(frozen=True, slots=True)
class Resolved:
    """A policy folder that can be put in force."""

    policy: PolicySet
    catalogue: Catalogue
    shapes: tuple[Shape, ...]


def resolve(folder: Path) -> Resolved:
    """The policies of `folder`, the catalogue with the folder's overrides, and the engine shapes of every variant.

    Raises PolicyProblems with every problem of every file: syntax, limits, catalogue overrides, impossible variants.
    """
    problems: list[Problem] = []
    policy = catalogue = None
    try:
        policy = load(folder)
    except PolicyProblems as error:
        problems += error.problems
    try:
        catalogue = load_catalogue(folder)
    except Problems as error:
        problems += error.problems
    if policy is None or catalogue is None:
        raise PolicyProblems(problems)
    try:
        return Resolved(policy, catalogue, shapes(policy, catalogue))
    except CatalogueProblems as error:
        raise located(folder, error) from error


def located(folder: Path, error: CatalogueProblems) -> PolicyProblems:
    """The same problems with the file and line of `folder` that wrote each key."""
    return PolicyProblems(written_by(error, origins(folder)))


def written_by(error: CatalogueProblems, written: tuple[Origin, ...]) -> tuple[Problem, ...]:
    """The same problems at the places in `written` that wrote each key."""
    places = {origin.key: origin for origin in written}
    return tuple(_located(detail, places) for detail in error.details)


def _located(detail: ShapeProblem, places: dict[str, Origin]) -> Problem:
    """The problem at the line that wrote its key, or at its parent's first line where the default is in force."""
    key = f"{detail.service}.{detail.key}"
    parent = key.rpartition(".")[0]
    where = places.get(key) or next(origin for name, origin in places.items() if name.startswith(parent))
    return Problem(where.file, where.line, f"{detail.service}.{detail.key}", detail.text)
