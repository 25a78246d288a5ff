"""What every Serving must do, as the life of two replicas on one instance. Run on the fake and on a real cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest

from autoscaler.core.model import Node, ServingView
from autoscaler.ports import Cloud, NotFound, Serving, Transient
from serve_apps.wire import PlanMessage

APP = "support.chat.small"
OFFERING = "od-a"  # two GPUs; a replica of APP needs one
PATIENCE_S = 60.0
T = TypeVar("T")


@dataclass
class ServingRig:
    """A Serving over a Cloud with one OFFERING; `scale` sets APP's target, `wait` lets time pass."""

    serving: Serving
    cloud: Cloud
    now_s: Callable[[], float]
    wait: Callable[[float], None]
    scale: Callable[[int], None]

    def patiently(self, call: Callable[[], T]) -> T:
        """What `call` answers; repeated for PATIENCE_S while it is Transient, as a controller's next tick would."""
        started_s = self.now_s()
        while True:
            try:
                return call()
            except Transient:
                if self.now_s() - started_s > PATIENCE_S:
                    raise
                self.wait(0.5)

    def observe(self) -> ServingView:
        return self.patiently(lambda: self.serving.observe(self.now_s()))

    def publish(self, message: PlanMessage) -> None:
        self.patiently(lambda: self.serving.publish(message))

    def drain(self, instance_id: str) -> None:
        self.patiently(lambda: self.serving.drain(instance_id, self.now_s() + 30, "surplus"))

    def nodes(self) -> dict[str, Node]:
        return {node.instance_id: node for node in self.observe().nodes}

    def states(self) -> list[str]:
        return sorted(replica.state for replica in self.observe().replicas)

    def until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        started_s = self.now_s()
        while not done():
            assert self.now_s() - started_s < limit_s, f"{what}: not within {limit_s} s"
            self.wait(0.1)


def plan(seq: int, target: int = 1) -> PlanMessage:
    return PlanMessage(
        run_id="r", seq=seq, published_at_s=1.0, stale_after_s=30.0, targets={APP: target}, local_rules={}, services=()
    )


def comes_to_life(rig: ServingRig) -> str:
    """From an empty cluster to an instance full of ready replicas; returns the instance's id."""
    assert rig.observe().replicas == ()
    (instance_id,) = rig.cloud.launch(OFFERING, 1, "t1")
    rig.until(lambda: instance_id in rig.nodes(), 180, "join")
    node = rig.nodes()[instance_id]
    assert (node.alive, node.draining) == (True, False)

    rig.scale(3)
    rig.until(lambda: rig.states() == ["pending", "ready", "ready"], 240, "two replicas fit, one waits")
    before_s = rig.now_s()
    view = rig.observe()
    assert before_s <= view.at_s <= rig.now_s()
    assert view.targets == ((APP, 3),)
    assert {(replica.service, replica.variant) for replica in view.replicas} == {("support/chat", "small")}
    assert sorted(replica.instance_id for replica in view.replicas) == ["", instance_id, instance_id]
    assert len({replica.replica_id for replica in view.replicas}) == 3
    assert all(rig.now_s() - 400 < replica.since_s <= rig.now_s() for replica in view.replicas)
    rig.publish(plan(1, 3))
    rig.publish(plan(2, 3))
    return instance_id


def is_emptied_by_a_drain(rig: ServingRig, instance_id: str) -> None:
    """From full to gone, with the target lowered in the same breath as the drain."""
    with pytest.raises(NotFound):
        rig.drain("i-unknown")
    rig.drain(instance_id)
    rig.drain(instance_id)  # what drains already may be asked again
    assert rig.nodes()[instance_id].draining
    rig.scale(0)
    rig.until(lambda: not rig.nodes()[instance_id].alive, 180, "the drained node leaves")
    with pytest.raises(NotFound):
        rig.drain(instance_id)
