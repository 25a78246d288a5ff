"""A Capacity Block is bought once or not at all, whatever becomes of the answer and of the process that asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autoscaler.adapters.ec2.calls import Bucket, Caller
from autoscaler.adapters.ec2.purchase import LAG_S, BlockForSale, Purchases, for_sale
from autoscaler.ports import Misconfigured, NotFound, PortError, Refused, Throttled, Transient
from chaos.ec2_server.state import BlockOffering
from tests.ec2_rig import EAST, HUGE, A, Ec2Rig, clients, ec2, region

DAY_S = 86_400.0
START_S = 1_000_000.0 + DAY_S


@dataclass
class Shop:
    """An account where two blocks are for sale, and whoever buys there."""

    rig: Ec2Rig
    folder: Path
    callers: list[Caller] = field(default_factory=list)

    def caller(self, burst: float = 100.0) -> Caller:
        self.callers.append(Caller(clients(EAST), Bucket(burst, 0.001, self.rig.clock.now_s)))
        return self.callers[-1]

    def buyer(self, burst: float = 100.0) -> Purchases:
        """As a new process would buy."""
        return Purchases(self.caller(burst), self.folder, self.rig.clock.now_s)

    def for_sale(self, count: int = 2, hours: int = 24) -> tuple[BlockForSale, ...]:
        return for_sale(self.caller(), HUGE, count, hours)

    @property
    def bought(self) -> list[str]:
        return list(self.rig.region.reservations)

    def close(self) -> None:
        while self.callers:
            self.callers.pop().close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    rows = [BlockOffering(f"cb-{n}", HUGE, A, 2, START_S + n * DAY_S, START_S + (n + 1) * DAY_S, 900.0) for n in (1, 0)]
    with ec2(region(blocks={row.offering_id: row for row in rows}, payment_s=60.0)) as rig:
        made = Shop(rig, tmp_path)
        yield made
        made.close()


def test_blocks_for_sale_come_earliest_first_and_only_those_that_fit(shop: Shop) -> None:
    rows = shop.for_sale()
    assert [(row.offering_id, row.start_at_s, row.fee_usd) for row in rows] == [
        ("cb-0", START_S, 900.0),
        ("cb-1", START_S + DAY_S, 900.0),
    ]
    assert shop.for_sale(3) == shop.for_sale(2, 48) == ()
    shop.rig.clock.advance(DAY_S + 1.0)
    assert [row.offering_id for row in shop.for_sale()] == ["cb-1"]


def test_a_name_buys_once(shop: Shop) -> None:
    block = shop.for_sale()[0]
    first = shop.buyer().buy("spring", block)
    assert shop.buyer().buy("spring", block) == first
    assert shop.bought == [first]
    row = shop.rig.region.reservations[first]
    assert (row.tags, row.state(shop.rig.clock.now_s())) == ({"qm:purchase": "spring"}, "payment-pending")
    assert shop.buyer().buy("summer", block) != first


@pytest.mark.parametrize("kind", ["lost_after", "error_after", "garbled", "hang", "html", "page", "lost_before"])
@pytest.mark.parametrize("crash", [False, True])
def test_an_open_answer_is_settled_by_looking_and_never_sent_again(shop: Shop, kind: str, crash: bool) -> None:
    block = shop.for_sale()[0]
    shop.rig.fault(kind, "PurchaseCapacityBlock")
    buyer = shop.buyer()
    with pytest.raises(Transient):
        buyer.buy("spring", block)
    for _ in range(5):
        again = shop.buyer() if crash else buyer
        try:
            assert again.buy("spring", block) == shop.bought[0]
        except Transient:
            assert not shop.bought
        shop.rig.clock.advance(60.0)
    assert shop.rig.calls("PurchaseCapacityBlock") == 1
    assert len(shop.bought) == (kind not in ("html", "page", "lost_before"))


def test_what_no_listing_shows_after_the_lag_was_not_bought_and_wants_a_new_name(shop: Shop) -> None:
    block = shop.for_sale()[0]
    shop.rig.fault("lost_before", "PurchaseCapacityBlock")
    buyer = shop.buyer()
    with pytest.raises(Transient):
        buyer.buy("spring", block)
    shop.rig.clock.advance(LAG_S - 1.0)
    with pytest.raises(Transient):
        buyer.buy("spring", block)
    shop.rig.clock.advance(2.0)
    with pytest.raises(NotFound):
        buyer.buy("spring", block)
    assert shop.rig.calls("PurchaseCapacityBlock") == 1
    assert buyer.buy("spring-2", block) == shop.bought[0]


def test_a_refusal_is_final_for_its_name(shop: Shop) -> None:
    block = shop.for_sale()[0]
    buyer = shop.buyer()
    shop.rig.region.denied.add("PurchaseCapacityBlock")
    with pytest.raises(Misconfigured):
        buyer.buy("spring", block)
    shop.rig.region.denied.clear()
    with pytest.raises(Refused, match="UnauthorizedOperation"):
        buyer.buy("spring", block)
    assert shop.bought == []
    assert buyer.buy("spring-2", block) == shop.bought[0]


def test_a_name_stands_for_one_purchase(shop: Shop) -> None:
    early, late = shop.for_sale()
    shop.buyer().buy("spring", early)
    with pytest.raises(Refused, match="is the purchase of cb-0"):
        shop.buyer().buy("spring", late)
    for name in ("", "../x", ".hidden"):
        with pytest.raises(Misconfigured):
            shop.buyer().buy(name, early)


def test_a_call_that_our_own_limit_kept_back_leaves_the_name_good(shop: Shop) -> None:
    block = shop.for_sale()[0]
    with pytest.raises(Throttled):
        shop.buyer(burst=1.0).buy("spring", block)
    shop.close()
    assert shop.buyer().buy("spring", block) == shop.bought[0]
    shop.rig.fault("error_after", "PurchaseCapacityBlock", code="RequestLimitExceeded", status=503)
    with pytest.raises(PortError):
        shop.buyer().buy("summer", block)
    shop.rig.clock.advance(10.0)
    assert shop.buyer().buy("summer", block) == shop.bought[1]
    assert shop.rig.calls("PurchaseCapacityBlock") == 2
