"""The engine's gateway: queue, routing, overflow, draining and removal, as `serve_apps.admission` has them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.engine import Engine, histogram
from serve_apps.admission import Ticket, VariantState, first, route
from tests.engine_scene import PLAIN, engine, rows, same, spec


def test_who_waits_too_long_is_shed_and_who_waits_less_is_served() -> None:
    """One slot: the first ends at 1.1 s, the second at 2.2 s; the third's time is up at 2 s."""
    made = engine(same(3), queue_timeout_s=2.0)
    made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(1.99)
    assert (made.window(0).queued, made.totals(0).shed) == (1, 0)
    made.advance(2.01)
    assert (made.window(0).queued, made.totals(0).shed) == (0, 1)
    made.advance(9.0)
    assert made.totals(0).finished == 2


def test_a_full_queue_sheds() -> None:
    made = engine(same(5), max_queued=2)
    made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(0.5)
    window = made.window(0)
    assert (window.running, window.queued, window.shed) == (1, 2, 2)


def test_a_service_that_never_queues_waits_for_its_first_replica_only() -> None:
    made = engine(rows([0.0, 3.0, 3.1], [1000] * 3, [10] * 3), can_queue=False)
    made.advance(1.0)
    assert made.window(0).queued == 1
    made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(9.0)
    assert (made.totals(0).finished, made.totals(0).shed) == (2, 1)


def test_overflow_takes_what_would_be_shed_within_its_quota_of_each_minute() -> None:
    at_s = [0.0] * 4 + [30.0] + [60.0] * 3
    made = engine(
        rows(at_s, [900] * 8, [100] * 8), max_queued=0, overflow_rpm=2, overflow_usd_per_1m_tokens=5.0, ttft_s=1.0
    )
    made.advance(99.0)
    totals = made.totals(0)
    assert (totals.overflowed, totals.shed, totals.met) == (4, 4, 4)
    assert totals.overflow_usd == pytest.approx(4 * 1000 * 5e-6)
    made.set_overflow_rpm(0, 0)
    assert made.totals(0).requests == 8


def test_overflow_may_come_before_waiting() -> None:
    """One starts, two go to the endpoint, and when its quota is used up the fourth waits."""
    made = engine(same(4), overflow_rpm=2, overflow_first=True)
    made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(9.0)
    assert (made.totals(0).overflowed, made.totals(0).finished) == (2, 2)
    window = made.window(0)
    assert (window.finished, window.output_tokens) == (4, 4 * 11), "what the endpoint answers has tokens and an end"


def test_overflow_takes_at_once_what_would_be_too_late() -> None:
    """One a second is served and each may wait 3 s; nothing more is expected, then something is."""
    made = engine(same(6), queue_timeout_s=3.0, overflow_rpm=9, ttft_s=2.0)
    made.add_replica(0, 0, PLAIN, slots=1)
    made.set_capacity_rps(0, 0, 1.0)
    made.advance(0.1)
    assert (made.totals(0).overflowed, made.window(0).queued) == (2, 3)
    made = engine(same(6), queue_timeout_s=3.0, overflow_rpm=9, ttft_s=2.0)
    made.add_replica(0, 0, PLAIN, slots=1)
    made.expect(0, 2.0)
    made.advance(0.1)
    assert (made.totals(0).overflowed, made.window(0).queued) == (0, 5)


def test_who_would_wait_too_long_by_the_plan_is_shed_at_once() -> None:
    for can_shed, shed in ((True, 2), (False, 0)):
        made = engine(same(6), queue_timeout_s=3.0, can_shed=can_shed)
        made.add_replica(0, 0, PLAIN, slots=1)
        made.set_capacity_rps(0, 0, 1.0)
        made.expect(0, 60.0)
        made.advance(0.1)
        assert (made.totals(0).shed, made.window(0).queued) == (shed, 5 - shed)


def test_overflow_after_too_long_a_wait_is_a_miss() -> None:
    made = engine(same(1), queue_timeout_s=3.0, overflow_rpm=9, ttft_s=2.0)
    made.expect(0, 2.5)
    made.advance(9.0)
    assert (made.totals(0).overflowed, made.totals(0).met) == (1, 0)


