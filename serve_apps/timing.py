"""The iteration law of a continuous-batching engine: how long a step takes, and what that means for a request.

Pure arithmetic shared by the capacity model, `engine_sim` and the simulated world. May not import Ray, a clock, or
anything that does I/O.

Source of the law and of its constants: fits to public vLLM silicon measurements (docs/performance.md). A decode step
over B sequences that hold K thousand resident KV tokens takes ``a + b*B + c*K`` seconds; a mixture-of-experts model
adds ``moe_w * (1 - (1 - top_k/experts)**B)`` because a larger batch touches more experts. Prefill of L tokens takes
``prefill_fixed_s + L / prefill_tps``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Constants of one engine shape (model × GPU × TP × precision). Seconds, tokens, tokens per second."""

    a_s: float
    b_s_per_seq: float
    c_s_per_ktoken: float
    prefill_tps: float
    prefill_fixed_s: float = 0.0
    moe_w_s: float = 0.0
    moe_active_fraction: float = 1.0  # experts used per token / experts; 1.0 = dense
    max_num_seqs: int = 256
    kv_capacity_tokens: int = 1_000_000
    max_model_len: int = 131_072


def decode_step_s(timing: Timing, batch: float, kv_tokens: float) -> float:
    """Seconds of one decode step for `batch` sequences holding `kv_tokens` resident KV tokens in all."""
    moe_s = timing.moe_w_s * (1.0 - (1.0 - timing.moe_active_fraction) ** batch) if timing.moe_w_s else 0.0
    return timing.a_s + timing.b_s_per_seq * batch + timing.c_s_per_ktoken * kv_tokens / 1000.0 + moe_s


def prefill_s(timing: Timing, input_tokens: float) -> float:
    """Seconds to prefill `input_tokens` tokens that no prefix cache holds."""
    return timing.prefill_fixed_s + input_tokens / timing.prefill_tps
