"""What engines count so that the iteration law can be read: the same sums from the simulated engine and from vLLM."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from serve_apps.engine_sim import SimEngine
from serve_apps.law_metrics import COUNTERS, LawMetrics, LawRecorder, LawSums
from serve_apps.timing import Timing

TIMING = Timing(a_s=0.02, b_s_per_seq=0.001, c_s_per_ktoken=0.0, prefill_tps=1000.0, max_num_seqs=4)


async def test_a_simulated_engine_counts_its_steps_by_the_law() -> None:
    now_s, sums = [0.0], LawSums()

    async def sleep(seconds: float) -> None:
        now_s[0] += seconds
        await asyncio.sleep(0)

    engine = SimEngine(
        TIMING,
        clock_s=lambda: now_s[0],
        sleep=sleep,
        on_step=lambda batch, step_s: sums.step([step_s] * batch.decoding, batch.kv_tokens),
    )
    streams = [engine.submit(str(n), 100, 11, 0) for n in range(2)]
    runner = asyncio.create_task(engine.run())
    await asyncio.wait_for(asyncio.gather(*(stream.done.wait() for stream in streams)), 20)
    runner.cancel()
    counted = sums.take()
    # Both are prefilled in one step; then ten steps give each a token.
    assert (counted["steps"], counted["step_tokens"]) == (10.0, 20.0)
    assert counted["token_seconds"] / counted["step_tokens"] == pytest.approx(0.022)
    assert counted["kv_token_steps"] / counted["steps"] == pytest.approx(2 * (101 + 110) / 2)


def test_taking_begins_anew_and_a_step_without_decoding_is_none() -> None:
    sums = LawSums()
    sums.step([], 500.0)
    assert sums.take() == dict.fromkeys(COUNTERS, 0.0)
    sums.prefill(600, 0.25)
    assert sums.take()["prefill_tokens"] == 600.0
    assert sums.take()["prefill_tokens"] == 0.0


class Told:
    """What would be handed to Ray."""

    def __init__(self) -> None:
        self.sums = LawSums()
        self.rows: list[dict[str, float]] = []

    def export(self) -> None:
        self.rows.append(self.sums.take())


def test_vllms_iteration_stats_are_counted_once_and_told_once_a_second_or_at_rest() -> None:
    metrics = Told()
    told = metrics.rows
    config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=100, block_size=16))
    logger = LawRecorder(config, cast(LawMetrics, metrics))
    for at_s, running in ((10.0, 2), (10.4, 2), (11.0, 2), (11.1, 0)):
        request = SimpleNamespace(num_prompt_tokens=700, num_cached_tokens=100, prefill_time=0.2)
        stats = SimpleNamespace(
            inter_token_latencies_iter=[0.03, 0.05], finished_requests=[request], iteration_timestamp=at_s
        )
        scheduler = SimpleNamespace(kv_cache_usage=0.5, num_running_reqs=running)
        logger.record(scheduler, stats, mm_cache_stats=None, engine_idx=0)
    logger.record(SimpleNamespace(kv_cache_usage=0.5, num_running_reqs=2), None)
    assert [one["steps"] for one in told] == [1.0, 2.0, 1.0]
    assert told[1]["token_seconds"] == pytest.approx(0.16)
    assert told[1]["kv_token_steps"] == pytest.approx(1600.0)
    assert (told[1]["prefills"], told[1]["prefill_tokens"]) == (2.0, 1200.0)
    assert told[1]["prefill_seconds"] == pytest.approx(0.4)
