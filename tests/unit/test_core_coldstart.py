"""How long starts take, as learnt from those that were seen, and how long one is waited for."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest

from autoscaler.core import coldstart
from autoscaler.core.beliefs import EMPTY, Beliefs, Breaker, Loading
from autoscaler.core.coldstart import (
    LOAD_LIMIT_MIN_S,
    LOCAL_SPEEDUP,
    PATIENCE,
    PRIOR_SIGMA,
    PROGRESS_BYTES,
    SAMPLES,
    boot_s,
    got_on,
    load_limit_s,
    load_s,
    protected,
    quantile_s,
    start_limit_s,
    stuck,
)
from autoscaler.core.lifecycle import TIMEOUT_S, InstanceState, limit_s
from autoscaler.core.model import Demand, Offering, Replica, ReplicaState, ServingView
from autoscaler.core.reasons import ReasonCode, why
from autoscaler.core.release import Presence, terminates
from autoscaler.core.snapshot import restore, save
from tests.calibration_rig import TRUE, owned, shape

CHAT, BIG = "u/s", "org/big"
SHAPE = shape(TRUE, model=BIG, boot_prior_s=100.0, load_prior_s=200.0, weights_s=160.0)
START = replace(EMPTY, shapes=(SHAPE,), instances={"i": owned("i"), "j": owned("j")})


# ---- quantiles ------------------------------------------------------------------------------------------------------
def test_before_any_start_was_seen_the_catalogue_is_a_median_with_a_tail() -> None:
    assert quantile_s((), 200.0, 0.5) == pytest.approx(200.0)
    assert quantile_s((), 200.0, 0.9) == pytest.approx(200.0 * exp(1.2816 * PRIOR_SIGMA), rel=1e-4)
    assert boot_s(EMPTY, SHAPE) == quantile_s((), 100.0, 0.9)
    assert load_s(EMPTY, SHAPE, 0.5) == pytest.approx(200.0)


def test_one_odd_start_moves_little_and_a_dozen_are_believed() -> None:
    before = quantile_s((), 100.0, 0.9)
    assert quantile_s((900.0,), 100.0, 0.9) - before < 0.12 * (900.0 - before)
    assert quantile_s((300.0,) * 12, 100.0, 0.9) == pytest.approx(300.0, rel=0.05)
    assert quantile_s((300.0,) * SAMPLES, 100.0, 0.9) == pytest.approx(300.0, rel=0.01)


def test_quantiles_grow_with_q_and_lie_between_what_was_believed_and_what_was_seen() -> None:
    seen = (80.0, 120.0, 95.0, 400.0, 110.0)
    values = [quantile_s(seen, 150.0, q) for q in (0.1, 0.5, 0.9, 0.99)]
    assert values == sorted(values)
    assert 110.0 < values[1] < 150.0


def test_the_lead_follows_a_fleet_that_starts_slower_than_it_used_to() -> None:
    samples: tuple[float, ...] = ()
    for value in [100.0] * 40 + [250.0] * SAMPLES:
        samples = coldstart.ring(samples, value)
    assert samples == (250.0,) * SAMPLES
    assert quantile_s(samples, 100.0, 0.9) == pytest.approx(250.0, rel=0.01)


# ---- learning -------------------------------------------------------------------------------------------------------
def view(at_s: float, **states: ReplicaState) -> ServingView:
    """Replicas by name; the name's first letter is the instance."""
    replicas = tuple(
        Replica(replica_id=key, service=CHAT, variant="v", instance_id=key[0], state=state, since_s=0.0)
        for key, state in states.items()
    )
    return ServingView(at_s=at_s, replicas=replicas, nodes=(), targets=())


def learn(beliefs: Beliefs, *views: ServingView) -> Beliefs:
    for one in views:
        beliefs = coldstart.observe(beliefs, one)
    return beliefs


def test_a_second_load_on_the_same_instance_is_kept_apart_from_one_over_the_network() -> None:
    beliefs = learn(
        START,
        view(0.0, i1="loading", j1="loading"),
        view(210.0, i1="ready", j1="loading"),
        view(220.0, i1="ready", i2="loading", j1="loading"),
        view(270.0, i1="ready", i2="ready", j1="ready"),
    )
    assert beliefs.load_s == {"g org/big network": (210.0, 270.0), "g org/big local": (50.0,)}
    assert beliefs.instances["i"].models == beliefs.instances["j"].models == (BIG,)
    assert load_s(beliefs, SHAPE) == quantile_s((210.0, 270.0), 200.0, 0.9)
    assert load_s(beliefs, SHAPE, source="local") == quantile_s((50.0,), 200.0 - 160.0 * (1 - 1 / LOCAL_SPEEDUP), 0.9)
    assert restore(save(beliefs)) == beliefs


