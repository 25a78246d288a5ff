"""Controllers that never change their mind, the registry, and what a decision may cost."""

from __future__ import annotations

import time
from typing import Any

import pytest

from chaos.peers import KNOBS, PEERS, tuned
from chaos.peers.facts import facts_of, planned_ongoing
from chaos.peers.windows import Every, Window
from tests.peer_scene import Json, law, load, offering, replicas, row, scenario, service, shape, view

TOLD = scenario(
    services=[service("chat"), service("batch", priority=1)],
    shapes=[shape(), shape("b", "large", gpus=8), shape(key="unit/batch")],
    supply=[offering("odcr", "odcr", count=1), offering("spot", "spot"), offering("od", instance_type="large")],
)
ROWS = {"odcr": row(), "spot": row(5.0), "od": row(40.0)}
LOADS = {"unit/chat": load(3.0, 2.0, 10.0), "unit/batch": load(1.0, 0.0, 4.0)}


def told(**peer: Any) -> Json:
    return {**TOLD, "peer": peer}


STATIC = [
    ({}, {"odcr": 1}, 2),  # the floors
    ({"replicas": 3}, {"odcr": 1}, 6),
    ({"replicas": {"unit/chat": 7, "unit/batch": 9}}, {"odcr": 1, "spot": 1}, 16),
    ({"knob": 4.0}, {"odcr": 1}, 8),
]


@pytest.mark.parametrize(("peer", "instances", "total"), STATIC)
def test_static_keeps_what_it_is_told(peer: Json, instances: dict[str, int], total: int) -> None:
    controller = PEERS["static"](told(**peer))
    answer = controller.decide(0.0, view(LOADS, ROWS))
    assert answer["instances"] == instances
    assert sum(answer["replicas"].values()) == total


def test_static_replaces_what_was_lost_and_trivial_does_not_look() -> None:
    static, trivial = (PEERS[name](told(replicas=2)) for name in ("static", "trivial"))
    lost = view(LOADS, {**ROWS, "odcr": row(refused_at_s=1.0)})
    first = trivial.decide(0.0, view(LOADS, ROWS))
    assert trivial.decide(10.0, lost) == first
    assert first["replicas"] == {("unit/chat", "a", "odcr"): 2, ("unit/batch", "a", "odcr"): 2}
    assert static.decide(10.0, lost)["instances"] == {"spot": 1}


def test_tuned_turns_the_knob_and_leaves_the_rest() -> None:
    seen: list[Json] = []

    def factory(given: Any) -> Any:
        seen.append(given)
        return PEERS["static"](given)

    tuned(factory, 0.5)(told(replicas=3))
    assert seen[0]["peer"] == {"replicas": 3, "knob": 0.5}
    assert seen[0]["supply"] == TOLD["supply"]


def test_knobs_have_a_default_and_every_peer_but_trivial_has_one() -> None:
    assert {name for name, knob in KNOBS.items() if knob.default > 0 and knob.name} == set(PEERS) - {"trivial"}


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_decision_takes_less_than_a_millisecond(name: str) -> None:
    controller = PEERS[name](told(replicas=2))
    seen = view(LOADS, {**ROWS, "odcr": row(ready=1)}, [*replicas("odcr", 4), *replicas("odcr", 2, key="unit/batch")])
    for tick in range(5):
        controller.decide(10.0 * tick, seen)
    started_s = time.process_time()
    for tick in range(5, 205):
        controller.decide(10.0 * tick, seen)
    assert (time.process_time() - started_s) / 200 < 1e-3  # measured 0.1; the bar leaves room for a busy machine


def test_planned_ongoing_follows_the_capacity_law() -> None:
    flat = shape()
    assert planned_ongoing(flat) == pytest.approx(10.0)  # 2 a second × 200 tokens × 0.025 s
    slower = shape(timing={**law(0.01), "b_s_per_seq": 0.001, "prefill_tps": 10_000.0})
    # b / (200·(0.01 + 0.001·b) + b·0.1) = 2, so b = 2·(2 + 0.3·b) = 4 / 0.4
    assert planned_ongoing(slower) == pytest.approx(10.0)


def test_facts_leave_out_overflow_rows_and_types_without_a_variant() -> None:
    supply = [offering("od"), offering("other", instance_type="none"), offering("api", "overflow")]
    assert list(facts_of(scenario(supply=supply)).offerings) == ["od"]


def test_a_window_keeps_its_span_and_a_loop_turns_once_a_period() -> None:
    window, every = Window(60.0), Every(15.0)
    for now_s in range(0, 100, 10):
        window.add(float(now_s), now_s)
    assert (window.mean, window.most) == (65.0, 90.0)  # 40 … 90
    assert [every.due(now_s) for now_s in (0.0, 10.0, 20.0, 30.0, 40.0, 200.0, 201.0)] == [
        *(True, False, True, True, False, True, False),
    ]