def test_misses_of_requests_that_waited_for_replicas_on_their_way_are_cold_start_misses() -> None:
    made = engine(rows([0.0, 1.0, 10.0, 20.0], [1000] * 4, [10] * 4), ttft_s=1.5)
    made.advance(0.5)
    made.note_coming(0, 1)  # the first waits already, the second comes while it loads
    made.advance(5.0)
    made.note_coming(0, 0)
    made.add_replica(0, 0, PLAIN, slots=9)
    made.advance(30.0)
    assert (made.totals(0).met, made.totals(0).cold_start_misses) == (2, 2)


def test_who_is_turned_away_while_the_first_replica_loads_is_a_cold_start_miss() -> None:
    made = engine(same(3), max_queued=1)
    made.note_coming(0, 1)
    made.advance(1.0)
    assert (made.totals(0).shed, made.totals(0).cold_start_misses) == (2, 2)


def test_waiting_without_a_replica_on_its_way_is_no_cold_start() -> None:
    made = engine(same(1), ttft_s=1.5, queue_timeout_s=5.0)
    made.advance(9.0)
    assert (made.totals(0).shed, made.totals(0).cold_start_misses) == (1, 0)


def test_a_draining_replica_ends_what_it_has_and_gets_nothing_more() -> None:
    made = engine(rows([0.0, 0.0, 0.5], [1000] * 3, [10] * 3))
    replica = made.add_replica(0, 0, PLAIN, slots=9)
    made.advance(0.1)
    made.drain(replica)
    made.drain(replica)
    made.advance(0.6)
    assert (made.in_flight(replica), made.window(0).queued) == (2, 1)
    made.advance(9.0)
    assert (made.in_flight(replica), made.totals(0).finished, made.window(0).queued) == (0, 2, 1)
    made.remove(replica)
    assert made.add_replica(0, 0, PLAIN, slots=9) == replica
    made.advance(20.0)
    assert made.totals(0).finished == 3


def test_a_removed_replica_gives_back_what_has_no_token_and_fails_the_rest() -> None:
    """At 1.5 s the first decodes; the second, which came at 1.2 s, is in prefill; the third waits at the gateway."""
    made = engine(rows([0.0, 1.2, 1.3], [1000, 1000, 1000], [200, 10, 10]), ttft_s=2.0)
    replica = made.add_replica(0, 0, PLAIN, slots=2)
    made.advance(1.5)
    made.remove(replica)
    window = made.window(0)
    assert (window.queued, window.running, made.totals(0).failed) == (2, 0, 1)
    made.add_replica(0, 0, PLAIN, slots=1)  # the second goes first, and its 2 s count from 1.2 s
    made.advance(2.55)
    assert (made.totals(0).missed_ttft, made.window(0).queued) == (0, 1)
    made.advance(9.0)
    assert (made.totals(0).finished, made.totals(0).missed_ttft) == (2, 1)
    with pytest.raises(ValueError, match="no replica 7"):
        made.remove(7)


def test_what_is_given_back_too_late_is_shed_at_once() -> None:
    made = engine(same(1, inputs=9000), queue_timeout_s=2.0)
    replica = made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(3.0)
    made.remove(replica)
    assert (made.totals(0).shed, made.totals(0).in_flight) == (1, 0)


def test_slots_and_queue_bounds_may_change() -> None:
    made = engine(same(4))
    replica = made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(0.1)
    made.set_slots(0, 0, 3)
    assert (made.in_flight(replica), made.window(0).queued) == (3, 1)
    made.set_queue(0, max_queued=0, queue_timeout_s=0.05)
    assert (made.window(0).queued, made.totals(0).shed) == (0, 1)


def test_requests_go_to_the_least_loaded_replica_ties_to_the_lower_number() -> None:
    made = engine(rows([0.01 * i for i in range(7)], [40_000] * 7, [10] * 7))
    replicas = [made.add_replica(0, 0, PLAIN, slots=4) for _ in range(3)]
    made.advance(1.0)
    assert [made.in_flight(replica) for replica in replicas] == [3, 2, 2]


