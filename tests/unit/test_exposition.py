"""What a scrape shows, how many series it may have, and what it costs the tick and whoever scrapes."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from prometheus_client import generate_latest

from autoscaler.adapters.exposition import SERIES
from autoscaler.adapters.telemetry import PrometheusTelemetry
from autoscaler.core.events import Planned
from policies.model import PolicySet, Variant
from tests.scene import CHAT, Scene, offering, service, unit

SCRAPE_S, MAX_SERIES, TICK_SHARE = 0.150, 10_000, 0.02
PAIR = (Variant(id="l4", instance_type="g6.2xlarge"), Variant(id="l4-two", instance_type="g6.2xlarge"))
LABELS = {"service", "variant", "offering", "unit", "instance_type", "market", "port", "code", "level"}


def watched(made: Scene) -> PrometheusTelemetry:
    ledger = made.controller.ledger
    telemetry = PrometheusTelemetry(lambda: ledger.seq)
    made.controller.telemetry, ledger.on_event = telemetry, telemetry.event
    return telemetry


def value(telemetry: PrometheusTelemetry, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(name, labels)


@pytest.fixture(scope="module")
def large() -> tuple[Scene, PrometheusTelemetry]:
    """200 services of two variants each on 60 pools, two ticks on."""
    made = Scene(
        units=[unit(*(service(f"s{n}", variants=PAIR) for n in range(20)), name=f"u{part}") for part in range(10)],
        offerings=[offering(f"pool-{number}", count=4) for number in range(60)],
    )
    telemetry = watched(made)
    for part in range(10):
        for number in range(20):
            made.load(f"u{part}/s{number}", 0.1)
    made.run(20.0)
    return made, telemetry


def test_a_scrape_at_200_services_and_60_pools_is_small_and_quick(large: tuple[Scene, PrometheusTelemetry]) -> None:
    _, telemetry = large
    seconds = []
    for _ in range(5):
        began_s = time.process_time()
        text = generate_latest(telemetry.registry).decode()
        seconds.append(time.process_time() - began_s)
    series = sum(not line.startswith("#") for line in text.splitlines())
    print(f"{series} series, scraped in {1000.0 * min(seconds):.0f} ms")
    assert 3_000 < series <= MAX_SERIES
    assert min(seconds) <= SCRAPE_S


def test_telemetry_costs_a_tick_next_to_nothing(large: tuple[Scene, PrometheusTelemetry]) -> None:
    made, telemetry = large
    telling = 0.0

    def timed(event: object, beliefs: object) -> None:
        nonlocal telling
        began_s = time.process_time()
        telemetry.event(event, beliefs)  # type: ignore[arg-type]
        telling += time.process_time() - began_s

    made.controller.ledger.on_event = timed
    began_s = time.process_time()
    made.run(30.0)
    share = telling / (time.process_time() - began_s)
    print(f"telemetry is {100.0 * share:.3f} % of a tick")
    assert 0.0 < share <= TICK_SHARE


def test_labels_take_values_from_policy_cloud_and_our_own_words_only(large: tuple[Scene, PrometheusTelemetry]) -> None:
    _, telemetry = large
    assert {label for series in SERIES for label in series.labels} == LABELS
    bounds = Counter({"service": 200, "variant": 2, "offering": 60, "unit": 10})
    for family in telemetry.registry.collect():
        for label, most in bounds.items():
            found = {sample.labels[label] for sample in family.samples if label in sample.labels}
            assert len(found) <= most, (family.name, label)


def test_a_number_of_the_plan_leads_to_its_journal_entry() -> None:
    made = Scene(units=[unit(service())], offerings=[offering("pool")])
    telemetry = watched(made)
    made.run(30.0)
    seq = value(telemetry, "qm_plan_seq")
    found = [record.event for record in made.journal.read() if record.seq == seq]
    assert isinstance(found[0], Planned)
    assert found[0].plan.id == made.plans[-1].id
    assert value(telemetry, "qm_plan_at") == made.plans[-1].at_s


def test_a_shortage_is_told_with_what_is_needed_why_and_what_the_pools_are_worth() -> None:
    made = Scene(
        units=[unit(service(min_replicas=3), budget_usd_per_h=50.0, quota_gpus=9)],
        offerings=[offering("dry", price=1.0, count=0), offering("small", price=2.0, count=2)],
    )
    telemetry = watched(made)
    made.load(CHAT, 0.5)
    made.run(300.0)
    assert value(telemetry, "qm_needed_replicas", service=CHAT) == 3.0
    assert value(telemetry, "qm_shortfall_replicas", service=CHAT) == 1.0
    assert value(telemetry, "qm_rung_replicas", service=CHAT, market="on_demand") == 2.0
    assert value(telemetry, "qm_reason", service=CHAT, code="min_replicas") == 1.0
    assert value(telemetry, "qm_arrivals_rps", service=CHAT) == 0.5
    assert (value(telemetry, "qm_forecast_rps", service=CHAT, level="0.95") or 0.0) >= 0.5
    odds = {name: value(telemetry, "qm_pool_odds", offering=name) or 0.0 for name in ("dry", "small")}
    assert odds["dry"] < odds["small"] or odds["dry"] < 0.5
    assert value(telemetry, "qm_refusals_in_row", offering="dry") == made.beliefs.offerings["dry"].refusals_in_row
    assert value(telemetry, "qm_instances", offering="small") == 2.0
    assert value(telemetry, "qm_unit_cost_usd_per_h", unit="support") == 4.0
    assert value(telemetry, "qm_unit_budget_usd_per_h", unit="support") == 50.0
    assert value(telemetry, "qm_unit_quota_gpus", unit="support") == 9.0
    assert value(telemetry, "qm_lead_seconds", service=CHAT) == made.plans[-1].demands[0].lead_s
    assert value(telemetry, "qm_slo_target_fraction", service=CHAT) == 0.95


def test_a_reservation_that_nobody_uses_is_told() -> None:
    made = Scene(units=[unit(service(min_replicas=2))], offerings=[offering("reserved", market="odcr", count=2)])
    telemetry = watched(made)
    made.run(300.0)
    assert value(telemetry, "qm_idle_reserved_instances", offering="reserved") == 0.0
    made.source.set(PolicySet(units=(unit(service(max_replicas=1)),)))
    made.run(600.0)
    assert value(telemetry, "qm_instances", offering="reserved") == 2.0
    assert value(telemetry, "qm_idle_reserved_instances", offering="reserved") == 1.0
