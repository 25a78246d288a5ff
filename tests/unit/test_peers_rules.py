"""The peers' replica rules against tables worked by hand from the published formulas (docs/peers.md).

A row is ``(ticks, what is seen…, the decision at each of these ticks)``. One unit is meant to hold 10 requests.
"""

from __future__ import annotations

from typing import Any

import pytest

from chaos.peers.facts import Seen, Service, facts_of
from chaos.peers.pools import TargetTracking
from chaos.peers.replicas import Apa, Hpa, Keda, Kpa
from chaos.peers.skyserve import SkyServe
from chaos.peers.sla import Dynamo
from tests.peer_scene import scenario, service


def one(**keys: Any) -> Service:
    return facts_of(scenario(services=[service(**keys)])).services[0]


def to_zero(**keys: Any) -> Service:
    return one(scale_to_zero=True, min_replicas=0, **keys)


def held(ongoing: float | None, ready: float) -> Seen:
    return Seen(None, None, None, ongoing, None if ongoing is None else 0.0, ready=ready)


def play(rule: Any, tick_s: float, rows: list[tuple[Any, ...]], see: Any) -> tuple[list[int], list[int]]:
    """``(decided, expected)``, an entry a tick."""
    decided, expected, now_s = [], [], 0.0
    for ticks, *told, answer in rows:
        for _ in range(ticks):
            decided.append(rule.want(now_s, see(*told)))
            expected.append(answer)
            now_s += tick_s
    return decided, expected


def holds(rule: Any, tick_s: float, rows: list[tuple[Any, ...]], see: Any = held) -> None:
    decided, expected = play(rule, tick_s, rows, see)
    assert len(expected) >= 50
    assert decided == expected


KPA = [  # (ticks of 10 s, in flight, ready, wanted): six samples in the stable window, one in the panic window
    (6, 10, 1, 1),
    (1, 20, 1, 2),  # panic: ceil(20/10)/1 = 2; stable (5·10 + 20)/6 = 11.7
    (1, 50, 1, 5),  # panic window alone: 5; stable 18.3
    (1, 50, 1, 5),
    (1, 30, 1, 5),  # never down while panicking
    (1, 30, 2, 5),  # 3/2 is below the threshold, but 60 s must pass
    (3, 30, 5, 5),
    (1, 30, 5, 3),  # 70 s after the last rise: stable, six samples of 30
    (1, 0, 5, 3),  # 150/6 = 25
    (1, 0, 3, 2),  # 20
    (1, 0, 3, 2),  # 15
    (1, 0, 3, 1),  # 10; no less than floor(3/2)
    (1, 0, 2, 1),  # 5
    (3, 0, 1, 1),  # idle for the whole window from here on: 30 s of grace
    (1, 0, 1, 0),
    (2, 0, 0, 0),
    (1, 7, 0, 1),  # 7/6 = 1.2; panic 1/1 is no panic
    (1, 95, 0, 10),  # panic 10; stable (7 + 95)/6 = 17
    (1, 200, 1, 20),
    (1, 2000, 1, 100),  # 200, of which the policy allows 100
    (6, 600, 50, 100),  # 60/50 is no panic any more; 200 held until 60 s have passed
    (1, 600, 50, 60),
    (1, 0, 60, 50),  # 3000/6
    (1, 0, 60, 40),
    (1, 0, 60, 30),
    (1, 0, 60, 30),  # 20, but no less than half of what is ready
    (1, 0, 30, 15),  # 10, half is 15
    (1, 0, 30, 15),
    (1, 0, 15, 7),
    (1, 0, 7, 3),
    (1, 0, 3, 1),
    (3, 0, 1, 1),  # grace
    (1, 0, 1, 0),
    (1, None, 0, 0),
    (1, 3, 0, 1),  # 3/5 over the five samples that there are
]


def test_kpa_stable_panic_limits_and_grace() -> None:
    holds(Kpa(to_zero(), 1.0), 10.0, KPA)


HPA = [  # (ticks of 15 s, in flight, ready, wanted)
    (1, 10, 1, 1),
    (1, 11, 1, 1),  # within 10 %
    (1, 12, 1, 2),  # ceil(1.2 · 1)
    (1, 24, 1, 3),  # the second pod counts as idle: 24/2 = 12, ceil(1.2 · 2)
    (1, 24, 1, 3),  # 24/3 = 8 turns the direction: stay
    (1, 31, 3, 3),
    (1, 15, 3, 3),  # 2, but 3 was recommended within 300 s
    (18, 15, 3, 3),
    (1, 15, 3, 2),
    (1, 500, 2, 6),  # 50, limited to +4
    (1, 500, 2, 12),  # to +100 %
    (1, 500, 2, 24),
    (1, 500, 12, 48),
    (1, 500, 24, 48),  # 500/48 = 10.4 with the pods that start: within 10 %
    (1, 500, 48, 48),
    (1, 560, 48, 56),
    (1, 560, 56, 56),
    (1, 200, 40, 56),
    (1, None, 56, 56),
    (1, 300, 0, 56),  # no pod reports
    (5, 560, 56, 56),
    (1, 2000, 56, 100),  # 200, of which the policy allows 100
    (1, 2000, 100, 100),
    (1, 1500, 100, 100),
    (1, 95, 100, 100),
    (18, 95, 100, 100),
    (1, 95, 100, 10),  # ceil(0.095 · 100)
]


