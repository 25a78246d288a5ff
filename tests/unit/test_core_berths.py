"""Placement on a shelf of instances: replicas of several nodes, slow nodes, and what is paid for anyway."""

from __future__ import annotations

from typing import Any

from autoscaler.core.beliefs import EMPTY, Beliefs
from autoscaler.core.berths import Berth, Need, Option
from autoscaler.core.capacity import Capacity
from autoscaler.core.model import Demand, Offering, Shape
from autoscaler.core.place import place
from autoscaler.core.rank import open_for_work
from autoscaler.core.reasons import ReasonCode, why
from autoscaler.core.shares import Purse
from policies.model import Unit, Variant
from tests.scene import TIMING, service

RPS = 2.0
Running = dict[str, tuple[tuple[str, ...], ...]]
CAPACITY = Capacity(rps=RPS, batch=8, reasons=(why(ReasonCode.PLACED, placed=1),))


def offer(name: str = "a", zone: str = "z1", market: Any = "on_demand", **over: Any) -> Offering:
    return Offering(
        offering=name,
        pool=name,
        instance_type="p5",
        zone=zone,
        market=market,
        gpus=8,
        price_usd_per_h=8.0,
        **over,
    )


def berth(
    name: str, offering: Offering, present: dict[str, tuple[tuple[str, ...], ...]] | None = None, **over: Any
) -> Berth:
    return Berth(instance_id=name, offering=offering, joined=True, launched_at_s=0.0, present=present or {}, **over)


def need(
    name: str = "chat", *, rps: float, nodes: int = 1, gpus: int = 8, quota: int | None = None, **over: Any
) -> Need:
    shape = Shape(
        service=f"u/{name}",
        variant="v",
        instance_type="p5",
        gpus=gpus,
        nodes=nodes,
        timing=TIMING,
        load_prior_s=60.0,
        boot_prior_s=60.0,
        source="test",
    )
    demand = Demand(
        service=f"u/{name}",
        quantile=0.95,
        lead_s=120.0,
        unheld_rps=rps,
        arrival_rps=rps,
        replicas_floor=0,
        prefill_tps=0.0,
        decode_tps=0.0,
        reasons=(),
    )
    entry = service(name, variants=(Variant(id="v", instance_type="p5", tp=gpus, nodes_per_replica=nodes),), **over)
    purse = Purse(unit=Unit(unit="u", owner="o", services=(entry,), quota_gpus=quota))
    return Need(demand=demand, entry=entry, purse=purse, options=(Option(shape=shape, capacity=CAPACITY),))


def beliefs(*offers: Offering) -> Beliefs:
    return Beliefs(offers={one.offering: one for one in offers})


def seats(one: Need) -> list[tuple[str, ...]]:
    return [tuple(b.instance_id for b in seat.berths) for seat in one.seats]


def test_a_replica_of_two_nodes_is_ordered_with_both() -> None:
    chat = need(rps=3.0, nodes=2)
    orders = place((chat,), [], beliefs(offer()), 0.0).orders
    assert [(order.count, order.alternates) for order in orders] == [(4, ("a",))]
    assert chat.replicas == 2
    assert chat.purse.gpus == 32


def test_a_lone_free_node_is_completed_and_one_of_another_zone_is_not_used() -> None:
    here, there = offer("a", "z1"), offer("b", "z2")
    chat = need(rps=1.0, nodes=2)
    orders = place((chat,), [berth("i-1", here), berth("i-2", there)], beliefs(here), 0.0).orders
    assert [order.count for order in orders] == [1]
    assert seats(chat)[0][0] == "i-1"


def test_a_running_pair_stays_together_and_is_not_counted_twice() -> None:
    a = offer()
    app: Running = {"u.chat.v": (("i-3",),)}
    shelf = [berth("i-1", a), berth("i-2", a, app), berth("i-3", a)]
    chat = need(rps=1.0, nodes=2)
    assert place((chat,), shelf, beliefs(a), 0.0).orders == ()
    assert seats(chat) == [("i-2", "i-3")]


def test_a_pair_that_lost_a_node_is_no_replica() -> None:
    a = offer()
    chat = need(rps=1.0, nodes=2)
    orders = place((chat,), [berth("i-2", a, {"u.chat.v": (("i-gone",),)})], beliefs(a), 0.0).orders
    assert [order.count for order in orders] == [1]
    assert chat.replicas == 1


def test_a_pair_takes_the_places_of_the_least_important_on_two_nodes_of_one_zone() -> None:
    a, b = offer("a", "z1"), offer("b", "z2")
    batch = need("batch", rps=6.0, priority=10)
    chat = need("chat", rps=1.0, nodes=2, priority=900)
    app: Running = {"u.batch.v": ((),)}
    shelf = [berth("i-1", b, app), berth("i-2", a, app), berth("i-3", a, app)]
    assert place((chat, batch), shelf, EMPTY, 0.0).orders == ()
    assert seats(chat) == [("i-2", "i-3")]
    assert seats(batch) == [("i-1",)]
    assert [r.numbers for r in batch.reasons if r.code is ReasonCode.PREEMPTED] == [
        why(ReasonCode.PREEMPTED, "u/chat", replicas=2, priority=900).numbers
    ]


def test_a_swap_that_the_quota_forbids_changes_nothing() -> None:
    a = offer()
    batch = need("batch", rps=4.0, priority=10)
    chat = need("chat", rps=1.0, nodes=2, priority=900, quota=8)
    app: Running = {"u.batch.v": ((),)}
    place((chat, batch), [berth("i-1", a, app), berth("i-2", a, app)], EMPTY, 0.0)
    assert (seats(chat), seats(batch)) == ([], [("i-1",), ("i-2",)])


