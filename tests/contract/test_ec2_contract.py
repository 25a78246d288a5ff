"""The suite of the Cloud port on the EC2 adapter: real boto3 against the test EC2, in-process and over a socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chaos.ec2_server.state import Pool
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
    test_the_same_token_in_the_same_offering_never_launches_twice,
)
from tests.ec2_rig import BIG, A, B, Wire, ec2, offer, region

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
    "test_the_same_token_in_the_same_offering_never_launches_twice",
]
POOLS = {"od-a": Pool(BIG, A), "od-b": Pool(BIG, B), "spot-a": Pool(BIG, A, "spot")}


@pytest.fixture(params=["inproc", "socket"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    offers = (offer("od-a"), offer("od-b", B), offer("spot-a", A, "spot"))
    limits = {("G", "on-demand"): 6 * 48}
    every: dict[str, Any] = {"describe_every_s": 0.01, "unsettled_every_s": 0.01}
    wire: Wire = request.param
    with ec2(region(quotas=limits), offers=offers, wire=wire, spot_notice_s=0.6, calls_burst=1000, **every) as made:

        def set_supply(name: str, count: int) -> None:
            made.region.pools[POOLS[name]] = count

        def reclaim(instance_id: str, notice_s: float | None) -> None:
            made.region.interrupt(instance_id, made.clock.now_s(), 0.6 if notice_s is None else notice_s)

        yield Rig(made.cloud, set_supply, reclaim, made.clock.now_s, made.clock.advance)


def test_offerings_are_described_and_their_pools_are_what_fails_together(rig: Rig) -> None:
    view = rig.cloud.describe(rig.now_s())
    shown = [(row.offering, row.pool, row.market, row.region, row.gpus, row.price_usd_per_h) for row in view.offerings]
    assert shown == [
        ("od-a", f"{BIG}/{A}/on_demand", "on_demand", "us-east-1", 4, 10.5),
        ("od-b", f"{BIG}/{B}/on_demand", "on_demand", "us-east-1", 4, 10.5),
        ("spot-a", f"{BIG}/{A}/spot", "spot", "us-east-1", 4, 10.5),
    ]
    assert view.instances == ()
