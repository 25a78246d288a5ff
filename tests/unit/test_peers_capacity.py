"""The peers' capacity layers: packing, Karpenter's order and memory, Ray's autoscaler v2."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.peers import PEERS
from chaos.peers.facts import facts_of
from chaos.peers.layers import Karpenter, RayV2
from chaos.peers.packing import Answer, Fleet, Want, instances_needed
from tests.peer_scene import Json, load, offering, replicas, row, scenario, service, shape, view


def wants(told: Json, units: dict[str, float]) -> list[Want]:
    return [Want(entry, entry.shapes, units.get(entry.key, 0)) for entry in facts_of(told).services]


def karpenter(told: Json, seen: Json, units: float | dict[str, float], now_s: float = 1000.0) -> Answer:
    facts = facts_of(told)
    asked = units if isinstance(units, dict) else {"unit/chat": units}
    return Karpenter(facts).place(now_s, Fleet(facts, seen), wants(told, asked))


class Ray:
    """Ray's layer over a scenario, kept between ticks."""

    def __init__(self, told: Json) -> None:
        self.told, self.facts = told, facts_of(told)
        self.layer = RayV2(self.facts)

    def place(self, seen: Json, units: float | dict[str, float], now_s: float = 1000.0) -> Answer:
        asked = units if isinstance(units, dict) else {"unit/chat": units}
        return self.layer.place(now_s, Fleet(self.facts, seen), wants(self.told, asked))


PACKED = [
    ({1: 8}, 8, 1),
    ({1: 9}, 8, 2),
    ({4: 1, 1: 4}, 8, 1),
    ({4: 1, 1: 5}, 8, 2),
    ({8: 2, 4: 1, 2: 1, 1: 2}, 8, 3),
    ({3: 2, 2: 1}, 8, 1),  # 3 + 3 + 2
    ({3: 3}, 8, 2),  # two to an instance, not 9/8
    ({5: 2, 3: 2}, 8, 2),
    ({}, 8, 0),
    ({1: 0, 2: 0}, 8, 0),
    ({1: 3}, 1, 3),
]


@pytest.mark.parametrize(("sizes", "gpus", "needed"), PACKED)
def test_parts_never_span_instances(sizes: dict[int, int], gpus: int, needed: int) -> None:
    assert instances_needed(sizes, gpus) == needed


MARKETS = [offering("od"), offering("spot", "spot"), offering("odcr", "odcr", count=1), offering("dear", "spot")]
NEW = {"od": row(40.0), "spot": row(12.0), "odcr": row(40.0), "dear": row(15.0)}


def test_reserved_comes_before_spot_and_no_more_than_the_reservation_holds() -> None:
    answer = karpenter(scenario(supply=MARKETS), view({}, NEW), 12)
    assert answer["instances"] == {"odcr": 1, "spot": 1}
    assert answer["replicas"] == {("unit/chat", "a", "odcr"): 12}  # all pending, at the first choice
    launched = view(
        {}, {**NEW, "odcr": row(40.0, starting=1), "spot": row(12.0, starting=1)}, replicas("odcr", 12, "starting")
    )
    assert karpenter(scenario(supply=MARKETS), launched, 12)["replicas"] == {
        ("unit/chat", "a", "odcr"): 8,
        ("unit/chat", "a", "spot"): 4,
    }


ORDER: list[tuple[dict[str, Json], str]] = [
    ({}, "spot"),
    ({"spot": row(16.0)}, "dear"),  # the price counts within a market
    ({"spot": row(12.0, refused_at_s=821.0)}, "od"),  # one memory for a type's spot market in a zone
    ({"spot": row(12.0, refused_at_s=820.0)}, "spot"),  # forgotten after three minutes
]


@pytest.mark.parametrize(("changed", "chosen"), ORDER)
def test_karpenter_takes_the_cheapest_offering_that_did_not_refuse_lately(
    changed: dict[str, Json], chosen: str
) -> None:
    supply = [offering("od"), offering("spot", "spot"), offering("dear", "spot")]
    rows = {"od": row(40.0), "spot": row(12.0), "dear": row(15.0), **changed}
    assert list(karpenter(scenario(supply=supply), view({}, rows), 1)["instances"]) == [chosen]


def test_another_zone_is_another_cell() -> None:
    supply = [offering("s1", "spot"), offering("s2", "spot", zone="z2"), offering("od")]
    rows = {"s1": row(10.0, refused_at_s=990.0), "s2": row(11.0), "od": row(40.0)}
    assert karpenter(scenario(supply=supply), view({}, rows), 1)["instances"] == {"s2": 1}


def test_what_all_offerings_refused_stays_wanted_but_no_instance_is_asked_for() -> None:
    answer = karpenter(scenario(), view({}, {"od": row(refused_at_s=999.0)}), 3)
    assert answer == {"instances": {}, "replicas": {("unit/chat", "a", "od"): 3}}


def test_free_room_of_instances_that_start_is_used_before_another_is_asked() -> None:
    seen = view({}, {"od": row(ready=1, starting=1)}, replicas("od", 7))
    answer = karpenter(scenario(), seen, 16)
    assert answer == {"instances": {"od": 2}, "replicas": {("unit/chat", "a", "od"): 16}}


