"""The odds of a grant, the order in which pools are asked, and what is not given back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from autoscaler.core.beliefs import EMPTY, Beliefs, InstanceBelief, OfferingBelief
from autoscaler.core.berths import Need, Option
from autoscaler.core.capacity import Capacity
from autoscaler.core.events import LaunchGranted, LaunchRefused
from autoscaler.core.hold import Scarcity
from autoscaler.core.learn import learn
from autoscaler.core.lifecycle import InstanceState
from autoscaler.core.model import Demand, Offering, Shape
from autoscaler.core.odds import OUTAGE_SCALE_S, PRIOR, Odds, given_back, opens, reclaimed
from autoscaler.core.rank import bids, canary
from autoscaler.core.shares import Purse
from policies.model import Slo, Unit, Variant
from tests.scene import TIMING, service


def offer(name: str, market: Any = "on_demand", kind: str = "g6", price: float = 1.0, **over: Any) -> Offering:
    fields: dict[str, Any] = {"pool": name, "zone": name, "region": "r", "gpus": 1, "instance_type": kind}
    return Offering(offering=name, market=market, price_usd_per_h=price, **fields | over)


def known(*offers: Offering) -> Beliefs:
    return Beliefs(offers={one.offering: one for one in offers})


def refused(beliefs: Beliefs, name: str, at_s: float, error: Any = "no_capacity") -> Beliefs:
    event = LaunchRefused(at_s=at_s, intent="i", token=f"t{at_s}", offering=name, error=error, code="x")
    return learn(beliefs, event)


def granted(beliefs: Beliefs, name: str, at_s: float) -> Beliefs:
    return learn(beliefs, LaunchGranted(at_s=at_s, intent="i", token="t", offering=name, instance_ids=(f"i{at_s}",)))


def need(rps: float = 3.0, leads: dict[str, float] | None = None, pressing: float = 1.0, **over: Any) -> Need:
    """A service whose replicas carry 2 requests/s on one GPU of each type, after the lead given for it."""
    options = []
    for kind, lead_s in (leads or {"g6": 200.0}).items():
        shape = Shape(
            service="u/chat", variant=kind, instance_type=kind, gpus=1, nodes=1, timing=TIMING, load_prior_s=60.0,
            boot_prior_s=60.0, source="test",
        )  # fmt: skip
        options.append(Option(shape=shape, capacity=Capacity(rps=2.0, batch=8, reasons=()), lead_s=lead_s))
    demand = Demand(
        service="u/chat", quantile=0.95, lead_s=200.0, unheld_rps=rps, arrival_rps=rps, replicas_floor=0,
        prefill_tps=0.0, decode_tps=0.0, reasons=(),
    )  # fmt: skip
    variants = tuple(Variant(id=one.shape.variant, instance_type=one.shape.instance_type) for one in options)
    entry = service("chat", variants=variants, **{"slo": Slo(ttft_s=2.0, fraction=0.95)} | over)
    purse = Purse(unit=Unit(unit="u", owner="o", services=(entry,)))
    return Need(demand=demand, entry=entry, purse=purse, options=tuple(options), pressing=pressing)


# ---- odds -----------------------------------------------------------------------------------------------------------
def test_the_longer_a_pool_is_dry_the_less_likely_it_opens_soon() -> None:
    """AWS spot zones: of outages 5 min old 29 % ended within 10 min, of those half an hour old 12 %, two hours 5 %."""
    ages = [opens(age_s, 600.0) for age_s in (300.0, 1800.0, 7200.0)]
    assert ages == sorted(ages, reverse=True)
    assert ages == pytest.approx([0.29, 0.17, 0.07], abs=0.01)
    assert opens(0.0, OUTAGE_SCALE_S) == 0.5


def test_nothing_known_is_the_prior_of_the_market() -> None:
    spot, steady = offer("spot", "spot"), offer("od")
    odds = Odds(known(spot, steady), 0.0)
    assert (odds.grant(spot), odds.grant(steady)) == (PRIOR["spot"], PRIOR["on_demand"])


def test_a_refusal_takes_the_odds_and_time_gives_them_back() -> None:
    pool = offer("a")
    beliefs = refused(known(pool), "a", 0.0)
    chances = [Odds(beliefs, at_s).grant(pool) for at_s in (0.0, 600.0, 3600.0, 86_400.0)]
    assert chances[0] == 0.0
    assert chances == sorted(chances)
    assert chances[-1] == pytest.approx(PRIOR["on_demand"], abs=0.03)
    later = Odds(beliefs, 0.0).grant(pool, within_s=600.0)
    assert 0.0 < later < chances[2], "the same pool asked in ten minutes"


def test_an_outage_that_goes_on_is_older_and_less_hopeful() -> None:
    pool = offer("a")
    young = refused(known(pool), "a", 7200.0)
    old = refused(refused(known(pool), "a", 0.0), "a", 7200.0)
    assert Odds(old, 7800.0).ended(pool) < Odds(young, 7800.0).ended(pool)


def test_a_grant_ends_the_outage() -> None:
    pool = offer("a")
    beliefs = granted(refused(known(pool), "a", 0.0), "a", 60.0)
    assert Odds(beliefs, 60.0).ended(pool) == 1.0
    assert Odds(beliefs, 60.0).grant(pool) > 0.5


def test_a_refusal_raises_doubt_of_the_next_zone_most_of_one_in_its_region_and_the_doubt_decays() -> None:
    a, b = offer("a"), offer("b")
    far, other = offer("far", region="s"), offer("other", kind="p5")
    beliefs = refused(known(a, b, far, other), "a", 0.0)
    now, later = Odds(beliefs, 1.0), Odds(beliefs, 7200.0)
    assert now.grant(b) < now.grant(far) < now.grant(other) == PRIOR["on_demand"]
    assert later.grant(b) > now.grant(b)


def test_a_full_quota_a_throttle_and_a_wrong_request_say_nothing_of_the_pool() -> None:
    pool = offer("a")
    for error in ("quota", "throttled", "misconfigured", "not_found"):
        odds = Odds(refused(known(pool), "a", 0.0, error), 1.0)
        assert (odds.grant(pool), odds.dry(pool)) == (PRIOR["on_demand"], False), error


def instance(name: str, **over: Any) -> InstanceBelief:
    fields: dict[str, Any] = {"state": InstanceState.JOINED, "since_s": 0.0, "launched_at_s": 0.0, "token": name}
    return InstanceBelief(instance_id=name, offering="a", **fields | over)


def test_reclaims_are_counted_as_shares_of_what_was_there() -> None:
    pool = offer("a", "spot")
    beliefs = replace(known(pool), instances={name: instance(name) for name in ("i1", "i2", "i3", "i4")})
    for name in ("i1", "i2"):
        beliefs = reclaimed(beliefs, replace(beliefs.instances[name], reclaim_at_s=7320.0), 7200.0)
    assert beliefs.offerings["a"].lost == pytest.approx(0.5)
    assert Odds(beliefs, 7200.0).lost_per_h(pool) == pytest.approx(0.5 * 0.6931 / 6, rel=1e-3)


def test_the_rest_of_an_instance_is_not_charged_where_others_lack_it() -> None:
    """Two GPUs of four at $1 each cost less than two small instances, but only if somebody takes the other two."""
    offers = known(offer("small", kind="g6", price=1.2), offer("large", kind="g6x", price=4.0, gpus=4))
    one = need(leads={"g6": 200.0, "g6x": 200.0})
    first = [bids(one, offers, Odds(offers, 0.0), 0.0)[0][0].offering.offering]
    one.waiting = Counter({"g6x": 2})
    first.append(bids(one, offers, Odds(offers, 0.0), 0.0)[0][0].offering.offering)
    assert first == ["small", "large"]


def test_a_reservation_that_refused_has_room_where_one_of_ours_ended() -> None:
    beliefs = refused(known(offer("a", "odcr")), "a", 0.0)
    after = given_back(beliefs, instance("i1", state=InstanceState.GONE)).offerings["a"]
    assert (after.dry_since_s, after.cool_until_s) == (None, 0.0)
    spot = refused(known(offer("a", "spot")), "a", 0.0)
    assert given_back(spot, instance("i1")) is spot, "what a spot pool takes others may have got"


# ---- rank -----------------------------------------------------------------------------------------------------------
def order(one: Need, beliefs: Beliefs, at_s: float = 0.0) -> list[str]:
    return [bid.offering.offering for bid in bids(one, beliefs, Odds(beliefs, at_s), at_s)[0]]


def test_price_decides_between_pools_that_are_alike() -> None:
    assert order(need(), known(offer("dear", price=2.0), offer("cheap"))) == ["cheap", "dear"]


def test_what_is_paid_for_anyway_costs_nothing() -> None:
    assert order(need(markets=("odcr", "on_demand")), known(offer("a"), offer("cr", "odcr", price=9.0))) == ["cr", "a"]


def test_a_slow_start_costs_what_is_missed_meanwhile_but_only_while_somebody_waits() -> None:
    """Two variants, the cheaper one eight minutes later: at .95 a missed request is worth 19 served ones."""
    beliefs = known(offer("slow", kind="p5", price=0.9), offer("fast"))
    leads = {"g6": 200.0, "p5": 680.0}
    assert order(need(leads=leads), beliefs) == ["fast", "slow"]
    assert order(need(leads=leads, pressing=0.0, slo=Slo(ttft_s=2.0, fraction=0.5)), known(
        offer("slow", kind="p5", price=0.2), offer("fast")
    )) == ["slow", "fast"]  # fmt: skip


def test_a_pool_that_takes_back_what_it_gives_loses_to_a_dearer_one() -> None:
    """karpenter-aws#8298: spot reclaimed within minutes is not asked for ever."""
    beliefs = known(offer("spot", "spot", price=0.4), offer("od"))
    calm = need(leads={"g6": 400.0})
    assert order(calm, beliefs) == ["spot", "od"]
    stormy = replace(beliefs, offerings={"spot": OfferingBelief(lost=12.0)})
    assert order(calm, stormy) == ["od", "spot"]


