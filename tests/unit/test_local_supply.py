"""The local cloud's books: what the contract suite cannot see from outside."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from autoscaler.adapters.local_supply import CloudConfig, OfferingConfig, QuotaConfig, Refusal, Supply
from autoscaler.core.learn import family


def offering(name: str = "od-a", **changes: object) -> OfferingConfig:
    base = {"offering": name, "pool": name, "instance_type": "g6e.12xlarge", "zone": "us-east-1a", "gpus": 4}
    return OfferingConfig.model_validate(base | {"price_usd_per_h": 1.0, "count": 2, "boot_s": 30.0} | changes)


def supply(*offerings: OfferingConfig, **changes: object) -> Supply:
    rows = {"cluster": "c", "ray_address": "127.0.0.1:1", "offerings": offerings or (offering(),)}
    return Supply(CloudConfig.model_validate(rows | changes))


def state(books: Supply, instance_id: str) -> str:
    return books.machines[instance_id].state


def code(refusal: pytest.ExceptionInfo[Refusal]) -> str:
    return refusal.value.code


def test_an_instance_boots_after_its_boot_time_and_not_before() -> None:
    books = supply()
    (a,) = books.launch("od-a", 1, "t", 100.0)
    books.advance(129.9)
    assert state(books, a) == "pending"
    books.advance(130.0)
    assert state(books, a) == "running"


def test_a_terminated_instance_is_listed_for_a_minute_and_its_token_is_kept() -> None:
    books = supply()
    (a,) = books.launch("od-a", 1, "t", 0.0)
    books.terminate(a)
    books.ended(a, 10.0, "")
    books.ended(a, 50.0, "")
    books.advance(69.9)
    assert state(books, a) == "terminated"
    books.advance(70.0)
    assert books.view(70.0).instances == ()
    assert books.launch("od-a", 1, "t", 80.0) == (a,)
    assert books.view(80.0).instances == ()


def test_a_terminating_instance_still_holds_its_place() -> None:
    books = supply()
    a, _ = books.launch("od-a", 2, "t", 0.0)
    books.terminate(a)
    with pytest.raises(Refusal) as dry:
        books.launch("od-a", 1, "t2", 1.0)
    assert code(dry) == "InsufficientInstanceCapacity"
    books.ended(a, 2.0, "")
    assert len(books.launch("od-a", 1, "t3", 3.0)) == 1


def test_the_first_cause_of_an_end_is_the_one_told() -> None:
    books = supply()
    (a,) = books.launch("od-a", 1, "t", 0.0)
    books.terminate(a)
    books.ended(a, 1.0, "Server.InternalError: killed")
    assert books.machines[a].state_reason.startswith("Client.UserInitiatedShutdown")


def test_a_second_notice_can_only_shorten_the_first() -> None:
    books = supply(offering(notice_s=120.0))
    (a,) = books.launch("od-a", 1, "t", 0.0)
    assert books.reclaim(a, 50.0) == 170.0
    assert books.reclaim(a, 60.0) == 170.0
    assert books.reclaim(a, 60.0, 5.0) == 65.0
    books.advance(64.9)
    assert state(books, a) == "running"
    books.advance(65.0)
    assert state(books, a) == "terminating"


def test_offerings_of_one_pool_run_dry_together() -> None:
    books = supply(offering("od-a", pool="p"), offering("odcr-a", pool="p"))
    assert len(books.launch("od-a", 2, "t", 0.0)) == 2
    with pytest.raises(Refusal) as dry:
        books.launch("odcr-a", 1, "t", 0.0)
    assert code(dry) == "InsufficientInstanceCapacity"
    books.set_supply("odcr-a", 3)
    assert len(books.launch("od-a", 2, "t2", 0.0)) == 1


def test_a_quota_counts_a_family_in_one_market_over_all_pools() -> None:
    quota = QuotaConfig(family="g", market="on_demand", gpus=9)
    books = supply(
        offering("a"), offering("b", instance_type="g5.xlarge", gpus=1), offering("c", market="spot"), quotas=(quota,)
    )
    assert len(books.launch("a", 2, "t", 0.0)) == 2
    assert len(books.launch("b", 2, "t", 0.0)) == 1
    with pytest.raises(Refusal) as full:
        books.launch("b", 1, "t2", 0.0)
    assert code(full) == "VcpuLimitExceeded"
    assert len(books.launch("c", 2, "t", 0.0)) == 2


def test_calls_beyond_the_bucket_are_throttled_and_the_bucket_refills() -> None:
    books = supply(calls_burst=2, calls_per_s=0.5)
    for token in ("t1", "t2"):
        books.launch("od-a", 1, token, 0.0)
    with pytest.raises(Refusal) as throttled:
        books.launch("od-a", 1, "t3", 1.0)
    assert code(throttled) == "RequestLimitExceeded"
    assert books.launch("od-a", 1, "t1", 2.0) == ("i-0001",)


@pytest.mark.parametrize("token", ["", "x" * 65])
def test_a_token_is_as_long_as_ec2_takes_it(token: str) -> None:
    with pytest.raises(Refusal) as wrong:
        supply().launch("od-a", 1, token, 0.0)
    assert code(wrong) == "InvalidParameterValue"


def test_a_family_is_the_letters_before_the_generation() -> None:
    assert [family(name) for name in ("p5.48xlarge", "g6e.12xlarge", "trn1.2xlarge", "local")] == [
        "p",
        "g",
        "trn",
        "local",
    ]


@pytest.mark.parametrize(
    ("offerings", "said"),
    [
        ((offering("a"), offering("a")), "offering 'a' is given twice"),
        ((offering("a", pool="p", count=1), offering("b", pool="p", count=2)), "pool 'p' has counts 1 and 2"),
    ],
)
def test_contradictions_in_a_config_are_named(offerings: tuple[OfferingConfig, ...], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        supply(*offerings)


def test_a_zone_that_cannot_be_a_label_is_refused() -> None:
    with pytest.raises(ValidationError, match="zone"):
        offering(zone="us east")
