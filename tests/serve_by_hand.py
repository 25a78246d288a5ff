"""Serve's own autoscaling state of one deployment, fed by hand under a clock that is ours: what the peer must equal."""

from __future__ import annotations

import types
from typing import Any

import pytest
from ray.serve import autoscaling_policy
from ray.serve._private import autoscaling_state
from ray.serve._private.common import (
    RUNNING_REQUESTS_KEY,
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
    TimeStampedValue,
)
from ray.serve.config import AutoscalingConfig

EPOCH_S = 1_700_000_000.0  # Serve reads a wall clock


class Clock:
    """Stands in for the module ``time`` inside two of Serve's modules."""

    def __init__(self) -> None:
        self.now_s = EPOCH_S

    def time(self) -> float:
        return self.now_s

    monotonic = time


class Serve:
    """Serve's controller state for one deployment, fed through its public reports."""

    def __init__(self, config: AutoscalingConfig, clock: Clock) -> None:
        self._clock = clock
        self._id = DeploymentID(name="d", app_name="a")
        self._state = autoscaling_state.DeploymentAutoscalingState(self._id)
        deployment = types.SimpleNamespace(autoscaling_config=config, gang_scheduling_config=None)
        info: Any = types.SimpleNamespace(
            deployment_config=deployment, target_capacity=None, target_capacity_direction=None, config_changed=None
        )
        self.target = int(self._state.register(info, config.min_replicas))
        self._queued: list[TimeStampedValue] = []
        self._look_back_s = config.look_back_period_s

    def step(self, now_s: float, queued: float, ready: int) -> int:
        """One report of the queue, then one decision."""
        self._clock.now_s = now = EPOCH_S + now_s
        self._queued = [old for old in self._queued if old.timestamp >= now - self._look_back_s]
        self._queued.append(TimeStampedValue(now, queued))
        self._state.update_running_replica_ids([ReplicaID(str(index), self._id) for index in range(ready)])
        self._state.record_request_metrics_for_handle(
            HandleMetricReport(
                deployment_id=self._id,
                handle_id="h",
                actor_id="x",
                handle_source=DeploymentHandleSource.PROXY,
                queued_requests=list(self._queued),
                metrics={RUNNING_REQUESTS_KEY: {}},
                timestamp=now,
            )
        )
        self.target = int(self._state.get_decision_num_replicas(self.target))
        return self.target


def by_hand(config: AutoscalingConfig, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serve's state with `config`; its two modules read our clock until the test ends."""
    clock = Clock()
    monkeypatch.setattr(autoscaling_state, "time", clock)
    monkeypatch.setattr(autoscaling_policy, "time", clock)
    return Serve(config, clock)
