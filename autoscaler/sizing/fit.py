"""Fits the iteration law of one engine to what a benchmark measured on it. Pure; may not do I/O or read a clock.

Maximum a posteriori in the logarithms of the constants: relative errors of TPOT and TTFT under a loss that grows only
linearly for outliers (an odd run must not bend the law), and the prior of the shape's catalogue entry or roofline, so
that a constant which the rows do not show stays where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_apps.timing import Timing

from .closed_loop import FIRST_WAVE, Law, Load, answer

Floats = npt.NDArray[np.float64]

# Relative errors to expect of one row, and of the prior's constants (standard deviations of logarithms): the roofline
# has a step right within a factor of two, memory for KV within 15 % (docs/performance.md).
TPOT_ERROR = 0.03
TTFT_ERROR = 0.05
PRIOR_SD = {
    "a_s": 0.7,
    "b_s_per_seq": 1.0,
    "c_s_per_ktoken": 0.5,
    "moe_w_s": 0.7,
    "prefill_fixed_s": 1.0,
    "prefill_tps": 0.5,
    "kv_tokens": 0.15,
    "first_wave": 0.3,
    "way_s": 1.0,
}
OPTIONAL = ("moe_w_s", "way_s")  # fitted where the prior has any
OF_LAW = ("kv_tokens", "first_wave", "way_s")  # the others are of its timing
PREFILL_FIXED_PRIOR_S = 0.02  # scheduling, sampling and the way to the client; the catalogue counts it to the step
LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class Point:
    """One measured row: seconds; a figure that was not measured is None."""

    load: Load
    ttft_s: float | None
    tpot_s: float | None


def prior_law(timing: Timing) -> Law:
    """The law of a shape nobody has measured."""
    fixed = timing.prefill_fixed_s or PREFILL_FIXED_PRIOR_S
    return Law(replace(timing, prefill_fixed_s=fixed), float(max(1, timing.kv_capacity_tokens)), FIRST_WAVE)


def fit(points: Sequence[Point], prior: Law, doubt: float = 1.0) -> Law:
    """The law that explains `points` best. Rows with more requests than the engine runs at a time are left out: what
    they measured depends on how the benchmark was stopped. Without points the prior itself. `doubt` widens the prior.
    """
    used = [point for point in points if point.load.concurrency <= prior.timing.max_num_seqs]
    if not used:
        return prior
    from scipy.optimize import least_squares

    names = tuple(name for name in PRIOR_SD if name not in OPTIONAL or _value(prior, name) > 0.0)
    start = np.array([log(max(_value(prior, name), LEAST)) for name in names])
    spread = doubt * np.array([PRIOR_SD[name] for name in names])

    def residuals(theta: Floats) -> Floats:
        law = _law(prior, names, theta)
        misses = [miss for point in used for miss in _misses(law, point)]
        return np.concatenate([np.array(misses), (theta - start) / spread])

    found = least_squares(residuals, start, loss="soft_l1", max_nfev=200)
    return _law(prior, names, found.x)


def _misses(law: Law, point: Point) -> list[float]:
    """Relative errors in units of those to expect. Time in a queue says little of the law: it weighs a fifth."""
    ttft, tpot = answer(law, point.load)
    misses = []
    if point.tpot_s is not None:
        misses.append(log(tpot / point.tpot_s) / TPOT_ERROR)
    if point.ttft_s is not None:
        bound = point.load.concurrency * (point.load.input_tokens + point.load.output_tokens / 2.0) > law.kv_tokens
        misses.append(log(ttft / point.ttft_s) / TTFT_ERROR * (0.2 if bound else 1.0))
    return misses


def _value(law: Law, name: str) -> float:
    return float(getattr(law if name in OF_LAW else law.timing, name))


def _law(prior: Law, names: tuple[str, ...], theta: Floats) -> Law:
    values = {name: exp(value) for name, value in zip(names, theta, strict=True)}
    own: dict[str, Any] = {name: values.pop(name) for name in OF_LAW if name in values}
    return replace(prior, timing=with_constants(prior.timing, values), **own)


def with_constants(timing: Timing, values: Mapping[str, float]) -> Timing:
    """The timing with these constants in place of its own."""
    whole: dict[str, Any] = dict(values)
    return replace(timing, **whole)
