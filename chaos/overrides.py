"""``--set a.0.b=c``: single values of a document replaced, each remembered as what replaced it. May not do I/O.

A step is a key of a map, or a list's index or the id or name of one of its items; one past the end appends. The value
is read as YAML, with the same refusals as a file.
"""

from __future__ import annotations

from typing import Any

from policies import tree
from policies.problems import Path, Problem, Problems
from policies.words import show

MAX_SHOWN = 80


class OverrideProblem(Problems):
    """An override that cannot be applied: why, and what to write."""

    def __init__(self, override: str, text: str) -> None:
        super().__init__([Problem(label(override), 0, "", text)])


def label(override: str) -> str:
    """How an override is named where a file would be."""
    return f"--set {override[:MAX_SHOWN]}"


def split(override: str) -> tuple[list[str], Any]:
    """Steps and value of ``a.0.b=c``. Raises OverrideProblem."""
    key, equals, text = override.partition("=")
    steps = [step.strip() for step in key.split(".")]
    if not equals or not all(steps):
        raise OverrideProblem(override, "is not KEY=VALUE; write it like demand.0.scale=2")
    value = tree.parse(text, label(override))
    if value.problems:
        raise OverrideProblem(override, f"the value {value.problems[0].text}")
    return steps, value.data


def apply(document: tree.Document, override: str, steps: list[str], value: Any) -> None:
    """Sets the value at `steps` of `document` in place. Raises OverrideProblem where there is no such place."""
    data, path = document.data, Path()
    for number, step in enumerate(steps):
        at = _step(data, step, override, path)
        path = (*path, at)
        if number == len(steps) - 1:
            _put(data, at, value)
            document.replaced = {key: by for key, by in document.replaced.items() if key[: len(path)] != path}
            document.replaced[path] = label(override)
        elif _absent(data, at):
            _put(data, at, [] if steps[number + 1] == "0" else {})
            document.replaced[path] = label(override)
        data = data[at] if number < len(steps) - 1 else data


def find(items: list[Any], step: str, override: str) -> int:
    """Index of the item that `step` names in a list that cannot grow. Raises OverrideProblem."""
    at = _step(items, step, override, ("policies",))
    if not isinstance(at, int) or at == len(items):
        raise OverrideProblem(override, f"policies has {len(items)} units; use 0 to {len(items) - 1}, or a unit's name")
    return at


def _step(data: Any, step: str, override: str, path: Path) -> str | int:
    here = tree.spell(path, None) or "the top"
    if isinstance(data, dict):
        return step
    if not isinstance(data, list):
        raise OverrideProblem(override, f"{here} is {show(data)}, which has no {step}; correct the key")
    if step.isdigit() and int(step) <= len(data):
        return int(step)
    named = [index for index, item in enumerate(data) if isinstance(item, dict) and step in _names(item)]
    if named:
        return named[0]
    size = f"has {len(data)} items" if data else "is empty"
    raise OverrideProblem(override, f"{here} {size}, none of them {step}; use 0 to {len(data)}, or an id")


def _names(item: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(item.get(key) for key in ("id", "name", "unit", "service"))


def _absent(data: Any, at: str | int) -> bool:
    if isinstance(at, int):
        return at == len(data)
    return at not in data or data[at] is None


def _put(data: Any, at: str | int, value: Any) -> None:
    if isinstance(at, int) and at == len(data):
        data.append(value)
    else:
        data[at] = value
