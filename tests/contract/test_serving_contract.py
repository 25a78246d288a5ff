"""The Serving contract on the fake; tests/live runs it on a real cluster."""

from __future__ import annotations

from autoscaler.adapters.local_supply import CloudConfig
from autoscaler.core.model import Shape
from serve_apps.timing import Timing
from tests.fakes import FakeClock, FakeCloud, FakeServing
from tests.serving_contract import OFFERING, ServingRig, comes_to_life, is_emptied_by_a_drain, plan

SHAPE = Shape(
    service="support/chat",
    variant="small",
    instance_type="g6e.xlarge",
    gpus=1,
    nodes=1,
    timing=Timing(a_s=0.01, b_s_per_seq=0.0, c_s_per_ktoken=0.0, prefill_tps=1e4),
    load_prior_s=5.0,
    boot_prior_s=1.0,
    source="test",
)


def test_a_replicas_life_on_an_instance_from_join_to_drain() -> None:
    place = {"pool": "a", "instance_type": "g6e.xlarge", "zone": "us-east-1a", "gpus": 2, "price_usd_per_h": 1.0}
    offering = place | {"offering": OFFERING, "count": 2, "boot_s": 0.2}
    config = CloudConfig.model_validate({"cluster": "c", "ray_address": "127.0.0.1:1", "offerings": (offering,)})
    clock = FakeClock()
    cloud = FakeCloud(config, clock)
    serving = FakeServing(cloud, clock, [SHAPE])

    def wait(by_s: float) -> None:
        clock.advance(by_s)

    rig = ServingRig(serving, cloud, clock.now_s, wait, lambda target: serving.publish(plan(0, target)))
    is_emptied_by_a_drain(rig, comes_to_life(rig))
