"""Admission: who starts, who waits, who is shed, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.admission import (
    Admit,
    Queue,
    ServiceState,
    Shed,
    Ticket,
    VariantState,
    admit,
    first,
    order,
    route,
    share,
    states,
    turn_s,
)
from serve_apps.wire import ServiceRoute, VariantRoute


def variant(app: str, *, replicas: int = 1, rps: float = 1.0, slots: int = 4, running: int = 0) -> VariantState:
    return VariantState(app=app, replicas=replicas, capacity_rps_per_replica=rps, slots=slots, running=running)


def policy(
    *, max_queued: int = 2, timeout_s: float = 10.0, sacrifice: tuple[str, ...] = ("queue", "shed")
) -> ServiceRoute:
    return ServiceRoute.model_validate(
        {
            "service": "u/s",
            "priority": 5,
            "variants": (),
            "max_queued": max_queued,
            "queue_timeout_s": timeout_s,
            "retry_after_s": 7.0,
            "sacrifice": sacrifice,
        }
    )


def ticket(seq: int = 1, priority: int = 0, arrived_at_s: float = 100.0) -> Ticket:
    return Ticket(priority=priority, arrived_at_s=arrived_at_s, seq=seq)


def at(now_s: float, *variants: VariantState, queued: int = 0, gateways: int = 1) -> ServiceState:
    return ServiceState(now_s=now_s, queued=queued, variants=variants, gateways=gateways)


FULL = variant("a", slots=4, running=4)
COLD = variant("a", replicas=0, slots=0)


@pytest.mark.parametrize(
    ("case", "state", "rules", "verdict"),
    [
        ("a free slot", at(100, variant("a")), policy(), Admit(app="a")),
        ("nobody overtakes the queue", at(100, variant("a"), queued=1), policy(), Queue(until_s=110.0, cold=False)),
        ("all slots taken", at(100, FULL), policy(), Queue(until_s=110.0, cold=False)),
        ("no replica yet", at(100, COLD), policy(), Queue(until_s=110.0, cold=True)),
        ("no variant at all", at(100), policy(), Queue(until_s=110.0, cold=True)),
        ("the queue is full", at(100, FULL, queued=2), policy(), Shed(retry_after_s=2.0, why="queue_full")),
        ("no queue", at(100, FULL), policy(max_queued=0), Shed(retry_after_s=1.0, why="queue_full")),
        ("its time is up", at(110, FULL), policy(), Shed(retry_after_s=1.0, why="queue_timeout")),
        ("never queues", at(100, FULL), policy(sacrifice=("shed",)), Shed(retry_after_s=1.0, why="no_free_slot")),
        ("waits for the first", at(100, COLD), policy(sacrifice=("shed",)), Queue(until_s=110.0, cold=True)),
        ("half the queue", at(100, FULL, queued=1, gateways=2), policy(), Shed(retry_after_s=2.0, why="queue_full")),
    ],
)
def test_admit(case: str, state: ServiceState, rules: ServiceRoute, verdict: object) -> None:
    assert admit(ticket(), state, rules) == verdict, case


def test_a_slot_is_better_than_a_time_limit() -> None:
    assert admit(ticket(arrived_at_s=0.0), at(1e6, variant("a")), policy()) == Admit(app="a")


@pytest.mark.parametrize(
    ("case", "variants", "chosen"),
    [
        ("fewer requests in flight", (variant("a", running=2), variant("b", running=1)), "b"),
        ("more capacity per replica", (variant("a"), variant("b", rps=2.0)), "b"),
        ("more replicas", (variant("a"), variant("b", replicas=3)), "b"),
        ("ties go by name, whatever the order", (variant("b"), variant("a")), "a"),
        ("a full variant is passed over", (variant("a", slots=1, running=1), variant("b", running=3)), "b"),
        ("a variant without replicas is passed over", (variant("a", replicas=0), variant("b", running=3)), "b"),
        ("unknown capacity comes last", (variant("a", rps=0.0), variant("b", running=3)), "b"),
        ("nothing is free", (variant("a", slots=0),), None),
    ],
)
def test_route(case: str, variants: tuple[VariantState, ...], chosen: str | None) -> None:
    assert route(variants) == chosen, case


def test_route_leaves_out_what_failed() -> None:
    both = (variant("a"), variant("b", running=3))
    assert route(both, exclude={"a"}) == "b"
    assert route(both, exclude={"a", "b"}) is None


def two_variants(*, ready: tuple[int, int], target: tuple[int, int]) -> ServiceRoute:
    rows = [
        VariantRoute(
            app=app,
            target_replicas=target[i],
            ready_replicas=ready[i],
            max_concurrency_per_replica=8,
            capacity_rps_per_replica=2.0,
        )
        for i, app in enumerate(("a", "b"))
    ]
    return policy().model_copy(update={"variants": tuple(rows)})


def test_a_fresh_plan_counts_ready_replicas() -> None:
    rows = states(two_variants(ready=(2, 0), target=(3, 1)), {"a": 5}, gateways=1, fresh=True)
    assert [(v.app, v.replicas, v.slots, v.running) for v in rows] == [("a", 2, 16, 5), ("b", 0, 0, 0)]


def test_gateways_share_slots_to_the_last_and_each_keeps_one() -> None:
    chosen = two_variants(ready=(2, 0), target=(2, 0))
    shares = [[v.slots for v in states(chosen, {}, gateways=3, rank=rank, fresh=True)] for rank in range(3)]
    assert shares == [[6, 0], [5, 0], [5, 0]]
    assert share(1, 9, 8) == 1


@given(st.integers(1, 500), st.integers(1, 20))
def test_shares_add_up_unless_there_is_less_than_one_each(total: int, gateways: int) -> None:
    shares = [share(total, gateways, rank) for rank in range(gateways)]
    assert sum(shares) == max(total, gateways)
    assert max(shares) - min(shares) <= 1


def test_a_full_queue_makes_room_for_who_is_more_important_than_its_last() -> None:
    full = replace(at(100, FULL, queued=2), least=3)
    assert admit(ticket(priority=4), full, policy()) == Queue(until_s=110.0, cold=False, displaces=True)
    assert isinstance(admit(ticket(priority=3), full, policy()), Shed)


def waiting(*, queued: int, ahead: int | None = None, age_s: float = 0.0, rps: float = 1.0) -> ServiceState:
    busy = variant("a", slots=4, running=4, rps=rps)
    return ServiceState(now_s=100.0, queued=queued, ahead=ahead, plan_age_s=age_s, variants=(busy,))


@pytest.mark.parametrize(
    ("case", "state", "next_s", "why"),
    [
        ("ten of one a second take ten seconds", waiting(queued=9), None, None),
        ("eleven take longer, but capacity may come any time", waiting(queued=10), None, None),
        ("it comes too late", waiting(queued=10), 11.0, "wait_too_long"),
        ("it comes in time", waiting(queued=10), 9.0, None),
        ("the plan was made a while ago", waiting(queued=10, age_s=2.0), 11.0, None),
        ("the important pass", waiting(queued=10, ahead=0), 11.0, None),
        ("nothing is ready, and what comes is late", waiting(queued=0, rps=0.0), 11.0, "wait_too_long"),
    ],
)
def test_a_request_whose_turn_cannot_come_in_time_is_told_so_at_once(
    case: str, state: ServiceState, next_s: float | None, why: str | None
) -> None:
    rules = policy(max_queued=99).model_copy(update={"next_capacity_s": next_s})
    verdict = admit(ticket(), state, rules)
    assert (verdict.why if isinstance(verdict, Shed) else None) == why, case
    patient = rules.model_copy(update={"sacrifice": ("queue",)})
    assert isinstance(admit(ticket(), state, patient), Queue), "who may not be shed waits"


OVERFLOW = {"url": "http://x", "model": "m", "rpm": 60, "usd_per_1m_tokens": 1.0}


@pytest.mark.parametrize(
    ("case", "sacrifice", "state", "next_s", "slack_s", "spilled"),
    [
        ("first of all", ("overflow", "queue", "shed"), waiting(queued=0), 1.0, None, True),
        ("before its limit is passed", ("queue", "overflow", "shed"), waiting(queued=3), 60.0, 3.0, True),
        ("not while the queue is fast enough", ("queue", "overflow", "shed"), waiting(queued=2), 60.0, 3.0, False),
        ("not when capacity comes in time", ("queue", "overflow", "shed"), waiting(queued=9), 3.0, 3.0, False),
        ("nothing is known to come", ("queue", "overflow", "shed"), waiting(queued=0, rps=0.0), None, None, True),
    ],
)
def test_overflow_is_used_while_the_deadline_is_nearer_than_the_next_capacity(
    case: str,
    sacrifice: tuple[str, ...],
    state: ServiceState,
    next_s: float | None,
    slack_s: float | None,
    spilled: bool,
) -> None:
    more = {"next_capacity_s": next_s, "slack_s": slack_s}
    rules = policy(max_queued=99, sacrifice=sacrifice).model_copy(update=more)
    verdict = admit(ticket(), state, rules)
    assert isinstance(verdict, Queue)
    assert not verdict.spills, "no endpoint"
    with_endpoint = ServiceRoute.model_validate(rules.model_dump() | {"overflow": OVERFLOW})
    verdict = admit(ticket(), state, with_endpoint)
    assert isinstance(verdict, Queue)
    assert verdict.spills is spilled, case


def test_clients_turned_away_are_given_turns() -> None:
    """Two a second are served and a queue of four drains: after that, one place each half second; never past 2 min."""
    turns, last_s = [], 0.0
    for _ in range(3):
        last_s = turn_s(last_s, 100.0, 2.0, 2.0)
        turns.append(last_s)
    assert turns == [102.5, 103.0, 103.5]
    assert turn_s(500.0, 100.0, 2.0, 2.0) == 220.0
    assert turn_s(0.0, 100.0, 0.0, 100.0) == 101.0


def test_a_stale_plan_gives_the_slots_of_all_replicas_there_may_be() -> None:
    """Else no more would reach Serve than the last plan's replicas carry, and its local rule could never scale up."""
    wide = two_variants(ready=(2, 0), target=(2, 0))
    wide = wide.model_copy(update={"variants": tuple(v.model_copy(update={"max_replicas": 9}) for v in wide.variants)})
    rows = states(wide, {}, gateways=1, fresh=False)
    assert [(v.app, v.replicas, v.slots) for v in rows] == [("a", 9, 72)]


