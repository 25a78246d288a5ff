"""Public complaints about acquiring capacity, each answered by the whole loop through real boto3.

The adapter's own part of them is in `unit/test_ec2_acquiring`; here are those that the controller has to answer.
"""

from __future__ import annotations

from itertools import pairwise

from autoscaler.core.events import LaunchTried
from chaos.ec2_server.state import Pool, Reservation
from policies.model import Unit, Variant
from tests.ec2_rig import A, B
from tests.ec2_scene import OTHER, SMALL, Ec2Scene, hidden, place, scene
from tests.scene import service, unit

CHAT = "support/chat"
ON_A, ON_B, SPOT_A = Pool(SMALL, A), Pool(SMALL, B), Pool(SMALL, A, "spot")
CHEAP, DEAR = place("cheap"), place("dear", B, price_usd_per_h=2.0)


def two_types(replicas: int) -> tuple[Unit, ...]:
    """A service that either type can serve."""
    variants = (Variant(id="l4", instance_type=SMALL), Variant(id="a10g", instance_type=OTHER))
    return (unit(service(min_replicas=replicas, variants=variants)),)


def tried(made: Ec2Scene) -> list[tuple[float, str]]:
    """When each offering was asked, from the first on."""
    return [(e.at_s - 1_000_000.0, e.offering) for e in made.events if isinstance(e, LaunchTried)]


def test_an_instance_that_ends_for_lack_of_capacity_is_tried_elsewhere() -> None:
    """ray#27521: a launch that ends in nothing does not stay 'launching' for ever."""
    with scene(hidden({ON_A: 5, ON_B: 5}), CHEAP, DEAR) as made:
        made.rig.region.dies = ("Server.InsufficientInstanceCapacity", "no capacity after all")
        made.run(20.0)
        made.rig.region.dies = None
        made.run(200.0)
        assert made.running() == ["dear"]
        assert made.ready(CHAT) == 1


def test_a_launch_that_nobody_answers_is_given_up_and_made_elsewhere_or_again() -> None:
    """ray#27521: the open intent has a deadline."""
    with scene(hidden({ON_A: 5, ON_B: 5}), CHEAP, DEAR) as made:
        for action in ("RunInstances", "CreateFleet"):
            made.rig.fault("lost_before", action, 2)
        made.run(240.0)
        assert len(made.running()) == 1
        assert made.ready(CHAT) == 1


def test_memory_of_a_refusal_outranks_price() -> None:
    """ray#53636, ray#39788: the type that was refused is not asked again although it is cheaper."""
    with scene(hidden({ON_A: 0, ON_B: 5}), CHEAP, DEAR, replicas=2) as made:
        made.run(60.0)
        assert made.grants() == [("dear", 2)]
        assert [name for _, name in tried(made)].count("cheap") <= 1


def test_two_dry_zones_are_left_for_another_type() -> None:
    """ray#20774: no ping-pong; both zones cool and the type changes."""
    other = place("other", instance_type=OTHER, price_usd_per_h=3.0)
    region = hidden({ON_A: 0, ON_B: 0, Pool(OTHER, A): 5})
    with scene(region, CHEAP, DEAR, other, units=two_types(2)) as made:
        made.run(300.0)
        assert made.running() == ["other", "other"]
        names = [name for _, name in tried(made)]
        assert names.count("cheap") + names.count("dear") <= 2
        assert made.asked() <= 3


def test_a_pool_that_stays_dry_is_asked_less_and_less() -> None:
    """karpenter#2275: not the same dry offering after each fixed time."""
    with scene(hidden({ON_A: 0}), CHEAP, replicas=5) as made:
        made.run(1800.0)
        waits_s = [after - before for (before, _), (after, _) in pairwise(tried(made))]
        assert 5 <= len(waits_s) <= 20
        assert waits_s[0] < waits_s[2] < waits_s[4]
        assert min(waits_s[5:]) > 180.0


