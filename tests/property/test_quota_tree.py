"""The quota tree, whatever the units, services, demands and whoever holds the GPUs now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.beliefs import EMPTY
from autoscaler.core.berths import Berth, Need, Option
from autoscaler.core.capacity import Capacity
from autoscaler.core.model import Demand, Offering, Shape
from autoscaler.core.place import place
from autoscaler.core.reasons import ReasonCode, why
from autoscaler.core.shares import MOVE_WORTH, Purse, Tree, limit_gpus
from policies.model import Slo, Unit, Variant
from tests.scene import TIMING, service

RPS = 1.0
CARRIES = Capacity(rps=RPS, batch=8, reasons=(why(ReasonCode.PLACED, placed=1),))
Held = dict[str, int]  # replicas by service


@dataclass(frozen=True)
class Wish:
    """One service: its priority, how many replicas its demand takes, and the GPUs of one."""

    priority: int
    replicas: int
    gpus: int = 1
    floor: int = 0


@dataclass(frozen=True)
class House:
    """One unit."""

    quota: int | None
    lends: bool | int
    borrows: bool | int
    wishes: tuple[Wish, ...]


def _needs(houses: Sequence[House]) -> tuple[Need, ...]:
    tree, needs = Tree(), []
    for number, house in enumerate(houses):
        name = f"u{number}"
        unit = Unit(unit=name, owner="o", quota_gpus=house.quota, lends=house.lends, borrows=house.borrows, services=())
        purse = Purse(unit=unit, tree=tree)
        needs += [_need(name, index, wish, purse) for index, wish in enumerate(house.wishes)]
    return tuple(sorted(needs, key=lambda need: (-need.entry.priority, need.demand.service)))


def _need(unit: str, index: int, wish: Wish, purse: Purse) -> Need:
    key = f"{unit}/s{index}"
    shape = Shape(
        service=key,
        variant="v",
        instance_type="p5",
        gpus=wish.gpus,
        nodes=1,
        timing=TIMING,
        load_prior_s=60.0,
        boot_prior_s=60.0,
        source="test",
    )
    rps = max(0.0, wish.replicas - 0.3) * RPS
    demand = Demand(
        service=key,
        quantile=0.95,
        lead_s=120.0,
        unheld_rps=rps,
        arrival_rps=rps,
        replicas_floor=wish.floor,
        prefill_tps=0.0,
        decode_tps=0.0,
        reasons=(),
    )
    entry = service(
        f"s{index}",
        priority=wish.priority,
        slo=Slo(ttft_s=2.0, fraction=0.9),
        min_replicas=wish.floor,
        max_replicas=100,
        variants=(Variant(id="v", instance_type="p5", tp=wish.gpus),),
    )
    return Need(demand=demand, entry=entry, purse=purse, options=(Option(shape=shape, capacity=CARRIES),))


def _shelf(sizes: Sequence[int], held: Sequence[Held]) -> list[Berth]:
    """Instances in the cluster, each with the replicas it runs now. Nothing can be bought."""
    return [
        Berth(
            instance_id=f"i{number}",
            offering=Offering(
                offering="a",
                pool="a",
                instance_type="p5",
                zone="z",
                market="on_demand",
                gpus=gpus,
                price_usd_per_h=1.0,
            ),
            joined=True,
            launched_at_s=float(number),
            present={f"{key.replace('/', '.')}.v": ((),) * count for key, count in runs.items()},
        )
        for number, (gpus, runs) in enumerate(zip(sizes, held, strict=True))
    ]


def _decide(houses: Sequence[House], sizes: Sequence[int], held: Sequence[Held]) -> tuple[tuple[Need, ...], list[Held]]:
    """The needs as placed, and who holds what then."""
    needs, shelf = _needs(houses), _shelf(sizes, held)
    assert place(needs, shelf, EMPTY, 0.0).orders == ()
    after: dict[str, Counter[str]] = {f"i{number}": Counter() for number in range(len(sizes))}
    for need in needs:
        for seat in need.seats:
            after[seat.berths[0].instance_id][need.demand.service] += 1
    return needs, [dict(after[f"i{number}"]) for number in range(len(sizes))]


def _shares(houses: Sequence[House], sizes: Sequence[int], held: Sequence[Held]) -> Held:
    return {need.demand.service: need.replicas for need in _decide(houses, sizes, held)[0]}


Case = tuple[list[House], list[int], list[Held]]  # units, GPUs of each instance, who holds what there now

loans = st.booleans() | st.integers(0, 6)
quotas = st.none() | st.integers(0, 10)


def houses(gpus: st.SearchStrategy[int], priorities: st.SearchStrategy[int]) -> st.SearchStrategy[list[House]]:
    wishes = st.builds(Wish, priorities, st.integers(0, 8), gpus, st.integers(0, 2))
    one = st.builds(House, quotas, loans, loans, st.lists(wishes, min_size=1, max_size=3).map(tuple))
    return st.lists(one, min_size=1, max_size=4)


@st.composite
def cases(draw: st.DrawFn, gpus: st.SearchStrategy[int], most: int = 4) -> Case:
    """Units, instances, and any replicas on them that fit, whoever's they are."""
    found = draw(houses(gpus, st.sampled_from((100, 500, 900))))
    sizes = draw(st.lists(st.integers(1, most), max_size=6))
    sized = {f"u{n}/s{i}": wish.gpus for n, house in enumerate(found) for i, wish in enumerate(house.wishes)}
    held: list[Held] = []
    for size in sizes:
        runs: Counter[str] = Counter()
        for key in draw(st.lists(st.sampled_from(sorted(sized)), max_size=size)):
            if sum(sized[one] * count for one, count in runs.items()) + sized[key] <= size:
                runs[key] += 1
        held.append(dict(runs))
    return found, sizes, held


