"""Public complaints about what was acquired: it ends, idles, is taken, never joins. The whole loop, real boto3."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autoscaler.adapters.ec2.calls import Bucket, Caller
from autoscaler.adapters.ec2.purchase import Purchases, for_sale
from autoscaler.core.events import LaunchGranted
from chaos.ec2_server.state import BLOCK_STOP_S, BlockOffering, Pool, Reservation
from tests.ec2_rig import EAST, A, B, clients
from tests.ec2_scene import SMALL, Ec2Scene, hidden, place, scene

CHAT = "support/chat"
ON_A, ON_B, SPOT_A = Pool(SMALL, A), Pool(SMALL, B), Pool(SMALL, A, "spot")
CHEAP, DEAR = place("cheap"), place("dear", B, price_usd_per_h=2.0)
START_S = 1_000_000.0
HOUR_S = 3600.0
CLOSING_S = 2400.0


def always_ready(made: Ec2Scene, for_s: float, replicas: int = 1) -> None:
    """Time passes, and at no tick is there a replica too few."""
    for _ in range(round(for_s / 10.0)):
        made.run(10.0)
        assert made.ready(CHAT) >= replicas, f"at {made.clock.now_s() - START_S:g} s"


def launched(made: Ec2Scene, offering: str) -> list[float]:
    """When instances of an offering were granted, in seconds from the start."""
    return [e.at_s - START_S for e in made.events if isinstance(e, LaunchGranted) and e.offering == offering]


# ---- blocks and reservations ----------------------------------------------------------------------------------------
def test_a_capacity_block_from_purchase_to_end(tmp_path: Path) -> None:
    """skypilot#4155, karpenter-aws#8362: used from its first minutes, left before end − 40 min, and no replica missed.

    It is bought at the start and lasts an hour; it is sunk cost, so what it can hold is served from it.
    """
    begins_s, ends_s = 600.0, 600.0 + HOUR_S
    sold = BlockOffering("cb-1", SMALL, A, 2, START_S + begins_s, START_S + ends_s, 90.0)
    block = place("block", market="block", reservation="cr-00000000000000001", price_usd_per_h=1.0)
    with scene(hidden({ON_B: 5}, blocks={"cb-1": sold}), DEAR, block, replicas=2) as made:
        caller = Caller(clients(EAST), Bucket(10.0, 1.0, made.clock.now_s))
        (found,) = for_sale(caller, SMALL, 2, 1)
        assert Purchases(caller, tmp_path, made.clock.now_s).buy("spring", found) == block.reservation
        caller.close()
        made.run(300.0)
        always_ready(made, begins_s - 300.0, 2)
        assert made.running() == ["dear", "dear"]
        always_ready(made, 300.0, 2)
        assert made.running() == ["block", "block"]
        assert min(launched(made, "block")) == begins_s
        always_ready(made, ends_s - CLOSING_S - begins_s - 300.0, 2)
        assert made.running().count("dear") == 2, "replaced before the block closes"
        assert made.ready(CHAT) >= 2
        always_ready(made, 120.0, 2)
        assert made.running() == ["dear", "dear"]
        always_ready(made, 900.0, 2)
        assert max(launched(made, "block")) < ends_s - CLOSING_S
        ended = [row for row in made.rig.region.instances.values() if row.reservation]
        assert all(row.stops_at_s < sold.end_at_s - BLOCK_STOP_S for row in ended)


def test_a_paid_reservation_does_not_stay_idle_beside_on_demand() -> None:
    """kubernetes-on-aws#11623: work moves into it, and the other instance goes only then."""
    odcr = place("odcr", market="odcr", reservation="cr-1")
    with scene(hidden({ON_A: 5}), CHEAP, odcr) as made:
        made.run(300.0)
        assert made.running() == ["cheap"]
        made.rig.region.reservations["cr-1"] = Reservation("cr-1", SMALL, A, 1, 0.0, 0.0, match="targeted")
        always_ready(made, 1200.0)
        assert made.running() == ["odcr"]


