"""What one replica of a shape carries within a service's SLO.

Pure; may not do I/O or read a clock. With B sequences in the batch, a decode step of t_d(B) seconds and p seconds of
prefill a request, requests of O output tokens flow at B / (O·t_d + B·p) per second and each token then takes
t_d + B·p/O seconds: the largest B whose token time, end-to-end time and KV need stay within their limits sets the
capacity, of which `UTILISATION` is planned for (queueing head-room by goal; docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.model import Goal, Slo
from serve_apps.timing import Timing, decode_step_s, prefill_s

from .reasons import Reason, ReasonCode, why

UTILISATION: dict[Goal, float] = {"latency": 0.7, "throughput": 0.85, "cost": 0.9}
KV_FILL = 0.8
# A service nobody has called yet: the mean request of the Azure 2023 conversation trace (about 1,150 in, 210 out) is
# too long for a small context, so it is bounded by a quarter of the model's own limit.
PRIOR_INPUT_TOKENS = 1150.0
PRIOR_OUTPUT_TOKENS = 210.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Mean tokens of a request."""

    input_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Requests per second one replica is planned to carry, the batch that allows, and why."""

    rps: float
    batch: int
    reasons: tuple[Reason, ...]


def mix_or_prior(input_tokens: float, output_tokens: float, timing: Timing) -> Mix:
    """The observed mix, or the prior where nothing was observed yet. Never below one token."""
    longest = timing.max_model_len / 4.0
    return Mix(
        input_tokens=max(1.0, input_tokens or min(PRIOR_INPUT_TOKENS, longest)),
        output_tokens=max(1.0, output_tokens or min(PRIOR_OUTPUT_TOKENS, longest)),
    )


def capacity(timing: Timing, mix: Mix, slo: Slo, goal: Goal) -> Capacity:
    """The planned load of one replica. An SLO below the hardware's floor is reported and planned at batch 1."""
    prefill = prefill_s(timing, mix.input_tokens)
    largest = max(1, _kv_batch(timing, mix))
    batch = _largest_batch(timing, mix, slo, prefill, largest)
    reasons: tuple[Reason, ...] = ()
    if batch == 0:
        batch = 1
        reasons = (_unreachable(timing, mix, slo, prefill),)
    step = decode_step_s(timing, batch, batch * _resident(mix))
    rps = UTILISATION[goal] * batch / (mix.output_tokens * step + batch * prefill)
    figure = why(ReasonCode.CAPACITY_PER_REPLICA, rps=rps, batch=batch, utilisation=UTILISATION[goal])
    return Capacity(rps=rps, batch=batch, reasons=(figure, *reasons))


def _resident(mix: Mix) -> float:
    """KV tokens a request holds on average: its input and half of its output."""
    return mix.input_tokens + mix.output_tokens / 2.0


def _kv_batch(timing: Timing, mix: Mix) -> int:
    return min(timing.max_num_seqs, int(KV_FILL * timing.kv_capacity_tokens / (mix.input_tokens + mix.output_tokens)))


def _largest_batch(timing: Timing, mix: Mix, slo: Slo, prefill: float, largest: int) -> int:
    """Bisection: token time grows with the batch. 0 when even one request alone misses a limit."""
    low, high = 0, largest
    while low < high:
        middle = (low + high + 1) // 2
        if _within(timing, mix, slo, prefill, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _within(timing: Timing, mix: Mix, slo: Slo, prefill: float, batch: int) -> bool:
    tpot = _tpot_s(timing, mix, prefill, batch)
    limits = (
        (slo.ttft_s, prefill),
        (slo.tpot_s, tpot if mix.output_tokens >= 2.0 else 0.0),
        (slo.e2e_s, prefill + mix.output_tokens * tpot),
        (slo.deadline_s, prefill + mix.output_tokens * tpot),
    )
    return all(limit is None or value <= limit for limit, value in limits)


def _tpot_s(timing: Timing, mix: Mix, prefill: float, batch: int) -> float:
    return decode_step_s(timing, batch, batch * _resident(mix)) + batch * prefill / mix.output_tokens


def _unreachable(timing: Timing, mix: Mix, slo: Slo, prefill: float) -> Reason:
    """The first limit that one request alone on the replica misses, with the floor it meets."""
    tpot = _tpot_s(timing, mix, prefill, 1)
    whole = prefill + mix.output_tokens * tpot
    rows = (("ttft_s", slo.ttft_s, prefill), ("tpot_s", slo.tpot_s, tpot), ("e2e_s", slo.e2e_s, whole))
    for name, limit, floor in rows:
        if limit is not None and floor > limit:
            return why(ReasonCode.UNREACHABLE_SLO, name, floor_s=floor, limit_s=limit)
    return why(ReasonCode.UNREACHABLE_SLO, "deadline_s", floor_s=whole, limit_s=slo.deadline_s or 0.0)