def test_services_that_run_one_model_on_one_type_share_what_was_seen() -> None:
    other = replace(SHAPE, service="other/x", variant="w")
    beliefs = learn(START, view(0.0, i1="loading"), view(300.0, i1="ready"))
    assert load_s(beliefs, other) == load_s(beliefs, SHAPE)
    assert load_s(beliefs, replace(other, instance_type="h")) == quantile_s((), 200.0, 0.9)
    assert load_s(beliefs, replace(other, model="org/small")) == quantile_s((), 200.0, 0.9)


def test_a_load_is_measured_once_and_a_new_engine_is_fresh_for_a_minute() -> None:
    beliefs = learn(START, view(0.0, i1="loading"), view(90.0, i1="ready"), view(120.0, i1="ready"))
    assert beliefs.load_s == {"g org/big network": (90.0,)}
    assert beliefs.fresh == {"i1": 90.0}
    assert learn(beliefs, view(151.0, i1="ready")).fresh == {}


# ---- deadlines ------------------------------------------------------------------------------------------------------
STARTING = replace(owned("i"), state=InstanceState.BOOTING)


def with_boots(*boots: float, strikes: int = 0) -> Beliefs:
    place = {"pool": "o", "instance_type": "g", "zone": "z", "market": "on_demand", "gpus": 1, "price_usd_per_h": 1.0}
    offer = Offering(offering="o", **place)  # type: ignore[arg-type]
    breakers = {"g": Breaker(strikes=strikes)}
    return replace(START, offers={"o": offer}, boot_s={"g": boots}, breakers=breakers)


def test_a_start_that_is_merely_slow_is_not_given_up() -> None:
    """kserve#3795: a big model was killed at five minutes, for ever."""
    usual = TIMEOUT_S[InstanceState.BOOTING]
    assert start_limit_s(with_boots(100.0), STARTING) == usual
    slow = with_boots(*[1500.0] * 12)
    assert start_limit_s(slow, STARTING) == 3000.0
    pending = replace(STARTING, state=InstanceState.PENDING)
    assert start_limit_s(slow, pending) == 3000.0
    assert start_limit_s(with_boots(100.0, 1500.0), STARTING) == 3000.0, "one such boot is reason enough to wait"


def test_starts_that_never_came_teach_patience_up_to_a_limit() -> None:
    usual = TIMEOUT_S[InstanceState.BOOTING]
    limits = [start_limit_s(with_boots(strikes=n), STARTING) for n in range(4)]
    assert limits == [usual, 2 * usual, 3600.0, 3600.0]
    assert limit_s(InstanceState.TERMINATING, 1e6, 3) == TIMEOUT_S[InstanceState.TERMINATING]


def test_a_termination_that_is_not_carried_out_is_asked_again() -> None:
    going = replace(owned("i"), state=InstanceState.TERMINATING)
    beliefs = replace(with_boots(), instances={"i": going})
    presence = Presence.of(view(0.0))
    assert terminates(beliefs, [], presence, "p", 300.0) == ()
    (again,) = terminates(beliefs, [], presence, "p", 301.0)
    assert again.reasons == (why(ReasonCode.STARTING_EXPIRED, "terminating", age_s=301.0, limit_s=300.0),)


def loading(since_s: float, instance_id: str = "i", source: str = "network") -> Loading:
    return Loading(app="u.s.v", since_s=since_s, instance_id=instance_id, source=source)


def test_a_load_is_waited_for_as_long_as_loads_take() -> None:
    assert load_limit_s(START, SHAPE) == LOAD_LIMIT_MIN_S
    slow = replace(START, load_s={"g org/big network": (900.0,) * 20})
    assert load_limit_s(slow, SHAPE) == 2700.0
    beliefs = replace(slow, loading={"a": loading(0.0), "b": loading(2000.0, "j")})
    assert stuck(beliefs, 2600.0) == {}
    assert stuck(beliefs, 2701.0) == {"i": (2701.0, 2700.0)}
    assert stuck(replace(START, loading=beliefs.loading), 1300.0) == {"i": (1300.0, LOAD_LIMIT_MIN_S)}


