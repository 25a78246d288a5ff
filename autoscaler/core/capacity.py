"""What one replica of a shape carries so that the SLO's fraction of requests is inside every limit.

Pure; may not do I/O or read a clock. All sizes are per replica; `pool` replicas share one gateway.

With B sequences in the batch a decode step lasts t(B), and a request of O tokens that needs p seconds of prefill leaves
the engine at rate μ(B) = B / (O·t(B) + B·p). Prefills take ρ = λ·p of the time, so a token takes T = t / (1 − ρ). Three
things make single requests miss although the mean does not:

- the batch fluctuates: processor sharing with a state-dependent rate has variance λ/μ'(B) about its mean, whatever the
  distribution of work, divided by the pool over which the gateway levels it; a request of length L sees its average
  over L, which keeps the share 2(x − 1 + e^−x)/x² of it, x = L·μ'(B);
- prefills come in lumps: tokens of one request are stretched by busy periods, whose variance over o tokens is
  λ·p²·(cv² + 1/pool)·T / (o·(1 − ρ)²) (delay busy period of M/G/1; a levelled stream is more regular than Poisson);
- all slots may be taken: the wait then exceeds w with probability exp(−pool·(μ(slots) − λ)·w). Where they are few, a
  normal tail underrates how often that is, and the birth-death chain with rates λ and pool·μ(n/pool) is summed instead.

Arrivals that vary more than Poisson (Ca > 1, Gamma gaps) come in company: around a request there are Ca² − 1 more than
by Poisson, half of them before it. So the number in an infinite server has the peakedness z = 1/(1 − φ(μ)) − λ/μ
(Gamma gaps, exponential stays; more for stays that are more regular), a request finds z − 1 mates and is joined by as
many, their numbers geometric; a queue empties z times as slowly, and a prompt finds others ahead of it as in G/M/1. A
pool shares the mates out. Where a company is too large for the limits whatever the load, the floor is reported.

Against the request-level engine: docs/performance.md, tests/simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from policies.model import Goal, Slo
from serve_apps.batching import STEP_TOKENS
from serve_apps.timing import Timing, decode_step_s, prefill_s

from .reasons import Reason, ReasonCode, why

# Of the misses that the objective allows, the share that a steady load may spend: the rest is for what is not steady.
STEADY_SHARE: dict[Goal, float] = {"latency": 0.5, "throughput": 0.7, "cost": 0.9}
FULL_MISSES = 0.2  # of what runs while every slot is taken: fewer slots would make requests wait that need not
SAFETY = 0.95  # so that four of five predictions err on the safe side (tests/simulation)
MOST_LOAD = 0.95  # of what a full batch delivers; above it queues do not end
KV_FILL = 0.8  # of the cache in use by engines; beyond it their own preemptions begin
POOL_MOST = 16
# A service nobody has called yet: the mean request of the Azure 2023 conversation trace (about 1,150 in, 210 out) is
# too long for a small context, so it is bounded by a quarter of the model's own limit. Lengths vary as there (lognormal
# by p99/p50: 4142/1020 in, 601/129 out).
PRIOR_INPUT_TOKENS = 1150.0
PRIOR_OUTPUT_TOKENS = 210.0
INPUT_CV = 0.66
OUTPUT_CV = 0.74
GRID = math.log(1.03)  # figures that differ by less are the same question
FEWEST = 0.01  # sequences in a mean batch: a load below it is none
FEW_SLOTS = 32  # of a pool: below it the chain is summed
QUANTILES = tuple(NormalDist().inv_cdf((2 * n + 1) / 16) for n in range(8))
HALVINGS = 12  # of a batch of some hundred and of a hundredth: to .3 %
FIXED_POINT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Mean tokens of a request and their coefficients of variation (lengths are lognormal); that of the gaps between
    requests (1: Poisson); the share of input tokens that prefix caches hold, which take room but no prefill.
    """

    input_tokens: float
    output_tokens: float
    input_cv: float = INPUT_CV
    output_cv: float = OUTPUT_CV
    arrival_cv: float = 1.0
    prefix_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Requests per second one replica is planned to carry, the requests it may run at a time, and why."""

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


def capacity(timing: Timing, mix: Mix, slo: Slo, goal: Goal, pool: int = 1) -> Capacity:
    """The planned load of one replica of `pool`. Limits that the hardware cannot meet are reported, not chased."""
    return _capacity(_coarse_timing(timing), _coarse_mix(mix), slo, goal, min(max(pool, 1), POOL_MOST))


def capacity_at(timing: Timing, mix: Mix, slo: Slo, goal: Goal, rps: float) -> Capacity:
    """The planned load of one of the replicas that share `rps`: as many as carry it and meet the limits, together.

    The fewer share a gateway, the less each carries: what few of them carry says how many it takes at most.
    """
    timing, mix = _coarse_timing(timing), _coarse_mix(mix)
    pool = max(1, min(POOL_MOST, math.ceil(rps / _most_rps(timing, mix))))
    while True:
        found = _capacity(timing, mix, slo, goal, pool)
        met = all(reason.subject != BURSTS for reason in found.reasons)
        needed = min(math.ceil(rps / found.rps) if met else 2 * pool, POOL_MOST)
        if needed <= pool:
            return found
        pool = needed


@lru_cache(maxsize=8192)
def _most_rps(timing: Timing, mix: Mix) -> float:
    """Requests per second of a replica that is as full as can be."""
    full = _Load(timing, mix, Slo(), 1)
    return full.rate(full.most)


@lru_cache(maxsize=8192)
def _capacity(timing: Timing, mix: Mix, slo: Slo, goal: Goal, pool: int) -> Capacity:
    alone = _unreachable(timing, mix, slo)
    if alone is not None:
        return _made(_Load(timing, mix, slo, pool), 1.0, 1, pool, (alone,))
    load = _Load(timing, replace(mix, arrival_cv=1.0), slo, pool)  # how many may run is no matter of when they come
    allowed = 1.0 - slo.fraction
    floor = load.missed(TINY, math.inf, fluctuating=False)
    reasons: tuple[Reason, ...] = ()
    if floor > allowed:
        reasons = (why(ReasonCode.UNREACHABLE_SLO, "fraction", floor=1.0 - floor, limit=slo.fraction),)
    full = _largest(load, load.most, math.inf, max(allowed, FULL_MISSES) + floor, fluctuating=False)
    slots = max(1, int(full))
    spent = STEADY_SHARE[goal] * allowed + floor
    load = _Load(timing, mix, slo, pool)
    least = load.missed(FEWEST, float(slots), fluctuating=True) if load.bursts > 1.0 else 0.0
    if least > spent:
        reasons = (*reasons, why(ReasonCode.UNREACHABLE_SLO, BURSTS, floor=1.0 - least, limit=slo.fraction))
        spent += least
    batch = _largest(load, float(slots), float(slots), spent, fluctuating=True)
    return _made(load, batch, slots, pool, reasons)


TINY = 1e-3
BURSTS = "bursts"  # what makes an SLO unreachable: company too large, which a larger pool would share out


def _made(load: _Load, batch: float, slots: int, pool: int, reasons: tuple[Reason, ...]) -> Capacity:
    rps = SAFETY * min(load.rate(batch), MOST_LOAD * load.rate(slots))
    numbers = {"rps": rps, "slots": slots, "batch": batch, "pool": pool, "arrival_cv": load.mix.arrival_cv}
    figure = why(ReasonCode.CAPACITY_PER_REPLICA, **numbers)
    return Capacity(rps=rps, batch=slots, reasons=(figure, *reasons))


class _Load:
    """One replica's shape and mix; the methods ask what a mean batch of `batch` sequences means for requests."""

    def __init__(self, timing: Timing, mix: Mix, slo: Slo, pool: int) -> None:
        self.timing, self.mix, self.slo, self.pool = timing, mix, slo, pool
        computed = 1.0 - mix.prefix_share
        self.prefill_s = prefill_s(timing, computed * mix.input_tokens)
        # Long answers stay longer: half of the size-biased mean is what is resident of an output.
        self.resident = mix.input_tokens + mix.output_tokens * (1.0 + mix.output_cv**2) / 2.0
        self.outputs = _lognormal(mix.output_tokens, mix.output_cv)
        self.inputs = _lognormal(computed * mix.input_tokens, mix.input_cv)
        kv = KV_FILL * timing.kv_capacity_tokens / self.resident
        self.most = max(1.0, min(float(timing.max_num_seqs), kv))
        self.bursts = max(1.0, mix.arrival_cv**2)  # Ca² of the service's stream
        # Twice the mean of the shorter of two stays over that of one: 1 when exponential. Mates leave the later.
        self.regular = 4.0 * NormalDist().cdf(-math.sqrt(math.log1p(mix.output_cv**2) / 2.0))
        self.chain: dict[float, tuple[float, ...]] = {}

    def step_s(self, batch: float) -> float:
        """Seconds of a decode step."""
        return decode_step_s(self.timing, batch, batch * self.resident)

    def rate(self, batch: float) -> float:
        """Requests per second that leave a batch kept at this size."""
        return batch / (self.mix.output_tokens * self.step_s(batch) + batch * self.prefill_s)

    def missed(self, batch: float, slots: float, *, fluctuating: bool) -> float:
        """Fraction of requests outside some limit at a load whose mean batch this is."""
        rps = self.rate(batch)
        busy = rps * self.prefill_s
        token_s = self.step_s(batch) / (1.0 - busy)
        near = max(TINY, 0.02 * batch)
        below = max(batch - near, TINY / 2)
        slope = max((self.rate(batch + near) - self.rate(below)) / (batch + near - below), 1e-9)
        sharper = (self.step_s(batch + near) - self.step_s(batch)) / near / (1.0 - busy)
        peaked = self._peaked(batch) if fluctuating else 1.0
        variance = (1.0 + self.regular * (peaked - 1.0)) * rps / slope / self.pool if fluctuating else 0.0
        variance = min(variance, batch * batch + peaked - 1.0)
        vary = self.mix.input_cv**2 + (2.0 * peaked - 1.0) / self.pool
        lumps = rps * self.prefill_s**2 * vary * token_s / (1.0 - busy) ** 2
        waited = self._waited(batch, slots, variance, rps, token_s, peaked)
        slow = self._slow(token_s, sharper, variance, slope, lumps, peaked, slots)
        return 1.0 - (1.0 - waited) * (1.0 - self._late_first(busy, token_s)) * (1.0 - slow)

    def _peaked(self, batch: float) -> float:
        """Variance over mean of the number in an infinite server with Gamma gaps and exponential stays."""
        if self.bursts == 1.0:
            return 1.0
        offered = batch * self.pool
        stay = math.pow(1.0 + self.bursts / offered, -1.0 / self.bursts)
        return max(1.0, 1.0 / (1.0 - stay) - offered)

    def _waited(self, batch: float, slots: float, variance: float, rps: float, token_s: float, peaked: float) -> float:
        """For a slot, longer than the limits leave."""
        slo = self.slo
        whole = self.mix.output_tokens * token_s
        rows = ((slo.ttft_s, token_s), (slo.e2e_s, whole), (slo.deadline_s, whole))
        slack = min((limit - self.prefill_s - needed for limit, needed in rows if limit is not None), default=math.inf)
        if variance <= 0.0 or math.isinf(slack):
            return 0.0
        if slots * self.pool <= FEW_SLOTS:
            full = self._all_taken(slots, rps, peaked)
        elif peaked == 1.0:
            full = 0.5 * math.erfc((slots + 0.5 - batch) / math.sqrt(2.0 * variance))
        else:
            mates = (peaked - 1.0) / self.pool
            full = _above(batch + mates, variance + mates * (mates + 1.0 / self.pool), slots + 0.5)
        freed = self.pool * max(0.0, self.rate(slots) - rps) / (2.0 * peaked - 1.0)
        return full * math.exp(-freed * max(0.0, slack))

    def _all_taken(self, slots: float, rps: float, peaked: float) -> float:
        """P(an arrival finds no slot of the pool free).

        The chain loses what the batch lets go, and gains `rps` a replica where arrivals are Poisson; else the more, the
        more there are (Delbrouck's linear arrival rates).
        """
        if slots not in self.chain:
            places = range(round(slots * self.pool) + 1)
            self.chain[slots] = tuple(self.rate(n / self.pool) for n in places)
        leaving = self.chain[slots]
        if rps >= leaving[-1]:
            return 1.0
        coming = [rps / peaked + (1.0 - 1.0 / peaked) * rate for rate in leaving]
        weight, seen = 1.0, coming[0]
        for before, rate, now in zip(coming, leaving[1:], coming[1:], strict=False):
            weight *= before / rate
            seen += weight * now
        last = weight * coming[-1]
        beyond = last / (1.0 - coming[-1] / leaving[-1])
        return beyond / (seen - last + beyond)

    def _late_first(self, busy: float, token_s: float) -> float:
        """First token too late: the own prompt, a step, and the prompts before it (M/G/1, exponential tail)."""
        limit = self.slo.ttft_s
        if limit is None:
            return 0.0
        near = max(1.0, self.bursts / self.pool)
        found = _found(busy, near)
        decay = (1.0 - found) / self.prefill_s * (1.0 + near) / (near + self.mix.input_cv**2)
        # Mates that come just after share a step, and their first tokens come with its end.
        behind = (1.0 - 1.0 / near) * decay
        step_s = STEP_TOKENS / self.timing.prefill_tps
        late = 0.0
        for tokens in self.inputs:
            slack = limit - prefill_s(self.timing, tokens) - token_s
            late += 1.0 if slack <= 0.0 else found * math.exp(-slack * decay) * (1.0 + behind * min(slack, step_s))
        long = _above(self.prefill_s, (self.prefill_s * self.mix.input_cv) ** 2, limit - token_s)
        return max(late / len(self.inputs), long)

    def _slow(
        self, token_s: float, sharper: float, of_batch: float, slope: float, lumps: float, peaked: float, slots: float
    ) -> float:
        """Tokens too slow, or the last one too late: whichever limit more requests miss."""
        tpot, whole = self.slo.tpot_s, _least(self.slo.e2e_s, self.slo.deadline_s)
        company, beside = self.regular * (peaked - 1.0), (slots - 1.0) / 2.0
        mates = min(company / self.pool, beside)  # who came just after, on this replica; as many came just before
        spread = min(company * (1.0 + company) / self.pool**2, beside**2)
        together = min(1.0, (2.0 * peaked - 1.0) / self.pool)
        slow = late = 0.0
        for tokens in self.outputs:
            after_first = max(tokens - 1.0, 1.0)
            stay = max(after_first * token_s * slope, TINY)
            there = (1.0 - math.exp(-stay)) / stay  # of the stay, as long as what was there at its beginning
            levelled = sharper**2 * 2.0 * (of_batch * (1.0 - there) / stay + spread * there**2)
            lumped = lumps / after_first + spread * (self.prefill_s / after_first) ** 2
            mean = token_s + mates * (sharper * 2.0 * there + self.prefill_s / after_first)
            # On one replica the batch is large just when prefills come; over a pool the two have little in common.
            variance = levelled + lumped + 2.0 * math.sqrt(levelled * lumped) * together
            if tpot is not None and tokens >= 2.0:
                slow += _above(mean, variance, tpot)
            if whole is not None:
                late += _above(after_first * mean, after_first**2 * variance, whole - self.prefill_s - token_s)
        return max(slow, late) / len(self.outputs)


