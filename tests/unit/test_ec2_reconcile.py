"""Five hundred instances on EC2 and a controller that knows nothing: one tick, few calls, nothing launched or ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from autoscaler.act import Inline
from autoscaler.adapters.journal import MemoryJournal
from autoscaler.core.lifecycle import InstanceState
from autoscaler.core.model import Node, Plan, Replica, ServingView
from autoscaler.loop import Controller
from chaos.ec2_server.state import Pool
from policies.model import PolicySet, Variant
from serve_apps.wire import PlanMessage, app_name
from tests.ec2_rig import BIG, WEST, A, Ec2Rig, ec2, offer, region
from tests.fakes import FakeMetrics
from tests.scene import CHAT, INPUT_TOKENS, OUTPUT_TOKENS, Fixed, service, unit

FLEET = 500
TICK_S = 10.0


@dataclass
class Joined:
    """A cluster in which every running instance is a node with one ready replica."""

    rig: Ec2Rig
    drained: list[str] = field(default_factory=list)

    def observe(self, now_s: float) -> ServingView:
        ids = [key for key, each in self.rig.region.instances.items() if each.state(now_s) == "running"]
        rows = tuple(
            Replica(replica_id=f"r-{key}", service=CHAT, variant="l40s", instance_id=key, state="ready", since_s=0.0)
            for key in ids
        )
        nodes = tuple(Node(node_id=f"n-{key}", instance_id=key, alive=True, draining=False) for key in ids)
        return ServingView(at_s=now_s, replicas=rows, nodes=nodes, targets=((app_name(CHAT, "l40s"), FLEET),))

    def publish(self, message: PlanMessage) -> None: ...

    def drain(self, instance_id: str, deadline_at_s: float, reason: str) -> None:
        self.drained.append(instance_id)


def controller(rig: Ec2Rig, serving: Joined) -> Controller:
    variants = (Variant(id="l40s", instance_type=BIG, tp=4),)
    chat = service(min_replicas=FLEET, max_replicas=FLEET, variants=variants)
    metrics = FakeMetrics()
    metrics.set(CHAT, 400.0, input_tokens=INPUT_TOKENS, output_tokens=OUTPUT_TOKENS)
    return Controller(
        clock=rig.clock,
        metrics=metrics,
        serving=serving,
        cloud=rig.cloud,
        journal=MemoryJournal(),
        policy_source=Fixed(PolicySet(units=(unit(chat),))),
        executor=Inline(),
        tick_s=TICK_S,
    )


def test_a_full_reconcile_takes_under_three_seconds_and_rest_costs_four_calls_a_minute() -> None:
    pools = {Pool(BIG, A): FLEET}
    east = region(pools=pools, subnets={"subnet-a": (A, 600)})
    with ec2(east, region(WEST), offers=(offer("od-a"),)) as rig:
        rig.cloud.launch("od-a", FLEET, "somebody/before/us")
        rig.clock.advance(600.0)
        serving = Joined(rig)
        made = controller(rig, serving)
        began_s = time.process_time()
        plan = made.tick()
        first_s = time.process_time() - began_s
        known = made.ledger.beliefs.instances
        assert isinstance(plan, Plan)
        assert len(known) == FLEET
        assert {each.state for each in known.values()} == {InstanceState.JOINED}
        assert (plan.launches, plan.terminates, serving.drained) == ((), (), [])
        assert first_s < 3.0, f"{first_s:.2f} s"

        idle = rig.server.account.regions[WEST]
        before, before_idle, minutes = rig.calls(), len(idle.log), 3
        for _ in range(6 * minutes):
            rig.clock.advance(TICK_S)
            made.tick()
        assert rig.calls() - before <= 4 * minutes
        assert len(idle.log) - before_idle <= minutes
        assert len(rig.region.instances) == FLEET