def test_hpa_tolerance_missing_pods_and_behaviour() -> None:
    holds(Hpa(one(), 1.0), 15.0, HPA)


HPA_DOWN = [
    (1, 60, 1, 5),  # 6, limited to +4
    (1, 100, 5, 10),  # 20 a pod
    (19, 30, 5, 10),  # (30 + 5·10)/10 = 8: five that start count as loaded; 10 held for 300 s
    (1, 30, 5, 8),
    (19, 30, 5, 8),  # (30 + 3·10)/8 = 7.5: 6
    (1, 30, 5, 6),
    (9, 30, 5, 6),  # (30 + 10)/6 = 6.7: 4
]


def test_hpa_counts_pods_that_start_as_loaded_on_the_way_down() -> None:
    holds(Hpa(one(), 1.0), 15.0, HPA_DOWN)


def test_hpa_decides_every_fifteen_seconds_of_a_ten_second_tick() -> None:
    hpa = Hpa(one(), 1.0)
    answers = [hpa.want(now_s, held(load, 1)) for now_s, load in ((0, 10), (10, 40), (20, 20), (30, 40), (40, 90))]
    assert answers == [1, 1, 2, 4, 4]  # at 30 s the pod that starts counts as idle: 40/2 = 20


def queue(waiting: float | None, running: float) -> Seen:
    return Seen(None, None, None, waiting, running)


KEDA = [  # (ticks of 15 s, waiting, running, wanted); five waiting a replica
    (2, 0, 0, 0),
    (1, 3, 0, 1),  # activated
    (1, 5, 5, 1),
    (1, 5.4, 5, 1),  # within 10 %
    (1, 12, 5, 3),
    (1, 40, 5, 7),  # 8, limited to +4
    (1, 60, 5, 12),
    (1, 60, 5, 12),
    (1, 66, 5, 12),  # within 10 %
    (1, 200, 5, 20),  # 40, of which the policy allows 20
    (1, 200, 50, 20),
    (1, 0, 50, 20),  # nothing waits: one, but 20 was recommended within 300 s
    (18, 0, 50, 20),
    (1, 0, 50, 1),  # and then all at once, whatever runs
    (23, 0, 0, 1),  # cooldown of 360 s
    (1, 0, 0, 0),
    (1, 0, 0, 0),
    (1, None, 0, 0),
    (1, 1, 0, 1),
]


def test_keda_queue_activation_and_cooldown() -> None:
    holds(Keda(to_zero(max_replicas=20), 1.0), 15.0, KEDA, queue)


APA = [  # (ticks of 10 s, in flight, ready, wanted): mean over 180 s of what a ready pod holds
    (1, 10, 1, 1),
    (1, 11, 1, 1),  # 10.5
    (1, 18, 1, 2),  # 39/3 = 13
    (1, 21, 1, 3),  # 60/4 = 15
    (1, 30, 1, 6),  # 90/5 = 18: ceil(3 · 1.8), twice 3
    (1, 60, 1, 12),  # 150/6 = 25: 15, at most twice 6
    (1, 60, 1, 24),  # only ready pods are measured, so what starts is not credited
    (1, 60, 6, 48),
    (1, 60, 12, 96),
    (1, 60, 24, 100),
    (1, 50, 50, 100),  # 228.5/11
    (7, 60, 100, 100),  # down to 232.7/18 = 12.9
    (2, 60, 100, 100),  # 12.4, 11.8
    (2, 60, 100, 100),  # 10.9 and 9.7: within 10 %
    (17, 60, 100, 100),  # below, but 300 s must pass after a change
    (1, 60, 100, 50),  # at most halved
    (29, 60, 50, 50),
    (1, 60, 50, 25),
]


def test_apa_doubles_halves_and_cools_down() -> None:
    holds(Apa(one(), 1.0), 10.0, APA)


def rate(rps: float | None, ongoing: float | None = 0.0, ready: float = 1.0) -> Seen:
    return Seen(rps, None, None, ongoing, None if ongoing is None else 0.0, ready=ready)