def _held_gpus(needs: tuple[Need, ...], unit: str) -> int:
    return sum(n.replicas * n.options[0].shape.gpus for n in needs if n.demand.service.startswith(f"{unit}/"))


@given(cases(st.sampled_from((1, 2, 4))))
def test_never_over_quota_and_nothing_is_borrowed_that_nobody_lends(
    case: Case,
) -> None:
    found, sizes, held = case
    needs, _ = _decide(found, sizes, held)
    borrowed = lent = 0
    for number, house in enumerate(found):
        if house.quota is not None:
            over = _held_gpus(needs, f"u{number}") - house.quota
            assert over <= limit_gpus(house.borrows, max(over, 0))
            borrowed += max(0, over)
            lent += limit_gpus(house.lends, max(0, -over))
    assert borrowed <= lent
    for berth in {id(b): b for n in needs for s in n.seats for b in s.berths}.values():
        assert berth.free_gpus >= 0


@given(cases(st.sampled_from((1, 2, 4))))
def test_a_plan_that_is_carried_out_is_planned_again(case: Case) -> None:
    """No ping-pong: nobody takes back what was taken from it. Large replicas may need a second step to fit."""
    found, sizes, held = case
    seen = [held]
    for _ in range(4):
        seen.append(_decide(found, sizes, seen[-1])[1])
    assert seen[-1] == seen[-2]


def _priorities_differ(found: list[House]) -> list[House]:
    """The same with a priority of its own for each service."""
    taken = iter(range(1000, 0, -1))
    return [replace(h, wishes=tuple(replace(w, priority=next(taken)) for w in h.wishes)) for h in found]


@given(cases(st.just(1), most=1))
def test_who_holds_the_gpus_now_decides_nothing(case: Case) -> None:
    found, sizes, held = case
    found = _priorities_differ(found)
    assert _shares(found, sizes, held) == _shares(found, sizes, [{} for _ in sizes])


@given(cases(st.just(1), most=1), st.randoms(use_true_random=False))
def test_units_may_be_listed_in_any_order(case: Case, chance: Random) -> None:
    found, sizes, held = case
    needs, again = _needs(found), list(_needs(found))
    chance.shuffle(again[0].purse.tree.purses)
    for each in (needs, tuple(again)):
        place(each, _shelf(sizes, held), EMPTY, 0.0)
    assert [need.replicas for need in needs] == [need.replicas for need in again]


@given(cases(st.just(1), most=1), st.data())
def test_more_quota_or_more_demand_never_means_less(case: Case, data: st.DataObject) -> None:
    found, sizes, _ = case
    found = _priorities_differ(found)
    idle: list[Held] = [{} for _ in sizes]
    number = data.draw(st.integers(0, len(found) - 1))
    house = found[number]
    wider = replace(house, quota=None if house.quota is None else house.quota + data.draw(st.integers(1, 4)))
    keener = replace(house, wishes=(replace(house.wishes[0], replicas=house.wishes[0].replicas + 2), *house.wishes[1:]))
    mine = f"u{number}/"
    before = _shares(found, sizes, idle)
    for changed, keys in ((wider, [key for key in before if key.startswith(mine)]), (keener, [f"{mine}s0"])):
        after = _shares([*found[:number], changed, *found[number + 1 :]], sizes, idle)
        assert sum(after[key] for key in keys) >= sum(before[key] for key in keys)


@given(st.lists(st.integers(1, 8), min_size=2, max_size=4), st.integers(0, 20), st.data())
def test_equals_are_served_alike(wanted: list[int], gpus: int, data: st.DataObject) -> None:
    """Nobody lacks a replica that would still leave its owner clearly better served."""
    found = [House(None, True, True, (Wish(500, replicas),)) for replicas in wanted]
    owners = data.draw(st.lists(st.sampled_from(range(len(wanted))), min_size=gpus, max_size=gpus))
    needs, _ = _decide(found, [1] * gpus, [{f"u{owner}/s0": 1} for owner in owners])
    for poor in needs:
        for rich in needs:
            if poor.short and rich.replicas:
                kept = (rich.rps - RPS) / max(rich.demand.arrival_rps, 1e-9) / 0.9
                has = poor.rps / poor.demand.arrival_rps / 0.9
                assert kept <= has + MOVE_WORTH + 1e-9
