"""The simulated engine keeps vLLM's timing law: driven here by a clock that only the engine's own waits move."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from serve_apps import engine_sim
from serve_apps.batching import Batch, Sequence
from serve_apps.engine_args import parse
from serve_apps.engine_sim import SimEngine, Stream
from serve_apps.timing import Timing, decode_step_s, prefill_s

TIMING = Timing(
    a_s=0.02,
    b_s_per_seq=0.001,
    c_s_per_ktoken=0.002,
    prefill_tps=1000.0,
    prefill_fixed_s=0.01,
    max_num_seqs=4,
    kv_capacity_tokens=10_000,
    max_model_len=4096,
)


class Driver:
    """A batch stepped to the end of its work by hand: no event loop, no clock but its own."""

    def __init__(self, timing: Timing, **kwargs: Any) -> None:
        self.batch = Batch(timing, **kwargs)
        self.now_s = 0.0
        self.peak_running = 0
        self.peak_kv = 0

    def add(self, name: str, input_tokens: int = 100, max_tokens: int = 11, priority: int = 0) -> Sequence:
        one = Sequence(
            request_id=name,
            input_tokens=input_tokens,
            max_tokens=max_tokens,
            priority=priority,
            arrived_at_s=self.now_s,
        )
        self.batch.add(one)
        return one

    def step(self) -> bool:
        duration_s = self.batch.start_step(self.now_s)
        if duration_s is None:
            return False
        self.peak_running = max(self.peak_running, len(self.batch.running))
        self.now_s += duration_s
        self.batch.end_step(self.now_s)
        self.peak_kv = max(self.peak_kv, self.batch.kv_tokens)
        return True

    def run(self) -> None:
        for _ in range(100_000):
            if not self.step():
                return
        raise AssertionError("the engine never comes to rest")


def tpot_s(one: Sequence) -> float:
    assert one.finished_at_s is not None
    assert one.first_token_at_s is not None
    return (one.finished_at_s - one.first_token_at_s) / (one.output_tokens - 1)


def test_a_lone_request_waits_for_its_prefill_and_then_for_one_step_per_token() -> None:
    driver = Driver(TIMING)
    one = driver.add("a", input_tokens=500, max_tokens=11)
    driver.run()
    assert one.first_token_at_s == pytest.approx(prefill_s(TIMING, 500))
    steps = [decode_step_s(TIMING, 1, 500 + made) for made in range(1, 11)]
    assert tpot_s(one) == pytest.approx(sum(steps) / 10)


def test_a_full_batch_is_slower_per_token_by_the_law() -> None:
    driver = Driver(replace(TIMING, c_s_per_ktoken=0.0))
    together = [driver.add(name) for name in "abcd"]
    driver.run()
    for one in together:
        assert tpot_s(one) == pytest.approx(decode_step_s(TIMING, 4, 0))


def test_a_mixture_of_experts_pays_for_the_experts_that_a_batch_touches() -> None:
    timing = replace(TIMING, moe_w_s=0.03, moe_active_fraction=0.25, c_s_per_ktoken=0.0)
    driver = Driver(timing)
    pair = [driver.add("a"), driver.add("b")]
    driver.run()
    assert tpot_s(pair[0]) == pytest.approx(0.02 + 2 * 0.001 + 0.03 * (1 - 0.75**2))


def test_no_more_than_max_num_seqs_run_and_the_rest_wait() -> None:
    driver = Driver(TIMING)
    everyone = [driver.add(str(number)) for number in range(9)]
    driver.run()
    assert driver.peak_running == 4
    assert all(one.output_tokens == 11 for one in everyone)
    assert driver.batch.totals.generation_tokens == 99
    assert driver.batch.totals.prompt_tokens == 900


def test_the_lower_priority_value_is_admitted_first_and_arrival_breaks_ties() -> None:
    driver = Driver(replace(TIMING, max_num_seqs=1))
    low, first, second = (
        driver.add("low", priority=5),
        driver.add("first", priority=1),
        driver.add("second", priority=1),
    )
    driver.run()
    ends = [one.finished_at_s for one in (first, second, low)]
    assert ends == sorted(ends, key=lambda end: end or 0)
    assert first.admitted_at_s == 0.0


def test_a_running_request_is_not_preempted_for_a_batch_slot() -> None:
    driver = Driver(replace(TIMING, max_num_seqs=1))
    low = driver.add("low", priority=9)
    driver.step()
    driver.add("high", priority=0)
    driver.run()
    assert low.preemptions == 0


def test_resident_tokens_never_exceed_the_cache_and_the_least_important_is_preempted() -> None:
    driver = Driver(replace(TIMING, kv_capacity_tokens=1000, max_model_len=1000))
    high = driver.add("high", input_tokens=400, max_tokens=300, priority=0)
    low = driver.add("low", input_tokens=400, max_tokens=300, priority=1)
    driver.run()
    assert driver.peak_kv <= 1000
    assert high.preemptions == 0
    assert low.preemptions >= 1
    assert (high.output_tokens, low.output_tokens) == (300, 300)
    assert driver.batch.totals.preemptions == low.preemptions
    assert driver.batch.totals.prompt_tokens > 800, "a preempted request is prefilled anew"


def test_a_long_prompt_is_prefilled_in_chunks_and_others_decode_meanwhile() -> None:
    driver = Driver(TIMING, step_tokens=500)
    short = driver.add("short", input_tokens=10, max_tokens=50)
    driver.step()
    long = driver.add("long", input_tokens=2000, max_tokens=2)
    before = short.output_tokens
    while long.first_token_at_s is None:
        assert driver.step()
    assert short.output_tokens - before == 5, "four chunks of at most 499 tokens, and the rest"


def test_a_prompt_that_can_never_fit_is_refused_and_a_long_answer_is_cut() -> None:
    driver = Driver(TIMING)
    with pytest.raises(ValueError, match="4096 tokens and this engine holds 4096"):
        driver.add("a", input_tokens=4096)
    assert driver.add("b", input_tokens=4000, max_tokens=1000).max_tokens == 96


def test_an_aborted_request_leaves_at_once_even_within_a_step() -> None:
    driver = Driver(TIMING)
    gone, stays, waits = driver.add("gone", max_tokens=1000), driver.add("stays"), driver.add("waits")
    driver.step()
    assert driver.batch.start_step(driver.now_s) is not None
    driver.batch.abort(gone)
    driver.batch.abort(gone)
    driver.batch.end_step(driver.now_s)
    assert gone not in driver.batch.running
    driver.batch.abort(waits)
    driver.run()
    assert stays.output_tokens == 11
    assert driver.batch.kv_tokens == 0


# ---- the event loop around it
class FakeTime:
    """A clock that moves only when the engine sleeps, at once."""

    def __init__(self, overshoot_s: float = 0.0) -> None:
        self.now_s = 50.0
        self.overshoot_s = overshoot_s

    def clock_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.overshoot_s
        await asyncio.sleep(0)


async def serve(engine: SimEngine, *streams: Stream) -> None:
    runner = asyncio.create_task(engine.run())
    await asyncio.wait_for(asyncio.gather(*(stream.done.wait() for stream in streams)), 20)
    runner.cancel()


async def test_late_wake_ups_do_not_add_up() -> None:
    fake = FakeTime(overshoot_s=0.004)
    engine = SimEngine(TIMING, clock_s=fake.clock_s, sleep=fake.sleep)
    stream = engine.submit("a", 100, 101, 0)
    await serve(engine, stream)
    expected = sum(decode_step_s(TIMING, 1, 100 + made) for made in range(1, 101)) / 100
    assert tpot_s(stream.sequence) == pytest.approx(expected)


async def test_time_scale_divides_every_second_of_the_law() -> None:
    fake = FakeTime()
    engine = SimEngine(TIMING, time_scale=10.0, clock_s=fake.clock_s, sleep=fake.sleep)
    stream = engine.submit("a", 500, 1, 0)
    await serve(engine, stream)
    assert stream.sequence.first_token_at_s == pytest.approx(50.0 + prefill_s(TIMING, 500) / 10)


async def test_finished_requests_are_told_and_withdrawn_ones_are_not() -> None:
    told: list[str] = []
    fake = FakeTime()
    engine = SimEngine(
        TIMING, clock_s=fake.clock_s, sleep=fake.sleep, on_finish=lambda one: told.append(one.request_id)
    )
    keep, drop = engine.submit("keep", 10, 5, 0), engine.submit("drop", 10, 5, 0)
    engine.withdraw(drop)
    await serve(engine, keep)
    assert told == ["keep"]


async def test_pieces_add_up_to_the_same_answer_each_time() -> None:
    answers = []
    for _ in range(2):
        engine = SimEngine(replace(TIMING, a_s=0.002, prefill_fixed_s=0.0))
        runner = asyncio.create_task(engine.run())
        stream = engine.submit("a", 3, 40, 0)
        got = [piece async for piece in engine_sim.pieces(stream, 7, 0.02)]
        runner.cancel()
        assert [piece["finish_reason"] for piece in got] == [None] * (len(got) - 1) + ["length"]
        assert len(got) > 1
        assert got[0]["input_tokens"] == 3
        assert got[-1]["output_tokens"] == 40
        answers.append("".join(piece["text"] for piece in got))
    assert answers[0] == answers[1] == engine_sim.answer(7, 0, 40)
    assert len(answers[0].split()) == 40


def test_prompts_are_counted_in_words_and_text_without_spaces_by_its_bytes() -> None:
    assert engine_sim.count_tokens("three little words") == 3
    assert engine_sim.count_tokens("") == 1
    assert engine_sim.count_tokens("x" * 80) == 10


def test_the_text_comes_from_prompt_or_messages() -> None:
    assert engine_sim.prompt_text({"prompt": "hello"}) == "hello"
    assert engine_sim.prompt_text({"messages": [{"role": "user", "content": "hello"}]}) == "user: hello"
    with pytest.raises(ValueError, match="neither"):
        engine_sim.prompt_text({})


# ---- arguments
ARGS: dict[str, Any] = {
    "service": "ops/chat",
    "variant": "l4",
    "model": "m",
    "timing": {"a_s": 0.02, "b_s_per_seq": 0.001, "c_s_per_ktoken": 0.0, "prefill_tps": 1000.0},
}


def test_limits_beside_the_timing_win() -> None:
    shape = parse(ARGS | {"max_num_seqs": 7}).shape()
    assert (shape.max_num_seqs, shape.max_model_len, shape.a_s) == (7, 131_072, 0.02)


def test_every_wrong_argument_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"ops/chat: .*args.tp.*args.colour"):
        parse(ARGS | {"tp": 0, "colour": "red"})


def test_a_simulated_engine_without_timing_says_so() -> None:
    with pytest.raises(ValueError, match=r"ops/chat: args.timing is missing"):
        engine_sim.build({key: value for key, value in ARGS.items() if key != "timing"})