def test_starting_replicas_go_first_then_the_dearest_place_and_empty_instances_with_them() -> None:
    supply = [offering("od"), offering("spot", "spot")]
    told = scenario(supply=supply)
    rows = {"od": row(40.0, ready=1), "spot": row(12.0, ready=1)}
    places = [*replicas("od", 4), *replicas("spot", 2), *replicas("spot", 2, "starting")]
    assert karpenter(told, view({}, rows, places), 6)["replicas"] == {
        ("unit/chat", "a", "od"): 4,
        ("unit/chat", "a", "spot"): 2,
    }
    assert karpenter(told, view({}, rows, places), 2) == {
        "instances": {"spot": 1},
        "replicas": {("unit/chat", "a", "spot"): 2},
    }


def test_replicas_that_wait_for_a_refused_instance_are_asked_for_elsewhere() -> None:
    told = scenario(supply=[offering("od"), offering("spot", "spot")])
    rows = {"od": row(40.0), "spot": row(12.0, ready=1, refused_at_s=990.0)}
    waiting = [*replicas("spot", 6), *replicas("spot", 10, "starting")]
    assert karpenter(told, view({}, rows, waiting), 16)["instances"] == {"od": 1, "spot": 1}


def test_instances_that_never_join_are_given_up_after_fifteen_minutes_and_asked_for_anew() -> None:
    told = scenario(services=[service(min_replicas=9)])
    controller = PEERS["static"](told)
    never = view({"unit/chat": load()}, {"od": row(ready=1, starting=1)}, replicas("od", 8))
    asked = [controller.decide(now_s, never)["instances"]["od"] for now_s in (0.0, 890.0, 900.0)]
    assert asked == [2, 2, 1]
    gone = view({"unit/chat": load()}, {"od": row(ready=1)}, replicas("od", 8))
    assert controller.decide(910.0, gone)["instances"] == {"od": 2}


def test_draining_replicas_do_not_count() -> None:
    seen = view({}, {"od": row(ready=1)}, [*replicas("od", 2), *replicas("od", 3, "draining")])
    assert karpenter(scenario(), seen, 4)["replicas"] == {("unit/chat", "a", "od"): 4}


def test_a_replica_of_two_nodes_is_placed_whole_or_not_at_all() -> None:
    told = scenario(shapes=[shape(gpus=8, nodes=2)], supply=[offering("odcr", "odcr", count=3), offering("od")])
    rows = {"odcr": row(), "od": row()}
    answer = karpenter(told, view({}, rows), 2)
    assert answer["instances"] == {"odcr": 2, "od": 2}
    half = view({}, {"odcr": row(ready=1, refused_at_s=999.0), "od": row(refused_at_s=999.0)})
    assert karpenter(told, half, 1)["instances"] == {}


def test_a_larger_variant_counts_for_what_it_carries() -> None:
    shapes = [shape(), shape("b", "large", capacity_rps=5.0, gpus=8)]
    supply = [offering("od"), offering("odcr", "odcr", "large", count=1)]
    seen = view({}, {"od": row(starting=1), "odcr": row(starting=1)})
    answer = karpenter(scenario(shapes=shapes, supply=supply), seen, 4)
    assert answer["replicas"] == {("unit/chat", "b", "odcr"): 1, ("unit/chat", "a", "od"): 2}  # 2.5 units, then 2


def test_services_share_an_instance_and_the_more_important_one_is_placed_first() -> None:
    told = scenario(
        services=[service("batch", priority=1), service("chat", priority=9)],
        shapes=[shape(key="unit/batch"), shape()],
        supply=[offering("odcr", "odcr", count=1)],
    )
    answer = karpenter(told, view({}, {"odcr": row()}), {"unit/chat": 6, "unit/batch": 6})
    assert answer == {
        "instances": {"odcr": 1},
        "replicas": {("unit/chat", "a", "odcr"): 6, ("unit/batch", "a", "odcr"): 6},  # four of them pending
    }


def test_a_units_quota_of_gpus_holds_and_its_more_important_service_goes_first() -> None:
    told = scenario(
        services=[service("batch", priority=1), service("chat", priority=9)], shapes=[shape(key="unit/batch"), shape()]
    )
    told["policies"][0]["quota_gpus"] = 10
    answer = karpenter(told, view({}, {"od": row()}), {"unit/chat": 6, "unit/batch": 6})
    assert answer == {"instances": {"od": 2}, "replicas": {("unit/chat", "a", "od"): 6, ("unit/batch", "a", "od"): 4}}
    assert Ray(told).place(view({}, {"od": row()}), {"unit/chat": 6, "unit/batch": 6}) == answer


@pytest.mark.parametrize(("now_s", "places"), [(99.0, ["od"]), (100.0, ["cb"]), (4799.0, ["cb"]), (4800.0, ["od"])])
def test_a_capacity_block_is_asked_between_its_start_and_forty_minutes_before_its_end(
    now_s: float, places: list[str]
) -> None:
    supply = [offering("od"), offering("cb", "block", start_s=100.0, end_s=7200.0)]
    answer = karpenter(scenario(supply=supply), view({}, {"od": row(), "cb": row()}), 1, now_s)
    assert list(answer["instances"]) == places


