"""The shortest scenario that still breaks the same promise. May not read a clock or a file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from chaos.scenario import ScenarioProblems, scenario_of
from policies.problems import Problems

from .run import Run, run

TRIES = 80


def what_broke(result: Run) -> frozenset[str]:
    """The kinds of promises that a run broke."""
    broke = {each.kind for each in result.violations}
    return frozenset(broke | ({"unsettled"} if result.settled_after_s is None and not broke else set()))


def shrunk(
    data: dict[str, Any], tries: int = TRIES, judge: Callable[[dict[str, Any]], frozenset[str]] | None = None
) -> dict[str, Any]:
    """The scenario `data` without whatever can be left out while one of the promises it breaks stays broken.

    `judge` says what a scenario breaks; by default a run of it. At most `tries` runs.
    """
    judge = judge or _judged
    broke, left = judge(data), tries
    again = bool(broke)
    while again:
        again = False
        for smaller in _smaller(data):
            if left == 0:
                return data
            left -= 1
            if judge(smaller) & broke:
                data, again = smaller, True
                break
    return data


def _judged(data: dict[str, Any]) -> frozenset[str]:
    try:
        return what_broke(run(scenario_of(data)))
    except (ScenarioProblems, Problems):
        return frozenset()


def _smaller(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The scenario with one thing less, the largest things first."""
    for half in (slice(len(data["faults"]) // 2), slice(len(data["faults"]) // 2, None)):
        if len(data["faults"]) > 3:
            yield data | {"faults": data["faults"][half]}
    for key in ("faults", "supply", "quotas"):
        for index in range(len(data[key])):
            yield data | {key: data[key][:index] + data[key][index + 1 :]}
    for row in data["demand"] if len(data["demand"]) > 1 else ():
        yield _without_service(data, row["service"])
    for index, row in enumerate(data["demand"]):
        if row["synthetic"]["kind"] != "constant":
            calm = row | {"synthetic": {"kind": "constant", "rps": row["synthetic"]["rps"]}}
            yield data | {"demand": [*data["demand"][:index], calm, *data["demand"][index + 1 :]]}
    for index, unit in enumerate(data["policies"]):
        for key in ("quota_gpus", "budget_usd_per_h"):
            if key in unit:
                units = copy.deepcopy(data["policies"])
                del units[index][key]
                yield data | {"policies": units}


def _without_service(data: dict[str, Any], service: str) -> dict[str, Any]:
    unit_name, name = service.split("/")
    units = copy.deepcopy(data["policies"])
    for unit in units:
        if unit["unit"] == unit_name:
            unit["services"] = [each for each in unit["services"] if each["name"] != name]
    return data | {
        "policies": [unit for unit in units if unit["services"]],
        "demand": [row for row in data["demand"] if row["service"] != service],
        "faults": [fault for fault in data["faults"] if fault["target"] != service],
    }