def test_many_needs_do_not_make_many_calls() -> None:
    """karpenter#3198: the same need twenty times over is one question to each pool."""
    with scene(hidden({ON_A: 0, ON_B: 0}), CHEAP, DEAR, replicas=20) as made:
        made.run(10.0)
        assert made.asked() <= 2
        made.run(600.0)
        assert made.asked() <= 20


def test_what_serves_is_not_given_up_for_a_reservation_that_then_refuses() -> None:
    """karpenter#1293: capacity is secured before anything is disrupted."""
    offers = (CHEAP, place("odcr", market="odcr", reservation="cr-1", price_usd_per_h=1.0))
    with scene(hidden({ON_A: 5}), *offers) as made:
        made.run(300.0)
        assert made.running() == ["cheap"]
        made.rig.region.reservations["cr-1"] = Reservation("cr-1", SMALL, A, 2, 0.0, 0.0, match="targeted")
        made.rig.fault("error", "RunInstances", 1000, code="ReservationCapacityExceeded", status=400)
        made.rig.fault("error", "CreateFleet", 1000, code="ReservationCapacityExceeded", status=400)
        for _ in range(60):
            made.run(10.0)
            assert made.ready(CHAT) == 1
        assert made.running() == ["cheap"]
        made.rig.server.faults.clear()
        for _ in range(120):
            made.run(10.0)
            assert made.ready(CHAT) >= 1
        assert made.running() == ["odcr"]


def test_every_rung_is_visited_within_the_tick() -> None:
    """autoscaler#4731, #5038, #3490: dry groups are fallen through at once, not after a time-out each."""
    spots = (place("spot-a", A, "spot", price_usd_per_h=0.1), place("spot-b", B, "spot", price_usd_per_h=0.5))
    with scene(hidden({ON_A: 0, ON_B: 3, SPOT_A: 0}), *spots, CHEAP, DEAR) as made:
        made.run(10.0)
        assert made.grants() == [("dear", 1)]


def test_a_quota_is_asked_once_for_all_zones() -> None:
    """autoscaler#4142, skypilot#975: a vCPU limit is not taken for a dry zone."""
    region = hidden({ON_A: 5, ON_B: 5, SPOT_A: 5}, quotas={("G", "on-demand"): 0})
    with scene(region, CHEAP, DEAR, place("spot", A, "spot", price_usd_per_h=1.5)) as made:
        made.run(300.0)
        assert made.running() == ["spot"]
        assert [name for _, name in tried(made) if name != "spot"] in ([], ["cheap"])


def test_an_instance_that_does_not_start_is_given_back_and_had_elsewhere() -> None:
    """autoscaler#3490: each rung has its deadline."""
    with scene(hidden({ON_A: 5, ON_B: 5}, boots_s={ON_A: 1e6}), CHEAP, DEAR) as made:
        made.run(480.0)
        assert made.running() == ["dear"]
        assert made.ready(CHAT) == 1


def test_demand_that_waits_is_met_when_supply_returns() -> None:
    """gardener autoscaler#340: what was refused is planned again, without a new demand."""
    with scene(hidden({ON_A: 0}), CHEAP) as made:
        made.run(900.0)
        made.rig.region.pools[ON_A] = 1
        made.run(900.0)
        assert made.ready(CHAT) == 1


def test_an_instance_that_vanished_is_not_counted_on() -> None:
    """autoscaler#9043: no phantom keeps its place."""
    with scene(hidden({ON_A: 5}), CHEAP) as made:
        made.run(20.0)
        (gone,) = made.rig.region.instances
        del made.rig.region.instances[gone]
        made.run(900.0)
        assert made.ready(CHAT) == 1


def test_an_unknown_code_is_a_no_and_the_next_rung_is_tried() -> None:
    """skypilot#831: it is counted, and nothing waits for it."""
    with scene(hidden({ON_A: 5, ON_B: 5}), CHEAP, DEAR) as made:
        for action in ("RunInstances", "CreateFleet"):
            made.rig.fault("error", action, 1, code="GpusSoldOutUntilSpring", status=400)
        made.run(120.0)
        assert len(made.running()) == 1
        assert made.rig.cloud.unknown["GpusSoldOutUntilSpring"] >= 1