def told(beliefs: Beliefs, at_s: float, progress_bytes: float | None) -> Beliefs:
    """After the node of instance i has said how many bytes it has received and read."""
    return replace(beliefs, instances=beliefs.instances | {"i": got_on(beliefs.instances["i"], progress_bytes, at_s)})


def test_a_load_that_gets_on_is_not_given_up_at_its_deadline_and_one_that_stands_still_is() -> None:
    beliefs = replace(START, loading={"a": loading(0.0), "b": loading(0.0, "j")})
    for at_s in (300.0, 600.0, 900.0, 1150.0):
        beliefs = told(beliefs, at_s, at_s * 1e8)
    late = 1.0 + LOAD_LIMIT_MIN_S
    assert stuck(beliefs, late) == {"j": (late, LOAD_LIMIT_MIN_S)}, "whose node says nothing, or stands still"
    assert "i" not in stuck(beliefs, 1150.0 + LOAD_LIMIT_MIN_S)
    assert stuck(beliefs, 1151.0 + LOAD_LIMIT_MIN_S)["i"] == (late, LOAD_LIMIT_MIN_S), "it stood still for its limit"


def test_a_trickle_is_no_progress_and_progress_is_not_waited_for_for_ever() -> None:
    beliefs = replace(START, loading={"a": loading(0.0)})
    trickle = told(told(beliefs, 100.0, 300e6), 1100.0, 300e6 + PROGRESS_BYTES - 1.0)
    assert trickle.instances["i"].moved_at_s == 100.0
    slow = beliefs
    for n in range(1, 40):
        slow = told(slow, 100.0 * n, 300e6 * n)
        assert bool(stuck(slow, 100.0 * n)) == (100.0 * n > PATIENCE * LOAD_LIMIT_MIN_S)


def test_a_node_that_began_anew_counts_anew_and_silence_is_no_news() -> None:
    known = told(told(START, 100.0, 5e9), 200.0, None)
    assert (known.instances["i"].progress_bytes, known.instances["i"].moved_at_s) == (5e9, 100.0)
    assert told(known, 300.0, 1e6).instances["i"].moved_at_s == 300.0


def test_a_boot_that_gets_on_is_waited_for() -> None:
    presence, limit = Presence.of(view(0.0)), TIMEOUT_S[InstanceState.BOOTING]
    still = replace(with_boots(100.0), instances={"i": STARTING})
    moving = told(still, limit - 10.0, 9e9)
    assert [act.instance_id for act in terminates(still, [], presence, "p", limit + 1.0)] == ["i"]
    (kept,) = terminates(moving, [], presence, "p", limit + 1.0)
    assert kept.reasons[0].code is not ReasonCode.STARTING_EXPIRED
    (given_up,) = terminates(moving, [], presence, "p", 2 * limit)
    assert given_up.reasons == (why(ReasonCode.STARTING_EXPIRED, "booting", age_s=limit + 10.0, limit_s=limit),)


DEMAND = Demand(
    service=CHAT,
    quantile=0.5,
    lead_s=300.0,
    unheld_rps=0.0,
    arrival_rps=0.0,
    replicas_floor=0,
    prefill_tps=0.0,
    decode_tps=0.0,
    reasons=(),
)


def test_the_first_load_of_a_service_is_finished_though_nobody_asks_just_now() -> None:
    """sie#293, kserve#1641: killed while loading, and begun again with the next request."""
    seen = view(500.0, i1="loading", j1="loading")
    beliefs = replace(START, loading={"i1": loading(100.0), "j1": loading(300.0, "j")})
    kept = protected(DEMAND, seen, beliefs, 500.0)
    assert kept.replicas_floor == 1
    assert kept.reasons == (why(ReasonCode.LOADING_PROTECTED, loading=2, age_s=400.0),)
    assert protected(DEMAND, view(500.0, i1="loading", j1="ready"), beliefs, 500.0) is DEMAND
    assert protected(DEMAND, view(500.0), beliefs, 500.0) is DEMAND
    floored = replace(DEMAND, replicas_floor=2)
    assert protected(floored, seen, beliefs, 500.0) is floored


def test_a_load_past_its_deadline_is_protected_no_more() -> None:
    beliefs = replace(START, loading={"i1": loading(0.0)})
    assert protected(DEMAND, view(1300.0, i1="loading"), beliefs, 1300.0) is DEMAND