def _found(used: float, bursts: float) -> float:
    """The share of arrivals that find a server at work that is used so much: σ of G/M/1 with Gamma gaps."""
    if bursts == 1.0 or used >= 1.0:
        return min(used, 1.0)
    share = used
    for _ in range(FIXED_POINT):
        share = math.pow(1.0 + bursts * (1.0 - share) / used, -1.0 / bursts)
    return share


def _largest(load: _Load, most: float, slots: float, spent: float, *, fluctuating: bool) -> float:
    """The largest mean batch up to `most` of whose requests no more than `spent` miss; at least a tenth."""
    if load.missed(most, slots, fluctuating=fluctuating) <= spent:
        return most
    low, high = FEWEST, most
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        if load.missed(middle, slots, fluctuating=fluctuating) <= spent:
            low = middle
        else:
            high = middle
    return low


def _lognormal(mean: float, cv: float) -> tuple[float, ...]:
    sigma = math.sqrt(math.log1p(cv * cv))
    return tuple(mean * math.exp(sigma * z - sigma * sigma / 2.0) for z in QUANTILES)


def _above(mean: float, variance: float, limit: float) -> float:
    """P(X > limit) of a lognormal X with these moments."""
    if limit <= 0.0:
        return 1.0
    spread = math.log1p(variance / (mean * mean))
    if spread < 1e-12:
        return float(mean > limit)
    return 0.5 * math.erfc((math.log(limit / mean) + spread / 2.0) / math.sqrt(2.0 * spread))