def test_a_stale_plan_at_zero_uses_the_variant_that_an_owned_instance_can_hold() -> None:
    """Else the request is handed to an application whose replica waits for an instance that nobody will launch."""
    both = two_variants(ready=(0, 0), target=(0, 0))
    held = both.variants[1].model_copy(update={"max_replicas": 4})
    bare = both.variants[0].model_copy(update={"max_replicas": 0})
    rows = states(both.model_copy(update={"variants": (bare, held)}), {}, gateways=1, fresh=False)
    assert [(v.app, v.replicas) for v in rows] == [("b", 4)]


def test_a_stale_plan_gives_slots_by_target_and_never_closes_a_service() -> None:
    rows = states(two_variants(ready=(0, 0), target=(3, 0)), {}, gateways=1, fresh=False)
    assert [(v.app, v.replicas, v.slots) for v in rows] == [("a", 3, 24)]
    rows = states(two_variants(ready=(0, 0), target=(0, 0)), {}, gateways=1, fresh=False)
    assert [(v.app, v.replicas, v.slots) for v in rows] == [("a", 1, 8), ("b", 1, 8)]


tickets = st.lists(
    st.builds(
        Ticket,
        priority=st.integers(-5, 5),
        arrived_at_s=st.floats(0, 1e6),
        seq=st.integers(0, 10_000),
    ),
    unique_by=lambda one: one.seq,
)
variants = st.lists(
    st.builds(
        VariantState,
        app=st.sampled_from("abcdef"),
        replicas=st.integers(0, 4),
        capacity_rps_per_replica=st.floats(0, 10),
        slots=st.integers(0, 8),
        running=st.integers(0, 9),
    ),
    unique_by=lambda one: one.app,
)