# ---- taken away -----------------------------------------------------------------------------------------------------
def test_spot_that_is_taken_again_and_again_is_left_for_on_demand() -> None:
    """karpenter-aws#8298: not spot for ever."""
    spot = place("spot", A, "spot", price_usd_per_h=0.3)
    with scene(hidden({ON_A: 5, SPOT_A: 5}), spot, CHEAP) as made:
        for _ in range(20):
            made.run(120.0)
            for key, row in made.rig.region.instances.items():
                if row.market == "spot" and row.stops_at_s == float("inf"):
                    made.rig.region.interrupt(key, made.clock.now_s())
        assert len(launched(made, "spot")) <= 6
        assert made.running() == ["cheap"]
        assert made.ready(CHAT) == 1


def test_advice_to_rebalance_launches_and_terminates_nothing() -> None:
    """karpenter-aws#4893: advice is advice."""
    spot = place("spot", A, "spot", price_usd_per_h=0.3)
    with scene(hidden({SPOT_A: 5}), spot) as made:
        made.run(300.0)
        before = set(made.rig.region.instances)
        for _ in range(20):
            for key in before:
                made.rig.region.advise(key, made.clock.now_s())
            always_ready(made, 30.0)
        assert set(made.rig.region.instances) == before
        assert made.rig.calls("TerminateInstances") == 0


# ---- starts that come to nothing ------------------------------------------------------------------------------------
def test_nodes_that_never_join_are_replaced_and_their_pool_is_not_blamed() -> None:
    """eks-ami#2423: three of ten."""
    with scene(hidden({ON_A: 30}), CHEAP, replicas=10) as made:
        made.run(20.0)
        made.fleet.lost.update(sorted(made.rig.region.instances)[:3])
        made.run(1200.0)
        assert made.ready(CHAT) == 10
        assert made.beliefs.offerings["cheap"].refused == 0
        assert not made.fleet.lost & {row.instance_id for row in made.fleet.machines.values() if row.state == "running"}


def test_a_broken_launch_template_is_not_tried_for_ever() -> None:
    """karpenter-aws#1407: a key that is disabled ends every instance at once; after three the breaker opens."""
    with scene(hidden({ON_A: 30}), CHEAP) as made:
        made.rig.region.dies = ("Client.InvalidKMSKey.InvalidState", "the key is disabled")
        made.run(900.0)
        assert 3 <= len(made.rig.region.instances) <= 6
        assert made.beliefs.offerings["cheap"].refused == 0
        made.rig.region.dies = None
        made.run(1200.0)
        assert made.ready(CHAT) == 1


def test_not_found_just_after_a_launch_buys_nothing_twice() -> None:
    """packer#1367: the listing lags half a minute behind the launch."""
    with scene(hidden({ON_A: 30}, lag_s=30.0), CHEAP, replicas=3) as made:
        made.run(600.0)
        assert made.ready(CHAT) == 3
        assert len(made.rig.region.instances) == 3


# ---- nothing is lost ------------------------------------------------------------------------------------------------
def test_an_instance_that_nobody_asked_for_is_given_back() -> None:
    """marin-dna#564: one of ours by its tag, unknown to the journal, is swept within minutes."""
    with scene(hidden({ON_A: 30}), CHEAP) as made:
        made.run(300.0)
        (known,) = made.rig.region.instances.values()
        lost = replace(known, instance_id="i-lost", tags=known.tags | {"qm:token": "somebody/else"})
        made.rig.region.instances["i-lost"] = lost
        always_ready(made, 900.0)
        assert made.rig.region.instances["i-lost"].reason[0] == "Client.UserInitiatedShutdown"
        assert made.running() == ["cheap"]


def test_no_instance_outlives_its_hard_deadline_and_none_is_missed() -> None:
    """marin-dna#564: it is replaced before the deadline that was written on it at its launch."""
    life_s = 1800.0
    with scene(hidden({ON_A: 30}), CHEAP, max_life_s=life_s, deadline_notice_s=600.0) as made:
        made.run(300.0)
        always_ready(made, life_s - 300.0)
        first, second = made.rig.region.instances.values()
        assert second.running_at_s < first.stops_at_s < first.launched_at_s + life_s