def _least(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _coarse(value: float) -> float:
    return math.exp(round(math.log(value) / GRID) * GRID) if value > 0.0 else value


@lru_cache(maxsize=1024)  # what was learnt reaches decisions in steps, so few ever are asked for
def _coarse_timing(timing: Timing) -> Timing:
    return replace(
        timing,
        a_s=_coarse(timing.a_s),
        b_s_per_seq=_coarse(timing.b_s_per_seq),
        c_s_per_ktoken=_coarse(timing.c_s_per_ktoken),
        prefill_tps=_coarse(timing.prefill_tps),
        prefill_fixed_s=_coarse(timing.prefill_fixed_s),
        moe_w_s=_coarse(timing.moe_w_s),
    )


def _coarse_mix(mix: Mix) -> Mix:
    return replace(mix, input_tokens=_coarse(mix.input_tokens), output_tokens=_coarse(mix.output_tokens))


def _unreachable(timing: Timing, mix: Mix, slo: Slo) -> Reason | None:
    """The first limit that the mean request alone on the replica misses, with the floor it meets."""
    prefill = prefill_s(timing, (1.0 - mix.prefix_share) * mix.input_tokens)
    step = decode_step_s(timing, 1, mix.input_tokens + mix.output_tokens / 2.0)
    tpot = step + prefill / mix.output_tokens
    whole = prefill + mix.output_tokens * tpot
    rows = (
        ("ttft_s", slo.ttft_s, prefill),
        ("tpot_s", slo.tpot_s if mix.output_tokens >= 2.0 else None, step),
        ("e2e_s", slo.e2e_s, whole),
        ("deadline_s", slo.deadline_s, whole),
    )
    for name, limit, floor in rows:
        if limit is not None and floor > limit:
            return why(ReasonCode.UNREACHABLE_SLO, name, floor_s=floor, limit_s=limit)
    return None
