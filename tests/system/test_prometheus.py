"""A real Prometheus scrapes a controller in a shortage, and shows what its operator needs to know."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from autoscaler.act import Inline
from autoscaler.adapters.grafana import expressions
from autoscaler.adapters.journal import MemoryJournal
from autoscaler.adapters.local_supply import CloudConfig, OfferingConfig
from autoscaler.adapters.policy_folder import PolicyFolder, read_policy
from autoscaler.adapters.telemetry import PrometheusTelemetry
from autoscaler.loop import Controller
from policies.model import Market
from tests.fakes import FakeClock, FakeCloud, FakeMetrics, FakeServing
from tests.repo.test_metric_names import rules
from tests.repo.tree import ROOT
from tests.system.prometheus_server import Prometheus, binary, free_port, running, wait_for

DOLLARS = ("qm_cost_usd_per_h", "qm_price_usd_per_h", "qm_unit_cost_usd_per_h")  # those that this scene has
POLICIES = ROOT / "policies" / "local" / "sim"


def offering(name: str, instance_type: str, count: int, usd_per_h: float, market: Market) -> OfferingConfig:
    """A pool of its own in one zone."""
    return OfferingConfig(
        offering=name,
        pool=name,
        instance_type=instance_type,
        zone="z-a",
        market=market,
        gpus=4,
        price_usd_per_h=usd_per_h,
        count=count,
    )


@pytest.fixture(scope="module")
def metrics_port() -> int:
    """Where a controller exports what ten ticks under load left; its cheapest pool is dry."""
    clock = FakeClock(time.time())
    pools = (
        offering("dry-spot", "g6.12xlarge", 0, 1.0, "spot"),
        offering("full-g6", "g6.12xlarge", 20, 4.6, "on_demand"),
        offering("full-g5", "g5.12xlarge", 20, 5.7, "on_demand"),
    )
    cloud = FakeCloud(CloudConfig(cluster="c", ray_address="127.0.0.1:6379", offerings=pools), clock)
    policy = read_policy(POLICIES, "sim")
    load = FakeMetrics()
    for service, _, _ in policy.policy.services():
        load.set(service, 1.0, input_tokens=50, output_tokens=20)
    telemetry = PrometheusTelemetry()
    controller = Controller(
        clock=clock,
        metrics=load,
        serving=FakeServing(cloud, clock, policy.shapes, load_s=2.0),
        cloud=cloud,
        journal=MemoryJournal(),
        policy_source=PolicyFolder(POLICIES, lambda _: policy),
        executor=Inline(),
        telemetry=telemetry,
    )
    for _ in range(10):
        with telemetry.timed():
            assert controller.tick() is not None
        clock.advance(2.0)
    port = free_port()
    telemetry.serve(port)
    return port


@pytest.fixture(scope="module")
def prometheus(metrics_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped that controller at least once."""
    with running(metrics_port, tmp_path_factory.mktemp("prometheus")) as server:
        wait_for("the first scrape", lambda: server.query("qm_tick_seconds_count") != {})
        yield server


def test_the_target_is_up_and_every_tick_was_timed(prometheus: Prometheus) -> None:
    assert prometheus.query("up") == {(): 1.0}
    assert prometheus.query("qm_tick_seconds_count") == {(): 10.0}
    assert prometheus.query("histogram_quantile(0.99, qm_tick_seconds_bucket) < 10") != {}


def test_the_refused_pool_and_the_one_that_answered_instead_are_told_apart(prometheus: Prometheus) -> None:
    launches = prometheus.query("qm_launches_total")
    assert launches["dry-spot", "refused"] >= 1
    assert sum(count for (_, outcome), count in launches.items() if outcome == "granted") >= 1
    assert ("dry-spot", "granted") not in launches
    assert prometheus.query("qm_refusals_total") == {("no_capacity",): launches["dry-spot", "refused"]}
    assert prometheus.query("qm_cooldown_until > 0").keys() == {("dry-spot",)}


def test_ready_replicas_and_their_cost_are_shown_per_service(prometheus: Prometheus) -> None:
    goals = {service: entry.goal for service, _, entry in read_policy(POLICIES, "sim").policy.services()}
    prompt = {service for service, goal in goals.items() if goal != "cost"}  # others may wait for their deadline
    assert {labels[0] for labels in prometheus.query("sum by (service) (qm_ready_replicas)")} == set(goals)
    assert {labels[0] for labels in prometheus.query("sum by (service) (qm_ready_replicas) > 0")} >= prompt
    assert {labels[0] for labels in prometheus.query("qm_demand_rps > 0")} >= prompt
    assert prometheus.query("qm_cost_usd_per_h > 4.5") != {}


def test_its_rules_are_evaluated_and_no_alert_speaks_when_all_is_well(prometheus: Prometheus) -> None:
    wait_for("the rules", lambda: {rule["health"] for rule in prometheus.rules()} == {"ok"})
    assert {rule["name"] for rule in prometheus.rules() if rule["type"] == "alerting"} == {
        rule["alert"] for rule in rules("alert")
    }
    # Rules that were evaluated before the first scrape saw no controller at all.
    wait_for("that no alert speaks", lambda: prometheus.query("ALERTS") == {})


def test_every_query_of_the_dashboard_is_understood(prometheus: Prometheus) -> None:
    answers = {expression: prometheus.query(expression.replace("$service", ".*")) for expression in expressions()}
    shown = [expression for expression, rows in answers.items() if rows]
    assert len(shown) > len(answers) / 2


def test_promtool_objects_to_nothing_but_our_spelling_of_units(metrics_port: int) -> None:
    text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").raise_for_status().text
    checked = subprocess.run(
        [binary("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    lines = (checked.stdout + checked.stderr).splitlines()
    assert lines == [f"{name} metric names should not contain abbreviated units" for name in DOLLARS]
