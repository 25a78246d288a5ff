"""What a load of fixed concurrency measures on one engine: the law of `serve_apps.timing` closed by Little's law.

Pure; may not do I/O or read a clock. Benchmarks keep C requests of I input and O output tokens in flight. Of them
B = min(C, KV capacity / (I + O/2)) run, each holding I + O/2 tokens on average. A prefill of p seconds delays the B − 1
others once in their life, so a token takes T = t(B) + (B − 1)·p/O. The first token comes after the own prefill, one
mixed step, and its share of the first wave, whose prompts arrive together: C of about ten times C, so each request
waits w·B·p/2 on average with w near 1/10. Where the KV cache binds, C − B requests wait besides, by Little's law
(C/B − 1) stays of p + O·T seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_apps.timing import Timing, decode_step_s, prefill_s

FIRST_WAVE = 0.1  # of a benchmark's requests belong to the wave that begins it


@dataclass(frozen=True, slots=True)
class Law:
    """An engine under a benchmark. `kv_tokens` is the KV capacity in tokens, a real number so that it can be fitted.

    `way_s` is what a request and its first token spend between client and engine, in which the engine does other work.
    """

    timing: Timing
    kv_tokens: float
    first_wave: float = FIRST_WAVE
    way_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` requests in flight on one engine, each of `input_tokens` and `output_tokens`."""

    input_tokens: float
    output_tokens: float
    concurrency: float


def answer(law: Law, load: Load) -> tuple[float, float]:
    """Mean (TTFT, TPOT) in seconds."""
    timing = law.timing
    prefill = prefill_s(timing, load.input_tokens)
    resident = load.input_tokens + load.output_tokens / 2.0
    batch = max(1.0, min(load.concurrency, law.kv_tokens / resident, float(timing.max_num_seqs)))
    step = decode_step_s(timing, batch, batch * resident)
    token = step + (batch - 1.0) * prefill / load.output_tokens
    stay = prefill + load.output_tokens * token
    waited = stay * max(0.0, load.concurrency / batch - 1.0)
    return law.way_s + prefill + step + law.first_wave * batch * prefill / 2.0 + waited, token
