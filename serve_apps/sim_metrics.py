"""vLLM's metric series for the simulated engine: the same names, labels and buckets as vLLM's own Ray logger exports.

Through Ray they come out as ``ray_vllm_…``. May not import vLLM, numpy or torch; what is not simulated is not exported.
"""

from __future__ import annotations

from serve_apps.batching import Batch, Sequence
from serve_apps.law_metrics import LawMetrics

_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(mantissa * 10.0**exponent for exponent in range(5) for mantissa in (1, 2, 5))
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ),
    "request_time_per_output_token_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    ),
    "e2e_request_latency_seconds": _LATENCY_S,
    "request_queue_time_seconds": _LATENCY_S,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
}


class SimMetrics:
    """vLLM's series under vLLM's names, labels and buckets, as its own Ray logger exports them."""

    def __init__(self, model: str, replica_id: str) -> None:
        from ray.util.metrics import Counter, Gauge, Histogram

        self._tags = {"model_name": model, "engine": "0", "ReplicaId": replica_id}
        keys = tuple(self._tags)
        self._gauges = {
            name: Gauge(f"vllm_{name}", description=f"vllm:{name}", tag_keys=keys)
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        }
        names = ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
        self._counters = {name: Counter(f"vllm_{name}", description=f"vllm:{name}", tag_keys=keys) for name in names}
        self._success = Counter(
            "vllm_request_success", description="vllm:request_success", tag_keys=(*keys, "finished_reason")
        )
        self._histograms = {
            name: Histogram(f"vllm_{name}", description=f"vllm:{name}", boundaries=list(bounds), tag_keys=keys)
            for name, bounds in HISTOGRAMS.items()
        }
        self._told: dict[str, int] = {}
        self._law = LawMetrics(replica_id)

    def stepped(self, batch: Batch, step_s: float) -> None:
        """Count one step that took `step_s` seconds, before its tokens are given out."""
        self._law.sums.step([step_s] * batch.decoding, batch.kv_tokens)

    def finished(self, sequence: Sequence) -> None:
        """Observe one finished request."""
        first_s, end_s = sequence.first_token_at_s, sequence.finished_at_s
        if first_s is None or end_s is None or sequence.admitted_at_s is None:
            raise ValueError(f"request {sequence.request_id} has not finished")
        self._law.sums.prefill(sequence.input_tokens, first_s - sequence.admitted_at_s)
        self._success.inc(1, tags={**self._tags, "finished_reason": "length"})
        seen = {
            "time_to_first_token_seconds": first_s - sequence.arrived_at_s,
            "e2e_request_latency_seconds": end_s - sequence.arrived_at_s,
            "request_queue_time_seconds": sequence.admitted_at_s - sequence.arrived_at_s,
            "request_prompt_tokens": sequence.input_tokens,
            "request_generation_tokens": sequence.output_tokens,
        }
        if sequence.output_tokens > 1:
            seen["request_time_per_output_token_seconds"] = (end_s - first_s) / (sequence.output_tokens - 1)
        for name, value in seen.items():
            self._histograms[name].observe(value, tags=self._tags)

    def export(self, batch: Batch) -> None:
        """Hand the present state and what was counted since the last call to Ray."""
        self._gauges["num_requests_running"].set(len(batch.running), tags=self._tags)
        self._gauges["num_requests_waiting"].set(len(batch.waiting), tags=self._tags)
        self._gauges["kv_cache_usage_perc"].set(batch.kv_tokens / batch.timing.kv_capacity_tokens, tags=self._tags)
        self._law.export()
        totals = {
            "prompt_tokens": batch.totals.prompt_tokens,
            "generation_tokens": batch.totals.generation_tokens,
            "num_preemptions": batch.totals.preemptions,
            "prefix_cache_queries": batch.totals.prompt_tokens,
        }
        for name, total in totals.items():
            if total > self._told.get(name, 0):
                self._counters[name].inc(total - self._told.get(name, 0), tags=self._tags)
                self._told[name] = total
