"""The world's true engine constants: near the catalogue's, never equal to them, drawn once per seed and variant.

Pure; may not be read by a controller: it learns them from what it observes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from chaos.scenario import Scenario
from serve_apps.timing import Timing

from .timeline import stream


def true_timing(scenario: Scenario, seed: int) -> dict[tuple[str, str], Timing]:
    """True constants by (service, variant): each of the catalogue's × lognormal(σ = `constants_sigma`), median 1."""
    return {
        (shape.service, shape.variant): _drawn(
            shape.timing, scenario.constants_sigma, seed, shape.service, shape.variant
        )
        for shape in scenario.shapes
    }


def _drawn(timing: Timing, sigma: float, seed: int, service: str, variant: str) -> Timing:
    rng = stream(seed, f"constants/{service}/{variant}")
    step, sequence, kv, prefill = (math.exp(sigma * rng.standard_normal()) for _ in range(4))
    return replace(
        timing,
        a_s=timing.a_s * step,
        moe_w_s=timing.moe_w_s * step,
        b_s_per_seq=timing.b_s_per_seq * sequence,
        c_s_per_ktoken=timing.c_s_per_ktoken * kv,
        prefill_tps=timing.prefill_tps / prefill,
        prefill_fixed_s=timing.prefill_fixed_s * prefill,
    )
