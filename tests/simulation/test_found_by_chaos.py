"""What random bad days found, each as the smallest scene that shows it. What takes a whole world is a file in
tests/corpus.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autoscaler.adapters.journal import MemoryJournal
from autoscaler.core.events import Configured, Event, Record
from autoscaler.core.model import CloudView
from autoscaler.ports import Transient
from policies.model import Variant
from tests.scene import CHAT, Scene, offering, service, unit

WIDE = Variant(id="wide", instance_type="g6.12xlarge", tp=2)
NARROW = Variant(id="l4", instance_type="g6.2xlarge")


def variants(scene: Scene) -> Counter[str]:
    view = scene.serving.observe(scene.clock.now_s())
    return Counter(replica.variant for replica in view.replicas if replica.state == "ready")


@pytest.mark.parametrize("there", [False, True], ids=["to be launched", "with free GPUs in the cluster"])
def test_where_the_quota_has_no_room_for_the_wide_variant_the_narrow_one_is_taken(there: bool) -> None:
    """A floor of two in three GPUs: the second replica was refused in the variant tried first, and no other tried."""
    chat = service(min_replicas=2, max_replicas=2, variants=(WIDE, NARROW))
    pools = [offering("big", 0.1, instance_type="g6.12xlarge", gpus=4 if there else 2), offering("a", 3.0)]
    scene = Scene([unit(chat, quota_gpus=3)], pools)
    scene.load(CHAT, 0.5)
    scene.run(300)
    assert variants(scene) == {"wide": 1, "l4": 1}


def test_an_offering_that_is_listed_no_longer_keeps_what_runs_there_and_gets_nothing_new() -> None:
    """A price that is not a number hid the pool, and with it the places of the replicas in it: they were stopped."""
    scene = Scene([unit(service(min_replicas=2))], [offering("a", 1.0), offering("b", 2.0)])
    scene.load(CHAT, 0.5)
    scene.run(300)
    describe = scene.cloud.describe

    def without_a(now_s: float) -> CloudView:
        seen = describe(now_s)
        return replace(seen, offerings=tuple(row for row in seen.offerings if row.offering != "a"))

    scene.cloud.describe = without_a  # type: ignore[method-assign]
    launched = len(scene.cloud.launches)
    scene.metrics.set_missing(CHAT)
    scene.run(30)
    assert variants(scene) == {"l4": 2}
    assert scene.beliefs.unlisted == ("a",)
    assert len(scene.cloud.launches) == launched
    scene.load(CHAT, 4.0)
    scene.run(300)
    assert Counter(scene.running())["a"] == 2
    assert Counter(scene.running())["b"] >= 1
    scene.cloud.describe = describe  # type: ignore[method-assign]
    scene.run(10)
    assert not scene.beliefs.unlisted


def test_a_policy_that_came_while_the_disk_was_full_is_taken_when_it_is_not() -> None:
    """A source tells of a change once; the tick that took it could not write it down."""

    class Full(MemoryJournal):
        full = False

        def append(self, event: Event, *, durable: bool) -> Record:
            if self.full and isinstance(event, Configured):
                raise Transient("disk full")
            return super().append(event, durable=durable)

    scene = Scene([unit(service(min_replicas=1))], [offering("a")])
    journal = scene.journal = Full()
    scene.start()
    scene.load(CHAT, 0.5)
    scene.run(10)
    scene.policy = scene.policy.model_copy(update={"units": (unit(service(min_replicas=3)),)})
    scene.source.set(scene.policy)
    journal.full = True
    with pytest.raises(Transient):
        scene.controller.tick()
    journal.full = False
    assert sum(target.wanted for target in scene.run(10).targets) == 3