def test_a_pool_that_would_refuse_is_asked_after_one_of_the_same_price() -> None:
    beliefs = refused(known(offer("a"), offer("b")), "a", 0.0)
    assert order(need(), beliefs, 1000.0) == ["b", "a"]


def test_pools_that_all_cool_are_asked_in_turns_while_somebody_waits() -> None:
    beliefs = refused(refused(known(offer("a"), offer("b")), "a", 0.0), "b", 60.0)
    for at_s in (120.0, 130.0):
        beliefs = refused(refused(beliefs, "a", at_s), "b", at_s + 1.0)

    def asked(at_s: float, one: Need) -> str | None:
        odds = Odds(beliefs, at_s)
        _, shut = bids(one, beliefs, odds, at_s)
        found = canary(one, shut, beliefs, odds, at_s)
        return found.offering if found else None

    assert asked(140.0, need()) is None, "hardly any outage ends so soon"
    cooling_s = beliefs.offerings["b"].cool_until_s - 1.0
    beliefs = replace(
        beliefs, offerings={name: replace(row, cool_until_s=5000.0) for name, row in beliefs.offerings.items()}
    )
    assert cooling_s < 5000.0
    assert asked(900.0, need()) in ("a", "b")
    assert asked(900.0, need(pressing=0.05)) is None, "nobody waits"