@given(tickets, st.randoms())
def test_order_depends_on_the_tickets_and_not_on_how_they_came(queue: list[Ticket], random: object) -> None:
    shuffled = list(queue)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert order(shuffled) == order(queue)
    assert sorted(t.seq for t in order(queue)) == sorted(t.seq for t in queue)


@given(tickets)
def test_order_puts_nobody_behind_a_less_important_or_later_request(queue: list[Ticket]) -> None:
    for one, other in zip(order(queue), order(queue)[1:], strict=False):
        assert one.priority >= other.priority
        if one.priority == other.priority:
            assert one.arrived_at_s <= other.arrived_at_s


@given(tickets, st.floats(0, 1e6), st.one_of(st.none(), st.floats(0, 1e6)))
def test_first_is_the_first_of_the_order_at_every_moment(
    queue: list[Ticket], now_s: float, slack_s: float | None
) -> None:
    ranked = order(queue)
    if ranked:
        assert ranked[first(ranked, now_s, slack_s)] == order(queue, now_s, slack_s)[0]


def test_who_is_late_already_does_not_make_the_next_one_late() -> None:
    tickets = tuple(Ticket(priority=0, arrived_at_s=float(at_s), seq=at_s) for at_s in range(4))
    assert [t.seq for t in order(tickets, now_s=3.5, slack_s=2.0)] == [2, 3, 0, 1]
    assert first(tickets, 3.5, 2.0) == 2
    assert first(tickets, 9.0, 2.0) == 0, "all are late: the first of all"
    urgent = Ticket(priority=1, arrived_at_s=-9.0, seq=9)
    assert first((urgent, *tickets), 3.5, 2.0) == 0, "the caller's own priority comes before lateness"


@given(variants)
def test_route_finds_a_free_slot_exactly_when_there_is_one(rows: list[VariantState]) -> None:
    free = {v.app: v for v in rows if v.replicas and v.running < v.slots}
    chosen = route(rows)
    assert (chosen is None) == (not free)
    if chosen is not None:
        assert chosen in free
        assert route(reversed(rows)) == chosen


@given(variants, st.integers(0, 5), st.floats(0, 30), st.integers(0, 4), st.integers(1, 3))
def test_every_request_gets_one_of_three_answers_within_the_limits(
    rows: list[VariantState], queued: int, waited_s: float, max_queued: int, gateways: int
) -> None:
    rules = policy(max_queued=max_queued)
    verdict = admit(ticket(), at(100.0 + waited_s, *rows, queued=queued, gateways=gateways), rules)
    if isinstance(verdict, Admit):
        assert not queued
        assert verdict.app == route(rows)
    elif isinstance(verdict, Queue):
        assert queued < max_queued
        assert verdict.until_s > 100.0 + waited_s
        assert verdict.cold == (not any(v.replicas for v in rows))
    else:
        assert 1.0 <= verdict.retry_after_s <= rules.retry_after_s
