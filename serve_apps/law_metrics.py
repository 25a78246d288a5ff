"""Counters in which the iteration law can be read exactly, the same for both engines: ``ray_qm_engine_…_total``.

vLLM's histograms say the same, but what Ray exports as a histogram's sum is made of bucket midpoints: a token time of
26 ms and one of 49 ms both come out as 37.5. Counters pass through Ray as they are. May not import vLLM when it is
imported itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PREFIX = "qm_engine_"
# Decode steps, tokens made in them, their inter-token seconds, resident KV tokens summed over them; prefills that
# ended, their prompt tokens outside any prefix cache, and their seconds from admission to first token.
COUNTERS = (
    *("steps", "step_tokens", "token_seconds", "kv_token_steps"),
    *("prefills", "prefill_tokens", "prefill_seconds"),
)
FLUSH_EVERY_S = 1.0


@dataclass(slots=True)
class LawSums:
    """What was counted since the last `take`."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))

    def step(self, token_seconds: Sequence[float], kv_tokens: float) -> None:
        """A step that gave one token to each sequence of `token_seconds` (seconds since its token before)."""
        if token_seconds:
            self._add(1.0, len(token_seconds), sum(token_seconds), kv_tokens)

    def prefill(self, tokens: int, seconds: float) -> None:
        """A request's prompt was prefilled: tokens that had to be, and seconds from admission to first token."""
        for name, value in zip(COUNTERS[4:], (1.0, tokens, seconds), strict=True):
            self.sums[name] += value

    def take(self) -> dict[str, float]:
        """The sums, which begin anew."""
        taken, self.sums = self.sums, dict.fromkeys(COUNTERS, 0.0)
        return taken

    def _add(self, *values: float) -> None:
        for name, value in zip(COUNTERS[:4], values, strict=True):
            self.sums[name] += value


class LawMetrics:
    """Hands LawSums to Ray as counters, with the label that engines' other series carry."""

    def __init__(self, replica_id: str) -> None:
        from ray.util.metrics import Counter

        self.sums = LawSums()
        self._tags = {"ReplicaId": replica_id}
        self._counters = {name: Counter(PREFIX + name, description=name, tag_keys=("ReplicaId",)) for name in COUNTERS}

    def export(self) -> None:
        """Everything counted since the last call."""
        for name, value in self.sums.take().items():
            if value > 0.0:
                self._counters[name].inc(value, tags=self._tags)


class LawRecorder:
    """Counts what vLLM says of each iteration (its StatLoggerBase, without the base)."""

    def __init__(self, vllm_config: Any, metrics: LawMetrics) -> None:
        self._cache = vllm_config.cache_config
        self._metrics = metrics
        self._told_at_s = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """vLLM calls this after every step; `iteration_stats` is None where nothing came out."""
        if iteration_stats is None:
            return
        idle = scheduler_stats is not None and scheduler_stats.num_running_reqs == 0
        capacity = (self._cache.num_gpu_blocks or 0) * self._cache.block_size
        used = scheduler_stats.kv_cache_usage if scheduler_stats is not None else 0.0
        self._metrics.sums.step(iteration_stats.inter_token_latencies_iter, used * capacity)
        for request in iteration_stats.finished_requests:
            fresh = request.num_prompt_tokens - max(0, request.num_cached_tokens)
            self._metrics.sums.prefill(fresh, request.prefill_time)
        if idle or iteration_stats.iteration_timestamp - self._told_at_s >= FLUSH_EVERY_S:
            self._told_at_s = iteration_stats.iteration_timestamp
            self._metrics.export()

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def vllm_logger(replica_id: str) -> Any:
    """A factory for vLLM's `stat_loggers` that counts into LawMetrics. Call it where vLLM is."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LawLogger(LawRecorder, StatLoggerBase):
        def __init__(self, vllm_config: Any, *_: Any) -> None:
            super().__init__(vllm_config, LawMetrics(replica_id))

    return LawLogger
