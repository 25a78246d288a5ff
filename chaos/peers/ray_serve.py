"""Ray Serve's own autoscaling under the world's time: its functions and configuration are imported, not rewritten.

Serve's policy is `replica_queue_length_autoscaling_policy`, its scaling factors and its delays; only the clock is ours:
`_apply_delay_logic` takes the instant as `_now`. tests/unit compare with Serve's whole `DeploymentAutoscalingState`.
May not read a clock, and may not start Ray.
"""

from __future__ import annotations

from typing import Any

from ray.serve import autoscaling_policy as policy
from ray.serve._private.common import DeploymentID, TimeStampedValue
from ray.serve._private.metrics_utils import aggregate_timeseries
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from .facts import Seen, Service
from .replicas import per_unit

SMALLEST_WINDOW_S = 1e-3  # Serve's, for a sample as old as the decision


class RayServe:
    """One deployment. Its configuration is Serve's default but for the bounds and `target_ongoing_requests`."""

    def __init__(self, service: Service, knob: float) -> None:
        self.config = AutoscalingConfig(
            min_replicas=service.floor,
            max_replicas=service.most,
            target_ongoing_requests=per_unit(service, knob),
        )
        self._id = DeploymentID(name=service.key, app_name=service.key)
        self._samples: list[TimeStampedValue] = []
        self._state: dict[str, Any] = {}
        self._target = service.floor

    def want(self, now_s: float, seen: Seen) -> int:
        """Replicas (units) wanted. Serve counts requests at its own handles; unseen, it keeps its last samples."""
        self._forget(now_s)
        if seen.ongoing is not None:
            self._samples.append(TimeStampedValue(now_s, seen.ongoing))
        context = self._context(now_s, round(seen.ready))
        wanted = self._decide(now_s, context)
        self._target = max(self.config.min_replicas, min(self.config.max_replicas, wanted))
        return self._target

    def _decide(self, now_s: float, context: Any) -> int:
        cold = policy._get_cold_start_scale_up_replicas(context)
        if cold is not None:
            return int(cold)
        desired, _ = policy.replica_queue_length_autoscaling_policy(context)
        scaled = policy._apply_scaling_factors(desired, context.current_num_replicas, context.config)
        if context.current_num_replicas == 0 and scaled > 0:
            return int(scaled)
        decided, self._state = policy._apply_delay_logic(
            max(0, scaled), context.target_num_replicas, context.config, self._state, _now=now_s
        )
        return int(decided)

    def _forget(self, now_s: float) -> None:
        horizon_s = now_s - self.config.look_back_period_s
        self._samples = [sample for sample in self._samples if sample.timestamp >= horizon_s] or self._samples[-1:]

    def _ongoing(self, now_s: float) -> float:
        """Serve's time-weighted mean of the requests in flight over its look-back."""
        if not self._samples:
            return 0.0
        age_s = max(now_s - self._samples[-1].timestamp, SMALLEST_WINDOW_S)
        return float(aggregate_timeseries(self._samples, self.config.aggregation_function, last_window_s=age_s) or 0.0)

    def _context(self, now_s: float, ready: int) -> Any:
        return AutoscalingContext(
            deployment_id=self._id,
            deployment_name=self._id.name,
            app_name=self._id.app_name,
            current_num_replicas=ready,
            target_num_replicas=self._target,
            running_replicas=[],
            total_num_requests=self._ongoing(now_s),
            total_queued_requests=0.0,
            aggregated_metrics={},
            raw_metrics={},
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            policy_state=self._state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now_s,
            config=self.config,
        )
