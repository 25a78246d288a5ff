"""What calibration costs a tick. Bounds leave room for a busy machine; the figures of a quiet one are in the docs."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import pytest

from autoscaler.core import calibrate
from autoscaler.core.beliefs import EMPTY
from tests.calibration_rig import TRUE, owned, placed, shape, window


@pytest.mark.parametrize(("services", "replicas", "limit_ms"), [(3, 50, 2.5), (50, 100, 15.0)])
def test_a_tick_of_calibration_is_cheap(services: int, replicas: int, limit_ms: float) -> None:
    ready = {f"r{s}-{n}": placed(f"r{s}-{n}", service=f"u/s{s}") for s in range(services) for n in range(replicas)}
    instances = {row.instance_id: owned(row.instance_id) for row in ready.values()}
    shapes = tuple(replace(shape(TRUE), service=f"u/s{s}") for s in range(services))
    beliefs = replace(EMPTY, shapes=shapes, instances=instances)
    told = tuple(window(key) for key in ready)
    spent_ms = []
    for tick in range(15):
        began_s = time.process_time()
        beliefs = calibrate.observe(beliefs, told, ready, 10.0 * tick)
        spent_ms.append(1000.0 * (time.process_time() - began_s))
    assert len(beliefs.calibrations) == services
    assert median(spent_ms) < limit_ms