SKY = [  # (ticks of 20 s, requests per second, wanted); three samples in the window, 2 requests per second a replica
    (5, 2, 1),
    (14, 10, 1),  # 280 s after the step …
    (1, 10, 5),  # … the fifteenth turn in a row that asks for more
    (59, 4, 5),
    (1, 4, 2),  # the sixtieth that asks for less
    (3, 4, 2),
]


def test_skyserve_waits_fifteen_turns_up_and_sixty_down() -> None:
    holds(SkyServe(one(), 1.0), 20.0, SKY, rate)


def test_skyserve_counts_turns_in_a_row_only() -> None:
    rows = [(1, 2, 1), (10, 10, 1), (3, 2, 1), (14, 10, 1), (1, 10, 5)]
    decided, expected = play(SkyServe(one(), 1.0), 20.0, rows, rate)
    assert decided == expected  # the third 2 brings the mean back to 2 and the count to none


def test_skyserve_starts_from_zero_at_once() -> None:
    rows = [(3, 0, 0), (1, 1, 1), (1, None, 1)]
    decided, expected = play(SkyServe(to_zero(), 1.0), 20.0, rows, rate)
    assert decided == expected


DYNAMO = [  # (ticks of 10 s, requests per second, in flight, ready, wanted); an engine serves 2 a second, 20 at once
    (1, 8, 0, 1, 4),
    (4, 8, 30, 1, 4),  # load mode waits for engines that start
    (1, 8, 30, 4, 4),  # three would be safe (30 ≤ 3·20·0.8), but the forecast needs four
    (1, 8, 81, 4, 5),  # all miss: 81 > 4·20
    (1, 8, 120, 4, 5),
    (1, 8, 99, 5, 5),
    (1, 8, 101, 5, 6),
    (1, 8, 60, 6, 5),  # 60 ≤ 5·16
    (1, 8, 60, 5, 4),  # 60 ≤ 4·16
    (1, 8, 60, 5, 4),  # 60 > 3·16
    (1, 8, 10, 4, 4),
    (4, 8, 30, 4, 4),
    (1, 40, 30, 4, 5),  # (17·8 + 40)/18 = 9.8 a second
    (17, 40, 60, 5, 5),
    (1, 40, 60, 5, 13),  # 20 needed, 8 more at most
    (17, 40, 100, 13, 13),
    (1, 40, 100, 13, 20),
    (1, None, None, 20, 20),
    (16, 4, 20, 20, 20),
    (1, 4, 20, 20, 20),  # the forecast needs two now: a floor, no order
    (1, 4, 20, 20, 19),
    (1, 4, 20, 20, 18),
    (1, 4, 20, 20, 17),
]


def test_dynamo_forecast_is_the_floor_and_load_nudges() -> None:
    holds(Dynamo(one(max_replicas=50), 1.0), 10.0, DYNAMO, rate)


TRACKING = [  # (ticks of 60 s, in flight, ready, wanted)
    (1, 10, 1, 1),
    (2, 20, 1, 1),
    (1, 20, 1, 2),  # the third datum above: ceil(1 · 20/10)
    (4, 40, 1, 2),  # cooldown of 300 s
    (1, 40, 1, 8),  # ceil(2 · 40/10), though one was starting
    (14, 40, 8, 8),
    (1, 40, 8, 4),  # the fifteenth below 9
    (1, 40, 4, 4),
    (5, 37, 4, 4),  # 9.25 is neither above nor below
    (14, 35, 4, 4),
    (1, 35, 4, 4),  # ceil(4 · 0.875)
    (1, 35, 4, 4),
    (1, 20, 4, 2),
    (5, 20, 2, 2),
    (2, 500, 2, 2),
    (1, 500, 2, 50),  # ceil(2 · 25)
]


def test_sagemaker_target_tracking() -> None:
    holds(TargetTracking(one(max_replicas=50), 1.0), 60.0, TRACKING)


@pytest.mark.parametrize("rule", [Kpa, Hpa, Keda, Apa, Dynamo, TargetTracking, SkyServe])
def test_a_rule_that_sees_nothing_keeps_its_replicas(rule: Any) -> None:
    blind = Seen(None, None, None, None, None, ready=3)
    made = rule(one(min_replicas=3), 1.0)
    assert {made.want(10.0 * tick, blind) for tick in range(200)} == {3}


@pytest.mark.parametrize("rule", [Kpa, Hpa, Apa, TargetTracking])
def test_a_larger_knob_asks_for_less(rule: Any) -> None:
    less, more = (
        max(made.want(60.0 * tick, held(100, 4)) for tick in range(30))
        for made in (rule(one(), 4.0), rule(one(), 0.25))
    )
    assert less < more
