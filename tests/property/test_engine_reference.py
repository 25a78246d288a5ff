"""The engine against `serve_apps.batching.Batch` driven step by step: the same tokens at the same times."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.engine import Engine
from serve_apps.batching import Batch, Sequence
from serve_apps.timing import Timing
from tests.engine_scene import engine, rows


@dataclass(frozen=True)
class Case:
    timing: Timing
    slowdown: float
    at_s: list[float]
    inputs: list[int]
    outputs: list[int]
    prefix: int


class PrefixBatch(Batch):
    """A batch whose prompts begin with `prefix` cached tokens."""

    prefix = 0

    def _admit(self, now_s: float) -> None:
        before = len(self.running)
        super()._admit(now_s)
        for one in self.running[before:]:
            one.to_prefill = max(1, one.to_prefill - self.prefix)


def reference(case: Case) -> tuple[list[float], list[float], int]:
    """Instants of first tokens, of ends, and preemptions."""
    batch = PrefixBatch(case.timing)
    batch.prefix = case.prefix
    todo = [
        Sequence(request_id=str(i), input_tokens=n, max_tokens=out, arrived_at_s=at_s)
        for i, (at_s, n, out) in enumerate(zip(case.at_s, case.inputs, case.outputs, strict=True))
    ]
    every = list(todo)
    now_s = 0.0
    while todo or batch.running or batch.waiting:
        while todo and todo[0].arrived_at_s <= now_s:
            batch.add(todo.pop(0))
        step_s = batch.start_step(now_s)
        if step_s is None:
            now_s = todo[0].arrived_at_s
            continue
        now_s += case.slowdown * step_s
        batch.end_step(now_s)
    firsts = sorted(one.first_token_at_s or math.nan for one in every)
    return firsts, sorted(one.finished_at_s or math.nan for one in every), batch.totals.preemptions


def engine_of(case: Case) -> tuple[Engine, int]:
    made = engine(rows(case.at_s, case.inputs, case.outputs, case.prefix))
    return made, made.add_replica(0, 0, case.timing, slowdown=case.slowdown, slots=1000)


def simulated(case: Case) -> tuple[list[float], list[float], int]:
    """The same of the engine, which is run from event to event so that the instants can be seen."""
    made, replica = engine_of(case)
    made.advance(0.0)
    firsts: list[float] = []
    ends: list[float] = []
    instants = [*case.at_s, math.inf]
    while len(ends) < len(case.at_s):
        next_s = float(made._memory["event_s"][replica])
        while instants[0] <= made.now_s:
            instants.pop(0)
        made.advance(min(next_s, instants[0]))
        seen = made.replica_windows([replica])[0].samples
        firsts += [made.now_s] * seen
        ends += [made.now_s] * (made.totals(0).finished - len(ends))
    return firsts, ends, made.totals(0).preemptions


timings = st.builds(
    Timing,
    a_s=st.floats(0.001, 0.05),
    b_s_per_seq=st.floats(0, 0.001),
    c_s_per_ktoken=st.floats(0, 0.01),
    prefill_tps=st.floats(1000, 50_000),
    prefill_fixed_s=st.just(0.0),
    moe_w_s=st.sampled_from([0.0, 0.02]),
    moe_active_fraction=st.sampled_from([0.06, 1.0]),
    max_num_seqs=st.integers(1, 12),
    kv_capacity_tokens=st.sampled_from([600, 1500, 4000, 30_000]),
    max_model_len=st.just(20_000),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    timing = draw(timings)
    count = draw(st.integers(1, 25))
    gaps = draw(st.lists(st.one_of(st.just(0.0), st.floats(0, 3)), min_size=count, max_size=count))
    # An arrival in the very instant of a step's end is seen by it or not as the sums of durations are rounded: pi keeps
    # arrivals off the grid of durations, which are all decimal.
    at_s = (np.cumsum(gaps) * np.pi / 3).tolist()
    longest = min(timing.kv_capacity_tokens, timing.max_model_len) - 2
    prefix = draw(st.sampled_from([0, 0, 50, 700]))
    if prefix == 0:  # Batch knows no prefix: with one it could not tell a prompt's first chunk, which costs this
        timing = replace(timing, prefill_fixed_s=draw(st.sampled_from([0.0, 0.013])))
    return Case(
        timing=timing,
        slowdown=draw(st.sampled_from([1.0, 1.5])),
        at_s=at_s,
        inputs=draw(st.lists(st.integers(1, longest), min_size=count, max_size=count)),
        outputs=draw(st.lists(st.integers(1, 400), min_size=count, max_size=count)),
        prefix=prefix,
    )


@settings(max_examples=200, deadline=None)
@given(cases())
def test_tokens_come_when_the_batch_gives_them(case: Case) -> None:
    firsts, ends, preemptions = reference(case)
    seen_firsts, seen_ends, seen_preemptions = simulated(case)
    np.testing.assert_allclose(seen_firsts, firsts, rtol=1e-9)
    np.testing.assert_allclose(seen_ends, ends, rtol=1e-9)
    assert seen_preemptions == preemptions
