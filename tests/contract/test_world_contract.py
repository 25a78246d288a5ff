"""The suites of the ports, run on the simulated world."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.core.model import Measured
from autoscaler.ports import Cloud, Metrics, Serving, Transient
from chaos.world.world import World
from tests.contract.test_cloud_contract import (
    Rig,
    test_a_launch_goes_from_pending_to_running_and_keeps_its_token,
    test_a_pool_gives_what_it_has_and_then_refuses_by_name,
    test_a_quota_is_of_the_account_not_of_the_pool,
    test_a_reclaim_gives_notice_and_strikes_at_its_deadline,
    test_a_smaller_supply_refuses_launches_but_stops_nothing,
    test_a_terminated_instance_ends_and_frees_its_pool,
    test_a_wrong_request_is_misconfigured,
    test_an_instance_still_pending_can_be_given_back,
    test_giving_back_an_unknown_instance_is_not_found,
    test_offerings_are_described_with_what_a_decision_needs,
    test_the_same_token_in_the_same_offering_never_launches_twice,
)
from tests.serving_contract import OFFERING, ServingRig, comes_to_life, is_emptied_by_a_drain, plan
from tests.worlds import BIG, CHAT, constant, demand, fault, row, service, unit, world

__all__ = [
    "test_a_launch_goes_from_pending_to_running_and_keeps_its_token",
    "test_a_pool_gives_what_it_has_and_then_refuses_by_name",
    "test_a_quota_is_of_the_account_not_of_the_pool",
    "test_a_reclaim_gives_notice_and_strikes_at_its_deadline",
    "test_a_smaller_supply_refuses_launches_but_stops_nothing",
    "test_a_terminated_instance_ends_and_frees_its_pool",
    "test_a_wrong_request_is_misconfigured",
    "test_an_instance_still_pending_can_be_given_back",
    "test_giving_back_an_unknown_instance_is_not_found",
    "test_offerings_are_described_with_what_a_decision_needs",
    "test_the_same_token_in_the_same_offering_never_launches_twice",
]
FAST = 10.0  # the world's instances take 20 s to end, the suite's limits are meant for fractions of one


def cloud_world() -> World:
    def offering(name: str, pool: str, count: int, market: str) -> dict[str, Any]:
        place = {"instance_type": BIG, "zone": "us-east-1a", "region": "us-east-1", "market": market, "pool": pool}
        return row(name, count, **place, price_usd_per_h=10.5, boot_s=constant(0.2), notice_s=0.6)

    return world(
        offering("od-a", "a", 3, "on_demand"),
        offering("od-b", "b", 9, "on_demand"),
        offering("spot-a", "s", 2, "spot"),
        quotas=[{"family": "g6e", "market": "on_demand", "gpus": 24}],
    )


@pytest.fixture
def rig() -> Rig:
    made = cloud_world()

    def set_supply(offering: str, count: int) -> None:
        made.pools.rows[offering].base = count  # without the notices that the world's own changes of supply bring

    def reclaim(instance: str, notice_s: float | None) -> None:
        machine = made.pools.machines[instance]
        made.pools.notice(
            machine, made.timeline.now_s + (machine.row.supply.notice_s if notice_s is None else notice_s)
        )

    def wait(by_s: float) -> None:
        made.run_until(made.timeline.now_s + FAST * by_s)

    return Rig(made.cloud, set_supply, reclaim, made.clock.now_s, wait)


def test_a_replicas_life_on_an_instance_from_join_to_drain() -> None:
    offer = row(OFFERING, 2, instance_type=BIG, boot_s=constant(0.2), load_s=constant(5.0))
    variant = {"id": "small", "instance_type": BIG, "tp": 2}
    made = world(offer, policies=[unit(service(variants=[variant]))])

    def wait(by_s: float) -> None:
        made.run_until(made.timeline.now_s + by_s)

    def scale(target: int) -> None:
        made.serving.publish(plan(0, target))

    serving: Serving = made.serving
    cloud: Cloud = made.cloud
    told = ServingRig(serving, cloud, made.clock.now_s, wait, scale)
    is_emptied_by_a_drain(told, comes_to_life(told))


def test_metrics_are_idle_measured_or_missing_and_never_a_zero_for_nothing() -> None:
    made = world(
        row("od", boot_s=constant(1.0), load_s=constant(1.0)),
        policies=[unit(service(), service("still"))],
        demand=[demand(2.0)],
        faults=[fault("metrics_gone", 700.0, 100.0), fault("metrics_gone", 900.0, 100.0, target=CHAT)],
    )
    metrics: Metrics = made.metrics

    def loads_at(at_s: float) -> dict[str, tuple[str, str, str]]:
        made.run_until(at_s)
        made.metrics.sample()
        loads = metrics.loads(made.clock.now_s())
        return {row.service: (row.arrival_rps.kind, row.prefill_tps.kind, row.queued.kind) for row in loads}

    assert loads_at(60.0) == {
        CHAT: ("measured", "missing", "measured"),  # nobody has answered yet
        "support/still": ("idle", "idle", "idle"),
    }
    made.cloud.launch("od", 2, "t")
    made.cluster.set_targets({("support.chat.l40s", ""): 2})
    assert loads_at(600.0)[CHAT] == ("measured", "measured", "measured")
    (load, _) = metrics.loads(made.clock.now_s())
    assert isinstance(load.arrival_rps, Measured)
    assert load.arrival_rps.value == pytest.approx(2.0, rel=0.2)
    engines = metrics.engines(made.clock.now_s())
    assert len(engines) == 2
    assert {engine.tpot_s.kind for engine in engines} == {"measured"}
    with pytest.raises(Transient):
        loads_at(750.0)
    assert loads_at(950.0)[CHAT] == ("missing", "missing", "missing")
    assert metrics.engines(made.clock.now_s()) == ()