# ---- hold -----------------------------------------------------------------------------------------------------------
def held_s(beliefs: Beliefs, at_s: float = 60.0, **over: Any) -> float:
    one = need(**over)
    offering = beliefs.offers["mine"]
    return Scarcity(one, Odds(beliefs, at_s), at_s).hold_s(offering, 2.0, offering.price_usd_per_h)


def test_nothing_is_held_while_supply_is_plentiful() -> None:
    assert held_s(known(offer("mine"), offer("other"))) == 0.0


def test_what_could_not_be_had_again_is_held_for_longer_the_more_a_miss_is_worth() -> None:
    dry = refused(known(offer("mine"), offer("other")), "other", 0.0)
    strict, loose = held_s(dry), held_s(dry, slo=Slo(ttft_s=2.0, fraction=0.8))
    assert strict == pytest.approx(19.0 / 4.0 * loose)
    assert 600.0 < strict < 7200.0


def test_an_open_pool_beside_the_dry_one_shortens_the_hold() -> None:
    dry = refused(known(offer("mine"), offer("other")), "other", 0.0)
    open_too = refused(known(offer("mine"), offer("other"), offer("third", region="s")), "other", 0.0)
    assert held_s(open_too) < 0.25 * held_s(dry)


def test_requests_that_may_wait_for_the_pool_hold_nothing() -> None:
    dry = refused(known(offer("mine"), offer("other")), "other", 0.0)
    assert held_s(dry, slo=Slo(deadline_s=7200.0, fraction=0.9), goal="cost") == 0.0


def test_a_big_instance_with_little_idle_on_it_is_held_for_a_shorter_time() -> None:
    small = refused(known(offer("mine"), offer("other")), "other", 0.0)
    big = refused(known(offer("mine", gpus=8, price=8.0), offer("other")), "other", 0.0)
    assert held_s(big) == pytest.approx(held_s(small) / 8.0)


def test_an_offering_that_nobody_knows_is_no_error() -> None:
    assert Odds(replace(EMPTY, offerings={"gone": OfferingBelief(no=1.0)}), 0.0).grant(offer("a")) == PRIOR["on_demand"]
