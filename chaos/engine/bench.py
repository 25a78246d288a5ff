"""How fast the engine is: `python -m chaos.engine.bench`. An edge: reads the process's CPU clock and memory.

Three services with all features in use: chat on two variants, agent tasks of 5 to 10 dependent calls with growing
context, and long documents on a variant whose KV cache is too small for its load, so that requests are preempted.
Windows of all services and replicas are read every 10 s, as a controller would.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Sequence

import numpy as np

from serve_apps.timing import Timing

from .engine import Engine
from .spec import SINGLE, RequestBatch, ServiceSpec, TaskTable

TICK_S = 10.0
# docs/performance.md: 8B on H100, 8B on L40S, 32B on two H100
H100 = Timing(
    a_s=0.0063, b_s_per_seq=0.000011, c_s_per_ktoken=0.000043, prefill_tps=47_000.0, kv_capacity_tokens=400_000
)
L40S = Timing(
    a_s=0.0218, b_s_per_seq=0.000036, c_s_per_ktoken=0.000203, prefill_tps=14_100.0, kv_capacity_tokens=150_000
)
PAIR = Timing(
    a_s=0.0136, b_s_per_seq=0.000025, c_s_per_ktoken=0.000044, prefill_tps=19_000.0, kv_capacity_tokens=330_000
)


class Synthetic:
    """Poisson arrivals with lognormal token counts; every call is the first of a task when `tasks` has any."""

    def __init__(self, seed: int, rps: float, tokens: tuple[float, float], tasks: TaskTable, prefix: int = 0) -> None:
        self.tasks = tasks
        self._rng = np.random.default_rng(seed)
        self._rps, self._tokens, self._prefix = rps, tokens, prefix
        self._last_s = 0.0

    def take(self, until_s: float) -> RequestBatch:
        """The requests up to `until_s`."""
        count = int(self._rng.poisson(self._rps * (until_s - self._last_s)))
        at_s = np.sort(self._rng.uniform(self._last_s, until_s, count))
        self._last_s = until_s
        inputs, outputs = (self._draw(mean, count) for mean in self._tokens)
        kinds = len(self.tasks.calls)
        task = self._rng.integers(0, kinds, count, dtype=np.int32) if kinds else np.full(count, SINGLE, np.int32)
        prefix = np.minimum(inputs, self._prefix).astype(np.int32)
        return RequestBatch(at_s=at_s, input_tokens=inputs, output_tokens=outputs, prefix_tokens=prefix, task=task)

    def _draw(self, mean: float, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        values = self._rng.standard_normal(count, dtype=np.float32)
        np.exp(values * 0.7 + (math.log(mean) - 0.245), out=values)
        return np.clip(values, 1, 16_000).astype(np.int32)


def _spec(name: str, priority: int, arrivals: Synthetic, ttft_s: float, tpot_s: float) -> ServiceSpec:
    return ServiceSpec(
        service=name, priority=priority, arrivals=arrivals, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=math.inf,
        deadline_s=math.inf, queue_timeout_s=30.0, max_queued=2000, overflow_rpm=60.0, overflow_usd_per_1m_tokens=1.0,
    )  # fmt: skip


def world(rps: float, seed: int) -> tuple[Engine, list[int]]:
    """An engine with `rps` requests/s in all, and its replicas."""
    rng = np.random.default_rng(seed)
    kinds = TaskTable(
        calls=rng.integers(5, 11, 256).astype(np.int32),
        think_s=rng.uniform(0.5, 5.0, 256),
        grow_tokens=rng.integers(50, 500, 256).astype(np.int32),
    )
    alone = TaskTable.none()
    engine = Engine(
        [
            _spec("bench/chat", 900, Synthetic(seed + 1, 0.7 * rps, (1150.0, 210.0), alone), 1.0, 0.05),
            _spec("bench/agents", 500, Synthetic(seed + 2, 0.25 * rps / 7.5, (1500.0, 120.0), kinds, 600), 2.0, 0.08),
            _spec("bench/documents", 100, Synthetic(seed + 3, 0.05 * rps, (5000.0, 300.0), alone), 5.0, 0.1),
        ]
    )
    # service, variant, timing, planned rps of a replica, share of the service's load
    fleet = ((0, 0, H100, 17.0, 0.63), (0, 1, L40S, 4.0, 0.07), (1, 0, H100, 12.0, 0.25), (2, 0, PAIR, 2.6, 0.05))
    replicas = []
    for service, variant, timing, each_rps, share in fleet:
        engine.set_capacity_rps(service, variant, each_rps)
        for _ in range(max(1, math.ceil(share * rps / each_rps))):
            replicas.append(engine.add_replica(service, variant, timing, slots=256))
    return engine, replicas


def run(requests: float, rps: float, seed: int) -> dict[str, float]:
    """Simulate about `requests` requests at `rps` in all; what it took."""
    engine, replicas = world(rps, seed)
    engine.advance(TICK_S)  # compiles, or loads what was compiled before
    begin_s = time.process_time()
    while engine.now_s * rps < requests:
        engine.advance(engine.now_s + TICK_S)
        for service in (0, 1, 2):
            engine.window(service)
        engine.replica_windows(replicas)
    cpu_s = time.process_time() - begin_s
    totals = [engine.totals(service) for service in (0, 1, 2)]
    done = sum(one.requests for one in totals)
    return {
        "requests": done,
        "replicas": len(replicas),
        "ticks": round(engine.now_s / TICK_S),
        "cpu_s": round(cpu_s, 2),
        "requests_per_cpu_s": round(done / cpu_s),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "attainment": round(sum(one.met for one in totals) / done, 4),
        "shed": sum(one.shed for one in totals),
        "preemptions": sum(one.preemptions for one in totals),
    }


def main(arguments: Sequence[str]) -> None:
    """Print the figures of one run as JSON."""
    parser = argparse.ArgumentParser(prog="python -m chaos.engine.bench", description="How fast the engine is.")
    parser.add_argument("--requests", type=float, default=1e7)
    parser.add_argument("--rps", type=float, default=200.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    print(json.dumps(run(options.requests, options.rps, options.seed), indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
