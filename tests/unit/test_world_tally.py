"""What capacity costs in the simulated world, and to whom: hand-worked sums."""

from __future__ import annotations

import pytest

from chaos.world.tally import Bill, Tally
from tests.worlds import fault, row, world

HOUR = 3600.0


def tally(**bills: Bill) -> Tally:
    made = Tally()
    made.bills.update(bills)
    return made


def bill(
    market: str = "on_demand", price: float = 8.0, zone: str = "a", instance_type: str = "p5", reservation: str = ""
) -> Bill:
    return Bill(market, 8, instance_type, zone, reservation, price)


def test_an_instance_costs_by_the_second_and_is_shared_by_gpu_time() -> None:
    made = tally(od=bill())
    made.opened("i", "od", 0.0)
    made.occupied("i", "chat", 4, 900.0)
    made.occupied("i", "code", 2, 1800.0)
    made.occupied("i", "chat", -4, 2700.0)
    made.closed("i", HOUR)
    assert made.cost_usd() == pytest.approx(8.0)
    assert made.cost_by().unit == pytest.approx({"chat": 4 / 8 * 8 * 0.5, "code": 2 / 8 * 8 * 0.5, "unassigned": 5.0})
    assert made.cost_by().market == pytest.approx({"on_demand": 8.0})
    assert made.gpu_s == {"on_demand": 8 * HOUR}


def test_less_than_a_minute_costs_a_minute() -> None:
    made = tally(od=bill(price=60.0))
    made.opened("i", "od", 0.0)
    made.closed("i", 1.0)
    made.opened("j", "od", 0.0)
    made.closed("j", 61.0)
    assert made.cost_usd() == pytest.approx(1.0 + 61.0 / 60.0)
    assert made.gpu_s["on_demand"] == 8 * 62.0  # the rest of the minute is paid, not held


def test_a_price_that_changes_counts_from_then_on() -> None:
    made = tally(od=bill(price=8.0))
    made.opened("i", "od", 0.0)
    made.occupied("i", "chat", 8, 0.0)
    made.price("od", 16.0, HOUR / 2)
    made.closed("i", HOUR)
    assert made.cost_usd() == pytest.approx(4.0 + 8.0)
    assert made.cost_by().unit == pytest.approx({"chat": 12.0})


def test_a_reservation_is_paid_used_or_not_and_using_it_costs_nothing_more() -> None:
    made = tally(mine=bill("odcr", price=4.0))
    made.declare("mine", 2, 0.0)
    made.opened("i", "mine", HOUR)
    made.occupied("i", "chat", 8, HOUR)
    made.closed("i", 2 * HOUR)
    made.settle(3 * HOUR)
    assert made.cost_by().market == pytest.approx({"odcr": 2 * 4.0 * 3})
    assert made.cost_by().unit == pytest.approx({"chat": 4.0, "unassigned": 20.0})
    assert made.idle_reservation_s == pytest.approx((2 + 1 + 2) * HOUR)


def test_a_reservation_that_shrinks_under_a_noticed_instance_still_pays_for_it() -> None:
    made = tally(mine=bill("odcr", price=4.0))
    made.declare("mine", 1, 0.0)
    made.opened("i", "mine", 0.0)
    made.declare("mine", 0, HOUR)
    made.closed("i", 2 * HOUR)
    made.settle(3 * HOUR)
    assert made.cost_usd() == pytest.approx(8.0)


def test_the_time_to_each_rung_counts_from_the_first_refusal() -> None:
    made = tally(
        a=bill(zone="a"),
        b=bill(zone="b"),
        spot=bill("spot"),
        other=bill(instance_type="g6"),
        mine=bill(reservation="cr"),
    )
    made.tried("b", 5.0)
    made.was_refused("a", "no_capacity", 10.0)
    for name, at_s in (("a", 11.0), ("b", 12.0), ("other", 13.0), ("spot", 14.0), ("mine", 15.0), ("b", 99.0)):
        made.tried(name, at_s)
    made.was_refused("b", "quota", 20.0)
    assert made.rungs_s == {"zone": 2.0, "instance_type": 3.0, "market": 4.0, "reservation": 5.0}
    assert (made.attempted, dict(made.refused)) == (7, {"no_capacity": 1, "quota": 1})


def test_the_world_pays_for_a_block_in_its_whole_window_and_for_spot_while_held() -> None:
    made = world(
        row("block", 2, market="block", start_s=600.0, end_s=6600.0, price_usd_per_h=36.0),
        row("spot", market="spot", price_usd_per_h=3.6),
        duration_s=7200.0,
        faults=[fault("price", 300.0, 100.0, target="spot", value=2.0)],
    )
    made.cloud.launch("spot", 1, "t")
    made.run_until(400.0)
    (instance,) = made.pools.machines
    made.cloud.terminate(instance)
    made.run_until(7200.0)
    made.finish()
    assert made.tally.cost_by().market == pytest.approx({"block": 2 * 36.0 * 6000 / HOUR, "spot": 0.3 + 0.2})
    assert made.tally.idle_reservation_s == pytest.approx(2 * 6000.0)