fleets = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5), st.integers(1, 4)), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(fleets, st.integers(1, 40))
def test_variants_are_chosen_as_the_gateway_chooses_them(fleet: list[tuple[int, float, int]], count: int) -> None:
    made = Engine([spec(rows([0.001 * i for i in range(count)], [40_000] * count, [10] * count))])
    replicas = []
    for variant, (number, rps, slots) in enumerate(fleet):
        made.set_capacity_rps(0, variant, rps)
        replicas.append([made.add_replica(0, variant, PLAIN, slots=slots) for _ in range(number)])
    made.advance(1.0)
    running, queued = [0] * len(fleet), 0
    for _ in range(count):
        rows_ = [
            VariantState(app=str(i), replicas=n, capacity_rps_per_replica=rps, slots=n * slots, running=running[i])
            for i, (n, rps, slots) in enumerate(fleet)
        ]
        app = route(rows_)
        if app is None:
            queued += 1
        else:
            running[int(app)] += 1
    assert [sum(made.in_flight(one) for one in group) for group in replicas] == running
    assert made.window(0).queued == queued


def misses(gaps: list[float], lengths: list[int], slack_s: float, limit_s: float) -> int:
    """Requests beyond `limit_s` to their first token: one slot, given in the order of `admission.first`."""
    arrived = np.cumsum(gaps)
    todo = list(range(len(gaps)))
    now_s, missed = 0.0, 0
    while todo:
        waiting = [i for i in todo if arrived[i] <= now_s] or todo[:1]
        now_s = max(now_s, arrived[waiting[0]])
        tickets = [Ticket(priority=0, arrived_at_s=float(arrived[i]), seq=i) for i in waiting]
        chosen = waiting[first(tickets, now_s, slack_s)]
        todo.remove(chosen)
        missed += bool(now_s + lengths[chosen] / 1000 - arrived[chosen] > limit_s)
        now_s += lengths[chosen] / 1000
    return missed


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(100, 3000)), min_size=1, max_size=25),
    st.sampled_from([0.0, 1.0, 2.5, 1e9]),
    st.floats(0.5, 8),
)
def test_who_is_late_lets_those_pass_who_are_not(each: list[tuple[float, int]], slack_s: float, limit_s: float) -> None:
    gaps, lengths = [gap * np.pi / 3 for gap, _ in each], [length for _, length in each]
    made = engine(rows(np.cumsum(gaps).tolist(), lengths, [1] * len(each)), ttft_s=limit_s)
    made.set_queue(0, max_queued=99, queue_timeout_s=1e9, slack_s=slack_s)
    made.add_replica(0, 0, PLAIN, slots=1)
    made.advance(1000.0)
    assert made.totals(0).finished == len(each)
    assert made.totals(0).missed_ttft == misses(gaps, lengths, slack_s, limit_s)


def test_services_do_not_touch_each_other() -> None:
    both = Engine([spec(same(9)), spec(same(1), service="unit/other")])
    both.add_replica(0, 0, PLAIN, slots=1)
    both.add_replica(1, 1, PLAIN, slots=1)
    both.advance(1.2)
    assert [both.totals(service).finished for service in (0, 1)] == [1, 1]
    assert (both.window(0).queued, both.window(1).queued) == (7, 0)


@pytest.mark.parametrize("scale", [1e-4, 0.003, 1.0, 250.0, 5e4])
def test_quantiles_are_within_one_percent(scale: float) -> None:
    values = scale * np.random.default_rng([1, 2]).lognormal(0.0, 0.8, 5000)
    bins = np.zeros(histogram.BINS, np.int64)
    for value in values:
        histogram.count(bins, value)
    for q in (0.0, 0.5, 0.95, 0.99, 1.0):
        exact = float(np.quantile(values, q, method="inverted_cdf"))
        assert histogram.quantile(bins, q) == pytest.approx(exact, rel=0.01)
    assert np.isnan(histogram.quantile(np.zeros(histogram.BINS, np.int64), 0.5))


def test_values_beyond_the_histogram_are_counted_at_its_ends() -> None:
    bins = np.zeros(histogram.BINS, np.int64)
    for value in (0.0, 1e-300, 1e300):
        histogram.count(bins, value)
    assert (bins[0], bins[-1]) == (2, 1)