def test_a_slow_node_counts_for_what_it_carries() -> None:
    chat = need(rps=2.0)
    shelf = [berth("i-1", offer(), pace=1.6), berth("i-2", offer())]
    place((chat,), shelf, EMPTY, 0.0)
    assert chat.replicas == 2
    assert chat.rps == RPS / 1.6 + RPS
    slow = next(reason for reason in chat.reasons if reason.code is ReasonCode.SLOW_NODE)
    assert (slow.subject, slow.numbers) == ("i-1", why(ReasonCode.SLOW_NODE, ratio=1.6, rps=1.25).numbers)


def test_replicas_stay_on_what_is_paid_for_anyway_unless_another_takes_the_place() -> None:
    paid, bought = offer("paid", market="odcr"), offer("bought")
    app: Running = {"u.chat.v": ((),)}
    chat, other = need("chat", rps=0.0, priority=10), need("other", rps=2.0)
    place((other, chat), [berth("i-1", paid, app), berth("i-2", paid, app), berth("i-3", bought, app)], EMPTY, 0.0)
    assert len(seats(other)) == 1
    assert len(seats(chat)) == 1
    assert "i-3" not in seats(chat)[0]


def test_an_offering_is_open_from_its_start_until_a_lead_before_it_closes() -> None:
    block = offer(starts_at_s=1000.0, ends_at_s=10_000.0)
    assert [open_for_work(block, 300.0, at_s) for at_s in (999.0, 1000.0, 7300.0, 7301.0)] == [False, True, True, False]


def test_a_replica_stays_while_the_demand_is_within_five_percent_of_needing_it() -> None:
    a = offer()
    app: Running = {"u.chat.v": ((),)}

    def kept(rps: float) -> int:
        chat = need(rps=rps)
        place((chat,), [berth(f"i-{n}", a, app) for n in range(3)], beliefs(a), 0.0)
        return chat.replicas

    assert [kept(rps) for rps in (4.1, 3.9, 3.82, 3.8)] == [3, 3, 3, 2]
    fresh = need(rps=3.9)
    place((fresh,), [berth(f"i-{n}", a) for n in range(3)], beliefs(a), 0.0)
    assert fresh.replicas == 2, "but none is added for it"


def on(market: str, name: str, ready: int | None = None, seats: int = 1) -> Berth:
    """An instance of a reservation or bought by the hour, with one replica that serves (1) or loads (0), or none."""
    app: Running = {} if ready is None else {"u.chat.v": ((),) * seats}
    return berth(name, offer(name, market=market), app, ready={"u.chat.v": ready or 0})


def test_a_successor_is_loaded_where_it_is_paid_for_anyway_before_the_other_leaves() -> None:
    bought, paid = on("on_demand", "i-od", ready=1), on("odcr", "i-cr")
    chat = need(rps=2.0)
    assert place((chat,), [bought, paid], EMPTY, 0.0).orders == ()
    assert seats(chat) == [("i-od",), ("i-cr",)]


def test_while_the_successor_loads_the_other_stays_and_then_goes() -> None:
    loading = need(rps=1.5)
    place((loading,), [on("on_demand", "i-od", ready=1), on("block", "i-cb", ready=0)], EMPTY, 0.0)
    assert seats(loading) == [("i-od",), ("i-cb",)]
    moved = need(rps=1.5)
    place((moved,), [on("on_demand", "i-od", ready=1), on("block", "i-cb", ready=1)], EMPTY, 0.0)
    assert seats(moved) == [("i-cb",)]


def test_no_more_moves_than_the_bounds_allow() -> None:
    full = need(rps=4.0, max_replicas=2)
    place((full,), [on("on_demand", "i-1", ready=1), on("on_demand", "i-2", ready=1), on("odcr", "i-cr")], EMPTY, 0.0)
    assert seats(full) == [("i-1",), ("i-2",)]
    capped = need(rps=2.0, quota=8)
    place((capped,), [on("on_demand", "i-1", ready=1), on("odcr", "i-cr")], EMPTY, 0.0)
    assert seats(capped) == [("i-1",)]


def test_a_reservation_that_nobody_uses_is_asked_for_what_runs_elsewhere() -> None:
    chat = need(rps=4.0, markets=("odcr", "on_demand"))
    shelf = [on("on_demand", "i-1", ready=1), on("on_demand", "i-2", ready=1)]
    known = beliefs(offer("cr", market="odcr"), offer("od"))
    (order,) = place((chat,), shelf, known, 0.0).orders
    assert (order.count, order.alternates) == (2, ("cr",))
    assert [(r.code, r.subject, r.numbers) for r in order.reasons] == [
        (ReasonCode.PAID_ANYWAY, "cr", why(ReasonCode.PAID_ANYWAY, replicas=2).numbers)
    ]
    again = [on("on_demand", "i-1", ready=1), on("on_demand", "i-2", ready=1)]
    assert place((need(rps=4.0),), again, beliefs(offer("od")), 0.0).orders == ()


def test_replicas_that_serve_are_kept_before_those_that_load() -> None:
    chat = need(rps=1.5)
    place((chat,), [on("on_demand", "i-1", ready=0), on("on_demand", "i-2", ready=1)], EMPTY, 0.0)
    assert seats(chat) == [("i-2",)]
