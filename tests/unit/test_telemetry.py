"""The loop's events as Prometheus metrics, in a shortage that is played out."""

from __future__ import annotations

from autoscaler.adapters.telemetry import PrometheusTelemetry
from autoscaler.ports import Transient
from tests.scene import Scene, offering, service, unit

CHAT = {"service": "support/chat"}
L4 = {"service": "support/chat", "variant": "l4"}


def watched() -> tuple[Scene, PrometheusTelemetry]:
    """A pool that is dry, and one of two instances where three are needed."""
    made = Scene(
        units=[unit(service(min_replicas=3))],
        offerings=[offering("dry", price=1.0, count=0), offering("small", price=2.0, count=2)],
    )
    made.load("support/chat", 0.5)
    telemetry = PrometheusTelemetry()
    made.controller.telemetry = telemetry
    made.controller.ledger.on_event = telemetry.event
    return made, telemetry


def value(telemetry: PrometheusTelemetry, name: str, labels: dict[str, str] | None = None) -> float | None:
    return telemetry.registry.get_sample_value(name, labels)


def test_launches_and_refusals_are_counted_by_offering_outcome_and_class() -> None:
    made, telemetry = watched()
    made.run(10.0)
    assert value(telemetry, "qm_launches_total", {"offering": "dry", "outcome": "refused"}) == 1.0
    assert value(telemetry, "qm_launches_total", {"offering": "small", "outcome": "granted"}) == 1.0
    assert value(telemetry, "qm_refusals_total", {"class": "no_capacity"}) == 1.0
    until_s = value(telemetry, "qm_cooldown_until", {"offering": "dry"})
    assert until_s == made.beliefs.offerings["dry"].cool_until_s


def test_instances_are_starting_until_they_are_in_the_cluster_and_cost_from_the_start() -> None:
    made, telemetry = watched()
    made.run(20.0)
    assert value(telemetry, "qm_starting_instances", {"offering": "small"}) == 2.0
    assert value(telemetry, "qm_cost_usd_per_h") == 4.0
    assert value(telemetry, "qm_ready_replicas", L4) == 0.0
    made.run(200.0)
    assert value(telemetry, "qm_starting_instances", {"offering": "small"}) == 0.0
    assert value(telemetry, "qm_ready_replicas", L4) == 2.0
    assert value(telemetry, "qm_target_replicas", L4) == 2.0


def test_demand_and_what_is_short_of_it_are_shown() -> None:
    made, telemetry = watched()
    plan = made.run(30.0)
    assert value(telemetry, "qm_demand_rps", CHAT) == plan.demands[0].arrival_rps > 0.0
    assert value(telemetry, "qm_shortfall_replicas", CHAT) == 1.0
    made.cloud.set_supply("small", 9)
    made.run(600.0)
    assert value(telemetry, "qm_shortfall_replicas", CHAT) == 0.0
    assert value(telemetry, "qm_wanted_replicas", L4) == 3.0


def test_a_port_that_says_nothing_is_shown_while_it_does() -> None:
    made, telemetry = watched()
    made.cloud.failures.append(Transient("gone"))
    made.run(10.0)
    assert value(telemetry, "qm_blind", {"port": "cloud"}) == 1.0
    assert value(telemetry, "qm_blind", {"port": "serving"}) == 0.0
    made.run(10.0)
    assert value(telemetry, "qm_blind", {"port": "cloud"}) == 0.0


def test_a_service_that_left_the_policy_leaves_the_metrics() -> None:
    made, telemetry = watched()
    made.run(10.0)
    made.policy = made.policy.model_copy(update={"units": (unit(service("other")),)})
    made.source.set(made.policy)
    made.run(10.0)
    assert value(telemetry, "qm_demand_rps", CHAT) is None
    assert value(telemetry, "qm_demand_rps", {"service": "support/other"}) is not None


def test_the_time_of_a_tick_is_measured() -> None:
    _, telemetry = watched()
    with telemetry.timed():
        pass
    assert value(telemetry, "qm_tick_seconds_count") == 1.0