def test_policy_limits_on_market_zone_and_type_hold() -> None:
    supply = [offering("od"), offering("spot", "spot", zone="z2"), offering("far", "spot")]
    rows = {"od": row(1.0), "spot": row(9.0), "far": row(8.0)}
    told = scenario(services=[service(markets=["spot"], zones=["z2"])], supply=supply)
    assert karpenter(told, view({}, rows), 1)["instances"] == {"spot": 1}
    told = scenario(services=[service(instance_types=["none"])], supply=supply)
    assert karpenter(told, view({}, rows), 1)["instances"] == {}


# ---- Ray's autoscaler v2 -------------------------------------------------------------------------------------------
SIZES = scenario(
    shapes=[shape("a", "big"), shape("b", "small", instance_gpus=1)],
    supply=[offering("b8"), offering("s1", instance_type="small")],
)
UTILISATION = [
    (1, {"s1": 1}),  # 1·1³ against 8·(1/8)³
    (4, {"s1": 4}),  # 1·1³ against 8·(4/8)³ = 1: equal, and both never failed; the smaller is cheaper per GPU
    (5, {"b8": 1}),  # 8·(5/8)³ = 1.95
    (8, {"b8": 1}),
    (9, {"b8": 1, "s1": 1}),
]


@pytest.mark.parametrize(("units", "instances"), UTILISATION)
def test_ray_takes_the_node_type_that_is_used_best(units: int, instances: dict[str, int]) -> None:
    rows = {"b8": row(16.0), "s1": row(1.0)}
    assert Ray(SIZES).place(view({}, rows), units)["instances"] == instances


def test_ray_asks_the_exhausted_type_again_although_another_fits() -> None:
    rows = {"b8": row(16.0, refused_at_s=999.0), "s1": row(1.0)}
    assert Ray(SIZES).place(view({}, rows), 8)["instances"] == {"b8": 1}


def test_ray_breaks_ties_by_how_lately_a_type_failed() -> None:
    told = scenario(supply=[offering("spot", "spot"), offering("od")])
    rows = {"spot": row(9.0), "od": row(40.0)}
    assert Ray(told).place(view({}, rows), 1)["instances"] == {"spot": 1}
    rows = {"spot": row(9.0, refused_at_s=401.0), "od": row(40.0)}
    assert Ray(told).place(view({}, rows), 1)["instances"] == {"od": 1}
    rows = {"spot": row(9.0, refused_at_s=400.0), "od": row(40.0)}
    assert Ray(told).place(view({}, rows), 1)["instances"] == {"spot": 1}


RECOVERY = [(None, 1.0), (995.0, 0.0), (991.0, 0.0), (990.0, 10 / 600), (700.0, 0.5), (400.0, 1.0), (0.0, 1.0)]


@pytest.mark.parametrize(("refused_at_s", "score"), RECOVERY)
def test_availability_recovers_over_ten_minutes(refused_at_s: float | None, score: float) -> None:
    ray = Ray(scenario())
    fleet = Fleet(ray.facts, view({}, {"od": row(refused_at_s=refused_at_s)}))
    assert ray.layer.availability(1000.0, fleet, "od") == pytest.approx(score)


def test_availability_is_whole_again_once_a_node_joins() -> None:
    ray = Ray(scenario())
    ray.place(view({}, {"od": row(starting=1, refused_at_s=990.0)}), 1, 1000.0)
    joined = view({}, {"od": row(ready=1, refused_at_s=990.0)})
    ray.place(joined, 1, 1010.0)
    assert ray.layer.availability(1010.0, Fleet(ray.facts, joined), "od") == 1.0


def test_idle_nodes_stay_for_five_minutes() -> None:
    ray = Ray(scenario())
    busy = view({}, {"od": row(ready=2)}, replicas("od", 16))
    idle = view({}, {"od": row(ready=2)}, replicas("od", 1))
    assert ray.place(busy, 16, 0.0)["instances"] == {"od": 2}
    assert ray.place(idle, 1, 10.0)["instances"] == {"od": 2}
    assert ray.place(idle, 1, 299.0)["instances"] == {"od": 2}
    assert ray.place(idle, 1, 300.0)["instances"] == {"od": 1}


def test_ray_places_a_replica_of_two_nodes_whole() -> None:
    told = scenario(shapes=[shape(gpus=8, nodes=2)], supply=[offering("odcr", "odcr", count=3), offering("od")])
    rows = {"odcr": row(), "od": row()}
    assert Ray(told).place(view({}, rows), 2)["instances"] == {"odcr": 2, "od": 2}


def test_the_answer_does_not_depend_on_the_order_of_the_view() -> None:
    told = scenario(supply=MARKETS)
    places: list[Any] = [*replicas("od", 1), *replicas("spot", 1)]
    one = karpenter(told, view({}, NEW, places), 20)
    two = karpenter(told, view({}, dict(reversed(NEW.items())), places[::-1]), 20)
    assert one == two
    assert list(one["instances"]) == list(two["instances"])
