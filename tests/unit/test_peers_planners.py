"""Peers that plan all services or choose places themselves: WVA, SageServe, SkyServe's placer, SageMaker's pools."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from statsmodels.tsa.arima.model import ARIMA

from chaos.peers import PEERS, tuned
from chaos.peers.arima import ORDER, Arima, fitted, forecast
from chaos.peers.facts import facts_of
from chaos.peers.packing import Answer, Fleet, observe
from chaos.peers.sageserve import BIN_S, FIT_BINS, SageServe, Way, solve
from chaos.peers.skyserve import Placer
from chaos.peers.wva import Wva
from tests.peer_scene import Json, law, load, offering, replicas, row, scenario, service, shape, view

TWO = [  # 20 and 120 in flight at 2 and 10 requests per second
    shape(timing=law(0.05)),
    shape("b", "large", gpus=8, capacity_rps=10.0, max_batch=120, timing=law(0.06, 1_000_000)),
]


def units(answer: Answer) -> dict[Any, int]:
    return answer["replicas"]


# ---- WVA ------------------------------------------------------------------------------------------------------------
WVA = [  # (running, waiting, replicas); 1100 tokens a running and 1000 a waiting request, 22,000 fit a replica
    (10, 0, 1),  # 11,000 / 0.85 = 12,941
    (17, 0, 1),  # exactly 22,000
    (18, 0, 2),  # 23,294
    (20, 10, 2),  # 32,000: 37,647
    (20, 20, 3),  # 42,000: 49,412
    (20, 0, 2),  # 22,000 / 0.70 = 31,429 fit two, not one
    (13, 0, 1),  # 20,429 fit one
    (100, 0, 6),  # 129,412
    (100, 100, 12),  # 247,059
    (400, 400, 20),  # 45, of which the policy allows 20
    (300, 0, 20),  # 471,429 needs all
    (280, 0, 20),  # 440,000 as well
    (266, 0, 19),  # 418,000
    (100, 0, 8),  # 157,143
    (0, 0, 1),
    (0, 40, 3),  # 47,059
    (30, 0, 3),  # up: 38,824 fits two; down: 47,143 needs three
    (28, 0, 2),  # 44,000
]


def test_wva_follows_tokens_once_a_minute_between_its_thresholds() -> None:
    told = scenario(services=[service(max_replicas=20)], shapes=TWO[:1])
    wva, facts = Wva(facts_of(told)), facts_of(told)
    decided: list[float] = []
    for turn, (running, waiting, _) in enumerate(WVA):
        for tick, factor in enumerate((1, 3, 0)):  # what is seen between two turns changes nothing
            seen = view({"unit/chat": load(5.0, waiting * factor, running * factor)}, {"od": row(16.0)})
            fleet = Fleet(facts, seen)
            decided += [want.units for want in wva.wants(60.0 * turn + 20.0 * tick, observe(facts, seen, fleet), fleet)]
    assert len(decided) == 54
    assert decided == [replicas for _, _, replicas in WVA for _ in range(3)]


def wva_chooses(supply: list[Json], rows: dict[str, Json], places: list[Json], knob: float = 1.0) -> dict[Any, int]:
    told = scenario(services=[service(max_replicas=20)], shapes=TWO, supply=supply)
    seen = view({"unit/chat": load(5.0, 0.0, 100.0)}, rows, places)
    return units(tuned(PEERS["wva"], knob)(told).decide(0.0, seen))


SUPPLY = [offering("od"), offering("odb", instance_type="large")]


def test_wva_grows_where_a_token_costs_least_and_the_limiter_leaves_out_what_refused() -> None:
    cheap = {"od": row(16.0), "odb": row(40.0)}  # 2 / 22,000 against 40 / 132,000 $/h a token
    assert wva_chooses(SUPPLY, cheap, []) == {("unit/chat", "a", "od"): 6}
    dry = {"od": row(16.0, refused_at_s=-10.0), "odb": row(40.0)}
    assert wva_chooses(SUPPLY, dry, []) == {("unit/chat", "b", "odb"): 1}  # 129,412 of 132,000
    assert wva_chooses(SUPPLY, {"od": row(16.0), "odb": row(10.0)}, []) == {
        ("unit/chat", "a", "od"): 1,  # the floor it began with; 22,000 + 132,000 hold 157,143 needed to go down
        ("unit/chat", "b", "odb"): 1,
    }


def test_the_knob_moves_both_of_wvas_thresholds() -> None:
    rows = {"od": row(16.0), "odb": row(40.0)}
    assert wva_chooses(SUPPLY, rows, [], 2.0) == {("unit/chat", "a", "od"): 3}  # 110,000 / 1.7 = 64,706


def test_wva_removes_the_dearest_first() -> None:
    told = scenario(services=[service(max_replicas=20)], shapes=TWO, supply=SUPPLY)
    facts = facts_of(told)
    wva = Wva(facts)
    counts = []
    for turn, (running, price) in enumerate([(100.0, 16.0), (220.0, 321.0), (120.0, 321.0)]):
        seen = view({"unit/chat": load(5.0, 0.0, running)}, {"od": row(price), "odb": row(40.0)})
        fleet = Fleet(facts, seen)
        counts.append([want.units for want in wva.wants(60.0 * turn, observe(facts, seen, fleet), fleet)])
    # 242,000 / 0.85 = 284,706: 132,000 are there, two of b add 264,000. Then 132,000 / 0.70 = 188,571: b holds them.
    assert counts == [[6.0, 0.0], [6.0, 10.0], [0.0, 10.0]]


# ---- SageServe ------------------------------------------------------------------------------------------------------
SAGE = [  # (ticks of 60 s, requests per second, ready, wanted); 2 a second a replica
    (1, 8.0, 0, 4),  # the program: 8 a second need four
    (1, 8.0, 4, 4),
    (2, 9.0, 4, 5),
    (1, 9.0, 5, 5),
    (1, 12.0, 5, 6),
    (1, 12.0, 6, 6),
    (1, 3.5, 6, 5),  # used at 29 %: back to the program's, which remembers a bin of 8.6
    (22, 1.0, 5, 5),
    (5, 1.0, 5, 3),  # that bin is 25 minutes old: the next one held 5.9
    (5, 1.0, 3, 1),
    (20, 1.0, 1, 1),
    (1, 2.5, 1, 2),  # one hour: from here on the program runs hourly
    (1, 5.0, 2, 3),  # 125 % used: one more a minute beyond the program's two
    (1, 5.0, 2, 3),  # once the last one is ready
    (1, 7.0, 3, 4),
    (1, 7.0, 4, 4),
]


def test_sageserve_gate_and_program() -> None:
    told = scenario()
    sage, facts, now_s = SageServe(facts_of(told)), facts_of(told), 0.0
    decided, expected = [], []
    for ticks, rps, ready, wanted in SAGE:
        for _ in range(ticks):
            seen = view({"unit/chat": load(rps)}, {"od": row(ready=1)}, replicas("od", ready))
            fleet = Fleet(facts, seen)
            decided += [want.units for want in sage.wants(now_s, observe(facts, seen, fleet), fleet)]
            expected.append(wanted)
            now_s += 60.0
    assert len(expected) >= 50
    assert decided == expected


PROGRAM = [  # (peak of a service with 2-a-second replicas at $2 and 10-a-second ones at $8, floor, most, (a, b))
    (0.0, 0, 9, (0, 0)),
    (0.0, 1, 9, (1, 0)),
    (2.0, 0, 9, (1, 0)),
    (6.0, 0, 9, (3, 0)),  # $6 against $8
    (8.0, 0, 9, (0, 1)),  # $8 both: the fewest
    (9.0, 0, 9, (0, 1)),
    (12.0, 0, 9, (1, 1)),
    (16.1, 0, 9, (0, 2)),
    (20.0, 0, 2, (0, 2)),
    (30.0, 0, 2, (0, 2)),  # two cannot carry it: as much as two can
]


@pytest.mark.parametrize(("peak_rps", "floor", "most", "counts"), PROGRAM)
def test_the_program_is_the_cheapest_that_carries_the_peak(
    peak_rps: float, floor: int, most: int, counts: tuple[int, int]
) -> None:
    entry = service(min_replicas=floor, max_replicas=most)
    told = scenario(services=[entry], shapes=TWO, supply=SUPPLY)
    facts = facts_of(told)
    only = facts.services[0]
    fleet = Fleet(facts, view({}, {"od": row(16.0), "odb": row(8.0)}))
    ways = [Way(only, only.shapes[0], "od", 2.0), Way(only, only.shapes[1], "odb", 8.0)]
    assert tuple(solve(ways, {"unit/chat": peak_rps}, fleet, 1.0)) == counts


def test_the_program_keeps_within_reservations_that_services_share() -> None:
    told = scenario(
        services=[service("a"), service("b")],
        shapes=[shape(key="unit/a"), shape(key="unit/b")],
        supply=[offering("odcr", "odcr", count=1), offering("od")],
    )
    facts = facts_of(told)
    fleet = Fleet(facts, view({}, {"odcr": row(), "od": row()}))
    ways = [Way(s, s.unit, place, usd) for s in facts.services for place, usd in (("odcr", 0.0), ("od", 2.0))]
    found = solve(ways, {"unit/a": 10.0, "unit/b": 10.0}, fleet, 1.0)
    assert found[0] + found[2] == 8
    assert found[1] + found[3] == 2


def tide(bins: int) -> list[float]:
    rng = np.random.default_rng([3, 1])
    return [float(20 + 10 * np.sin(index / 20) + rng.normal(0, 1)) for index in range(bins)]


def test_the_recursion_forecasts_as_statsmodels_does() -> None:
    history = tide(FIT_BINS + 40)
    arima = fitted(tuple(history[:FIT_BINS]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params = [*arima, 1.0]
        theirs = ARIMA(np.array(history), order=ORDER).smooth(params).forecast(12)
    assert forecast(arima, history, 12) == pytest.approx(list(theirs), rel=2e-3)


def test_a_flat_history_repeats_its_last_value() -> None:
    assert fitted((5.0,) * FIT_BINS) == Arima(0.0, 0.0, 0.0)
    assert forecast(Arima(0.0, 0.0, 0.0), [5.0, 7.0], 3) == [7.0, 7.0, 7.0]


def test_the_fit_knows_nothing_but_the_first_six_hours_and_is_made_once() -> None:
    told = scenario()
    facts = facts_of(told)
    fitted.cache_clear()
    for later in (1.0, 3.0):  # two runs that differ after the fit share it
        sage, rates = SageServe(facts), tide(3 * FIT_BINS)
        for index, rps in enumerate(rates):
            seen = view({"unit/chat": load(rps if index <= FIT_BINS else later * rps)}, {"od": row()})
            fleet = Fleet(facts, seen)
            sage.wants(index * BIN_S, observe(facts, seen, fleet), fleet)
    assert fitted.cache_info().misses == 1


# ---- SkyServe -------------------------------------------------------------------------------------------------------
ZONES = ["a", "b", "c"]


def choices(events: str) -> str:
    """Upper case marks a zone as preempted; a dot asks for a place."""
    placer, used = Placer(), dict.fromkeys(ZONES, 0)
    ways = [(facts_of(scenario()).services[0].unit, zone) for zone in ZONES]
    found = ""
    for event in events:
        if event == ".":
            zone = placer.choose(ways, used)[1]
            used[zone] += 1
            found += zone
        else:
            placer.mark(event.lower(), ZONES)
            used[event.lower()] = 0
    return found


PLACER = [
    ("......", "abcabc"),  # the least used, then the cheapest
    (".A.B.A.B.A.B", "ababab"),  # a persistent stock-out: the third zone is never tried
    ("..B...", "abcac"),
    ("A....", "bcbc"),
    ("AB...", "abc"),  # fewer than two left: all forgiven
    ("ABC...", "aba"),  # C alone is marked after all were forgiven
    ("...C..A..", "abcabac"),
    ("....A....", "abcabcbc"),
]


@pytest.mark.parametrize(("events", "zones"), PLACER)
def test_the_spot_placer(events: str, zones: str) -> None:
    assert choices(events) == zones


SKY = scenario(
    services=[service(min_replicas=4)],
    shapes=[shape(instance_gpus=1)],
    supply=[
        offering("odcr", "odcr", count=1),
        *(offering(f"s{zone}", "spot", zone=zone) for zone in ZONES),
        offering("od"),
    ],
)
SPOT = {"sa": row(3.0), "sb": row(4.0), "sc": row(5.0), "od": row(10.0)}


def sky(controller: Any, now_s: float, rows: dict[str, Json], places: list[Json]) -> dict[str, int]:
    seen = view({"unit/chat": load(0.0)}, {"odcr": row(), **SPOT, **rows}, places)
    instances: dict[str, int] = controller.decide(now_s, seen)["instances"]
    return instances


def test_on_demand_covers_what_is_not_ready_and_leaves_when_spot_is() -> None:
    controller = PEERS["skyserve"](SKY)
    assert sky(controller, 0.0, {}, []) == {"odcr": 1, "sa": 1, "sb": 1, "sc": 1, "od": 4}
    rows = {"odcr": row(ready=1), "sa": row(3.0, ready=1), "sb": row(4.0, ready=1), "od": row(10.0, ready=4)}
    ready = [*replicas("odcr", 1), *replicas("sa", 1), *replicas("sb", 1), *replicas("od", 4)]
    starting = {**rows, "sc": row(5.0, starting=1)}
    one_short = sky(controller, 20.0, starting, [*ready, *replicas("sc", 1, "starting")])
    assert one_short == {"odcr": 1, "sa": 1, "sb": 1, "sc": 1, "od": 1}
    whole = {**rows, "sc": row(5.0, ready=1)}
    assert sky(controller, 40.0, whole, [*ready, *replicas("sc", 1)]) == {"odcr": 1, "sa": 1, "sb": 1, "sc": 1}


def test_a_zone_that_lost_or_refused_an_instance_is_left_for_the_others() -> None:
    controller = PEERS["skyserve"](SKY)
    rows = {"odcr": row(ready=1), "sa": row(3.0, ready=1), "sb": row(4.0, ready=1), "sc": row(5.0, ready=1)}
    kept = [*replicas("odcr", 1), *replicas("sb", 1), *replicas("sc", 1)]
    assert sky(controller, 0.0, rows, [*kept, *replicas("sa", 1)]) == {"odcr": 1, "sa": 1, "sb": 1, "sc": 1}
    lost = sky(controller, 20.0, {**rows, "sa": row(3.0)}, kept)
    assert lost == {"odcr": 1, "sb": 2, "sc": 1, "od": 1}
    refused = {**rows, "sa": row(3.0), "sb": row(4.0, ready=1, refused_at_s=21.0), "od": row(10.0, ready=1)}
    assert sky(controller, 40.0, refused, kept)["sa"] == 1  # fewer than two left: all forgiven


# ---- SageMaker ------------------------------------------------------------------------------------------------------
POOLS = [offering("oda"), offering("odz", zone="z2"), offering("spot", "spot"), offering("odb", instance_type="large")]


def test_the_next_pool_is_asked_after_the_time_out_and_spot_never() -> None:
    told = scenario(services=[service(min_replicas=2)], shapes=TWO, supply=POOLS)
    controller = PEERS["sagemaker"](told)
    asked = []
    for now_s in range(0, 700, 50):
        rows = {"oda": row(16.0, refused_at_s=now_s - 50.0), "odz": row(16.0, refused_at_s=now_s - 60.0)}
        rows |= {"spot": row(1.0), "odb": row(40.0, refused_at_s=now_s - 50.0)}
        asked.append(list(controller.decide(now_s, view({"unit/chat": load(0.0)}, rows))["instances"]))
    assert asked == [["odz"]] * 6 + [["odb"]] * 6 + [["odz"]] * 2  # the zone that refused longest ago; then in a ring


def test_capacity_of_the_lowest_priority_goes_first() -> None:
    told = scenario(services=[service(min_replicas=2)], shapes=TWO, supply=POOLS)
    rows = {"oda": row(16.0, ready=1), "odz": row(16.0), "spot": row(1.0), "odb": row(40.0, ready=1)}
    places = [*replicas("oda", 2), *replicas("odb", 1, variant="b")]
    answer = PEERS["sagemaker"](told).decide(0.0, view({"unit/chat": load(0.0)}, rows, places))
    assert answer == {"instances": {"oda": 1}, "replicas": {("unit/chat", "a", "oda"): 2}}
