"""Time of steps, compiled: the iteration law of `serve_apps.timing`, and its closed form over decode-only steps.

May not decide who takes part. A stretch is a run of steps without prefill, arrival or end of a request: its batch is
constant and its KV grows by one token a sequence and step, so step i (from 0) lasts ``step_s + i * slope_s`` and
n steps last ``n * step_s + slope_s * n * (n - 1) / 2``.
"""

from __future__ import annotations

import math
from typing import Any

from serve_apps import timing

from .jit import jit

decode_step_s = jit(timing.decode_step_s)


@jit
def begin_stretch(replica: Any, now_s: float) -> None:
    """Set the durations of the decode-only steps that begin now."""
    replica.begin_s = now_s
    replica.step_s = replica.slowdown * decode_step_s(replica, replica.decoding, replica.kv_decoding)
    replica.slope_s = replica.slowdown * replica.c_s_per_ktoken * replica.decoding / 1000.0


@jit
def stretch_s(replica: Any, steps: int) -> float:
    """Seconds of the stretch's first `steps` steps."""
    return steps * (replica.step_s + 0.5 * (steps - 1) * replica.slope_s)


@jit
def steps_until(replica: Any, span_s: float) -> int:
    """The least number of steps, at least 1, that last `span_s` or longer."""
    half = 0.5 * replica.slope_s
    first = replica.step_s - half
    steps = max(1, math.ceil(2.0 * span_s / (first + math.sqrt(first * first + 4.0 * half * span_s))))
    while steps > 1 and stretch_s(replica, steps - 1) >= span_s:
        steps -= 1
    while stretch_s(replica, steps) < span_s:
        steps += 1
    return steps
