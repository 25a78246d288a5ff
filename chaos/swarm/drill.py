"""`qm drill`: a scenario's demand, supply and faults against somebody's own policies, and a verdict for each unit.

The load and the faults that the scenario has for services which the policies do not name go to those that they do name:
the most important to the most important, and so on. May not read a clock.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from autoscaler.commands.outcome import OK, VIOLATED, BadInput, check_json, write_json
from chaos.report import Report, ServiceReport, Violation
from chaos.scenario import Scenario, load_scenario
from chaos.world import simulate
from policies.load import load
from policies.model import PolicySet

MAX_SEED = 2**31
Word = Literal["held", "bent", "broke"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """`qm drill`\'s options. `seed` None: the scenario\'s own."""

    scenario: str
    policies: Path
    seed: int | None = None
    json_file: str | None = None


class ServiceVerdict(BaseModel):
    """How one service came through. `attainment` is None when nobody asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    service: str
    load_of: str
    verdict: Word
    attainment: float | None
    wanted: float
    lost: str


class UnitVerdict(BaseModel):
    """One unit: held (every service kept its objective), bent (some did not, none fell below half of its promise) or
    broke.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    unit: str
    verdict: Word
    cost_usd: float
    services: tuple[ServiceVerdict, ...]


class DrillReport(BaseModel):
    """`qm drill --json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    scenario: str
    seed: int
    units: tuple[UnitVerdict, ...]
    violations: tuple[Violation, ...]


def drill_command(given: Given) -> int:
    """Runs it and says how each unit came through. 1 when an invariant was violated: a missed objective is a result."""
    check_json(given.json_file)
    if given.seed is not None and not 0 <= given.seed <= MAX_SEED:
        raise BadInput(f"--seed {given.seed}: give a whole number from 0 to {MAX_SEED}")
    scenario, policy, loads = drilled(given.scenario, given.policies)
    for note in scenario.stand_ins():
        print(note, file=sys.stderr)
    seed = scenario.seed if given.seed is None else given.seed
    report = verdicts(simulate(scenario, "ours", seed), policy, loads)
    if given.json_file is not None:
        write_json(given.json_file, report.model_dump_json(indent=1).encode())
    if given.json_file != "-":
        _show(report)
    return VIOLATED if report.violations else OK


def drilled(name: str, folder: Path) -> tuple[Scenario, PolicySet, dict[str, str]]:
    """The scenario under the policies of `folder`, these, and whose load each service gets (absent: nobody's)."""
    policy, scenario = load(folder), load_scenario(name)
    named = [key for key, _, _ in policy.services()]
    theirs = [key for key, _, _ in scenario.policy_set.services()]
    strange, free = [key for key in theirs if key not in named], [key for key in named if key not in theirs]
    heir = {key: key for key in theirs if key in named} | dict(zip(strange, free, strict=False))
    sets = [f"policies={json.dumps(str(folder.resolve()))}"]
    for index, row in enumerate(scenario.demand):
        sets.append(f"demand.{index}.service={heir.get(row.service, named[-1])}")
        if row.service not in heir:
            sets.append(f"demand.{index}.scale=0")
    for index, fault in enumerate(scenario.faults):
        if fault.target in theirs:
            sets.append(f"faults.{index}.target={heir.get(fault.target, named[-1])}")
    return load_scenario(name, sets), policy, {mine: whose for whose, mine in heir.items()}


def verdicts(report: Report, policy: PolicySet, loads: dict[str, str]) -> DrillReport:
    """Each unit\'s verdict, in the order of their names."""
    units = []
    for unit in policy.units:
        rows = tuple(
            _service(key, report.services[key], loads.get(key, "nobody"))
            for key, owner, _ in policy.services()
            if owner.unit == unit.unit
        )
        words = {row.verdict for row in rows}
        word: Word = "broke" if "broke" in words else "bent" if "bent" in words else "held"
        cost = report.cost_usd_by.unit.get(unit.unit, 0.0)
        units.append(UnitVerdict(unit=unit.unit, verdict=word, cost_usd=cost, services=rows))
    return DrillReport(scenario=report.scenario, seed=report.seed, units=tuple(units), violations=report.violations)


def _service(key: str, row: ServiceReport, load_of: str) -> ServiceVerdict:
    met = row.slo_attainment
    word: Word = "held" if met is None or met >= row.fraction else "bent" if met >= row.fraction / 2.0 else "broke"
    parts = (("shed", row.shed), ("failed", row.failed), ("overflowed", row.overflowed))
    lost = ", ".join(f"{count:,} {name}" for name, count in parts if count)
    return ServiceVerdict(
        service=key, load_of=load_of, verdict=word, attainment=met, wanted=row.fraction, lost=lost or "nothing lost"
    )


def _show(report: DrillReport) -> None:
    out = Console(soft_wrap=True, markup=False, highlight=False)
    out.print(f"{report.scenario}, seed {report.seed}")
    for unit in report.units:
        out.print(f"{unit.unit}: {unit.verdict}, {unit.cost_usd:,.2f} USD")
        for row in unit.services:
            if row.attainment is None:
                out.print(f"  {row.service}: nobody asked")
                continue
            figures = f"{100 * row.attainment:.2f} % within limits, {100 * row.wanted:g} % promised, {row.lost}"
            out.print(f"  {row.service} (the load of {row.load_of}): {row.verdict}, {figures}")
    for each in report.violations[:5]:
        out.print(f"violation at {each.at_s:,.0f} s: {each.kind}: {each.detail}")
