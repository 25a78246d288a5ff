"""Half of all capacity gone at the peak: who feels it, in what order, and that nobody's money is overspent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autoscaler.adapters.journal import MemoryJournal
from autoscaler.core.spend import month_left_h
from chaos.scenario import Scenario, load_scenario
from chaos.world import simulate
from chaos.world.drivers import Loop
from chaos.world.world import World

FOLDER = Path(__file__).with_name("shortage")
EXACT = 1e-6


@dataclass
class Watched:
    """One run of the loop, with what each unit had paid at every tick (seconds, USD by unit)."""

    scenario: Scenario
    bills: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = world = World(self.scenario, 1)
        driver = Loop(world, MemoryJournal(segment_records=400))
        for step in range(math.ceil(self.scenario.duration_s / self.scenario.tick_s)):
            now_s = step * self.scenario.tick_s
            world.run_until(now_s)
            world.metrics.sample()
            driver.tick()
            world.scores.tick()
            world.tally.settle(now_s)
            self.bills.append((now_s, dict(world.tally.by_unit)))
        world.run_until(self.scenario.duration_s)
        world.finish()
        driver.close()

    def met(self, service: str) -> float:
        """Fraction of its requests within every limit."""
        totals = self.world.engine.totals(self.world.numbers[service])
        return totals.met / totals.requests

    def dearest_hour(self, unit: str) -> float:
        """The most that the unit paid in any hour."""
        ticks = round(3600.0 / self.scenario.tick_s)
        paid = [bill.get(unit, 0.0) for _, bill in self.bills]
        return max(after - before for before, after in zip(paid, paid[ticks:], strict=False))


@pytest.fixture(scope="module")
def tenants() -> Watched:
    return Watched(load_scenario(FOLDER / "tenants.yaml"))


@pytest.fixture(scope="module")
def company() -> Watched:
    return Watched(load_scenario(FOLDER / "company.yaml"))


def test_the_most_important_keeps_its_promise_and_the_others_give_way_in_order(tenants: Watched) -> None:
    gold, silver, bronze = (tenants.met(f"{name}/ask") for name in ("gold", "silver", "bronze"))
    assert gold >= 0.95
    assert gold > silver > bronze, "each feels it before the one that matters more"
    assert bronze < 0.8, "there was not enough for all"
    assert tenants.world.scores.priority_inversion_s <= 120.0
    assert tenants.world.violations == []


def test_equal_priorities_share_the_same_shortage_and_none_keeps_its_promise(tenants: Watched) -> None:
    same = [f"policies.{unit}.services.ask.priority=500" for unit in ("gold", "silver", "bronze")]
    rich = "policies.bronze.budget_usd_per_month=null"  # so that nothing but priorities tells them apart
    report = simulate(load_scenario(FOLDER / "tenants.yaml", [*same, rich]), "ours", 1)
    gold = report.services["gold/ask"].slo_attainment
    assert gold is not None
    assert gold < 0.95 <= tenants.met("gold/ask"), "what the priority is worth"


def test_no_unit_spends_more_than_it_may(tenants: Watched, company: Watched) -> None:
    for run in (tenants, company):
        for unit in run.scenario.policies:
            paid = run.bills[-1][1].get(unit.unit, 0.0)
            assert unit.budget_usd_per_h is None or run.dearest_hour(unit.unit) <= unit.budget_usd_per_h + EXACT
            assert unit.budget_usd_per_month is None or paid <= unit.budget_usd_per_month
    pace = 2500.0 / month_left_h(tenants.scenario.start_at_s)
    assert tenants.dearest_hour("bronze") <= pace * 1.01, "and the budget bound: it wanted three times that"


def test_four_units_of_a_company_through_the_same(company: Watched) -> None:
    assert company.met("moderation/verdict") >= 0.95
    assert company.met("research/nightly") >= 0.9, "it may wait for hours"
    assert company.world.scores.priority_inversion_s <= 120.0
    assert company.world.violations == []


@pytest.mark.parametrize(("name", "top"), [("tenants", "gold/ask"), ("company", "moderation/verdict")])
def test_where_perfect_supply_would_do_so_does_what_there_is(
    name: str, top: str, request: pytest.FixtureRequest
) -> None:
    run: Watched = request.getfixturevalue(name)
    perfect = simulate(run.scenario, "oracle-supply", 1).services[top]
    assert perfect.slo_attainment is not None
    assert perfect.slo_attainment >= perfect.fraction
    assert run.met(top) >= perfect.fraction
