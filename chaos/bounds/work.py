"""The least replica time that a request can take if its limits are met: the first half of the bound LB1.

Pure; may not do I/O, read a clock or draw a random number. `least_work` gives every request a number of seconds w such
that **whatever the gateway, the engine's scheduler and the other requests do, the replicas of a variant are busy for at
least the sum of w over the requests whose limits they met**, weighted with the price of replica time where that
changes. Nothing here is fitted, so nothing can be too large.

Argument. A step of an engine takes d = A(B) + S(B)·K + prefill (`serve_apps.timing`): B sequences decode, hold K
tokens of KV, and A and S do not fall with B (where they would, their least value from B on is taken). Prompts are
prefilled in order, at most `STEP_TOKENS` in one step. Count of the B only the m requests of the first class (7; all
that meet their limits, where there is no 7), with KV K_m ≤ K: d ≥ D + prefill, D = A(m) + S(m)·K_m.

1. Prefill. A request's prompt, less what the prefix cache holds, is computed for it alone: p = fixed + tokens / rate.
2. Sharing. D is split: each of the m gets A(m)/m + S(m)·κ, κ being its own KV tokens. The engine runs at most M =
   `max_num_seqs` sequences, and no more can run beside a request than are alive while it is (its company), so m is at
   most the lesser of the two.
3. KV. K_m ≤ C, the engine's cache, so for any ν ≥ 0 adding ν·(K_m − C) ≤ 0 keeps the bound: ν·(κ − C/m) each. This is
   where long contexts cannot be batched.
4. TPOT. A request of n + 1 tokens takes n decode steps, of T_i on average at most (the limit, or what the end-to-end
   limit leaves), so for any ρ ≥ 0 adding ρ·Σ(d − T_i) over its steps keeps the bound. In one step that is at least
   ρ·(m·D − ΣT_i), or ρ·(A(m) + S(m)·m·κ − T_i) each. So large batches cost.
5. Pace. While a request decodes there is a step every T_i, and each costs A whatever else is done. Of the first class's
   requests on a replica take a chain: the first to get its first token, then the first to get its first token after the
   one before has ended, and so on. Their decoding does not overlap. Between two of the chain no other prompt is
   finished, so all prompts of the class are prefilled while a member of the chain decodes, except the members' own
   and what fits into the step of their first tokens, q = STEP_TOKENS / rate. A member lasts for n·T_i at most. So
   Σ p ≤ Σ over the chain's steps of (T' − D), for any T' ≥ T_i + (p_i + q)/n_i of the whole class. For any μ ≥ 0 adding
   μ times the difference keeps the bound: prompts count (1 + μ)·p, and a step min(D, D − μ·(T' − D)), which is concave
   in K_m, so that a share of 1/m of it at K = m·κ each is less than the whole.
6. A request's steps are at most its own; in each, m is free: the least over m is taken, step by step. That least is a
   least of functions linear in κ, so it is concave in κ: over the steps (κ grows by one a step) it is at least the mean
   of its values at both ends, and between knots at least the chord. Both are used.
7. Classes and prices. Steps of one period cost the same. 4 and 5 compare different steps, so they are used only for
   the first class: requests that live within one period (`inside`) and keep T' in 5. Any other gets p and n·(least
   growth of A + S·κ), which is what it adds to a batch of the first class. Or ρ = μ = 0 and one class for all, which
   holds whatever the prices (then ν ≤ A(1)/C, so that no share is negative, and each pays at least the least price of
   its life). The better of the two, by sum, is used.

μ, ν, ρ and T' are chosen by trying; any choice is valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from serve_apps.batching import STEP_TOKENS
from serve_apps.timing import Timing, decode_step_s

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

KNOTS = 96
ALL = slice(None)
SAMPLE = 600  # requests by which μ and ν are chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must keep to count, seconds; inf = no limit. `whole_s`: the lesser of end-to-end and deadline."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    whole_s: float = math.inf

    def life_s(self, output_tokens: Floats) -> Floats:
        """From its arrival, the longest that a request that meets its limits can last."""
        steps = np.maximum(output_tokens - 1.0, 0.0)
        stream_s = np.where(steps > 0, steps * self.tpot_s, 0.0) if math.isfinite(self.tpot_s) else np.where(
            steps > 0, math.inf, 0.0)  # fmt: skip
        return np.minimum(self.ttft_s + stream_s, self.whole_s)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Requests:
    """Requests of one service, arrays of shape (n,) in any order.

    Each is served between `at_s` (its arrival, or earlier than that) and `latest_s`, if it is to meet its limits;
    `company`: no more than so many requests of the service, itself included, can be alive together with it.
    """

    at_s: Floats
    latest_s: Floats
    input_tokens: Floats
    output_tokens: Floats
    prefix_tokens: Floats
    company: Ints

    def __len__(self) -> int:
        return len(self.at_s)


def requests_of(
    at_s: Floats, inputs: Floats, outputs: Floats, prefix: Floats, loose: Bools, limits: Limits
) -> Requests:
    """Requests with their lives and company. `loose` ones begin at `at_s` or any time after it."""
    latest_s = np.where(loose, math.inf, at_s + limits.life_s(outputs))
    begun = np.searchsorted(np.sort(at_s), latest_s, side="right")
    over = np.searchsorted(np.sort(latest_s), at_s, side="left")
    return Requests(
        at_s=at_s,
        latest_s=latest_s,
        input_tokens=inputs,
        output_tokens=outputs,
        prefix_tokens=prefix,
        company=np.maximum(begun - over, 1),
    )


def least_work(timing: Timing, limits: Limits, requests: Requests, inside: Bools) -> Floats:
    """Replica seconds, shape (n,); inf where the variant cannot meet the request's limits. `inside`: see above."""
    law = _Law(timing, limits, requests)
    plain = law.spread(_best_plain(law), law.able)
    paced = law.paced(inside)
    if not len(paced):
        return plain
    best, first = _best_paced(law, paced)
    limited = law.spread(best, first)
    return limited if limited[law.able].sum() > plain[law.able].sum() else plain


@dataclass(frozen=True, slots=True)
class _Weights:
    """The multipliers μ, ν, ρ and the pace T' of the argument."""

    mu: float = 0.0
    nu: float = 0.0
    rho: float = 0.0
    pace_s: float = 0.0


class _Law:
    """One variant's step times and the requests as it would run them."""

    def __init__(self, timing: Timing, limits: Limits, requests: Requests) -> None:
        longest = min(timing.max_model_len, timing.kv_capacity_tokens)
        inputs = requests.input_tokens
        self.company = requests.company
        self.steps = np.maximum(np.minimum(requests.output_tokens, longest - inputs) - 1.0, 0.0)
        fresh = np.maximum(inputs - requests.prefix_tokens, 0.0)
        self.fixed_s = np.where(fresh > 0, timing.prefill_fixed_s, 0.0)
        self.prompt_s = fresh / timing.prefill_tps
        batch = range(1, timing.max_num_seqs + 1)
        self.base = _from_here_on([decode_step_s(timing, m, 0.0) for m in batch])
        self.slope = _from_here_on(
            [(decode_step_s(timing, m, 1000.0) - decode_step_s(timing, m, 0.0)) / 1000.0 for m in batch]
        )
        self.cache = float(timing.kv_capacity_tokens)
        prefill_s = self.fixed_s + self.prompt_s
        left_s = np.maximum(limits.whole_s - prefill_s, 0.0)
        self.step_limit_s = np.minimum(limits.tpot_s, left_s / np.maximum(self.steps, 1.0))
        self.first_kv, self.last_kv = inputs + 1.0, inputs + np.maximum(self.steps, 1.0)
        alone_s = self.base[0] + self.slope[0] * (self.first_kv + self.last_kv) / 2.0
        self.able = (
            (inputs + 1.0 <= longest)
            & (prefill_s <= min(limits.ttft_s, limits.whole_s) * (1 + 1e-9))
            & ((self.steps == 0) | (alone_s <= self.step_limit_s * (1 + 1e-9)))
        )
        # What the members of the chain may last for, a step.
        self.pace_s = self.step_limit_s + (self.prompt_s + STEP_TOKENS / timing.prefill_tps) / np.maximum(self.steps, 1)
        top = max(2.0, float(self.last_kv[self.able].max(initial=2.0)))
        self.knots = np.geomspace(1.0, top * (1 + 1e-9), KNOTS)

    def paced(self, inside: Bools) -> Ints:
        """Which requests may be of the first class, the most hurried first."""
        rows = np.flatnonzero(inside & self.able & (self.steps > 0) & np.isfinite(self.pace_s))
        return rows[np.argsort(self.pace_s[rows], kind="stable")]

    def spread(self, weights: _Weights, first: Bools, rows: slice | Ints = ALL) -> Floats:
        """w of some requests: the share of a batch for the first class, what it adds to one for any other."""
        growth = max(0.0, float(np.diff(self.base, prepend=0.0).min()))
        mean_kv = (self.first_kv[rows] + self.last_kv[rows]) / 2.0
        added = self.fixed_s[rows] + self.prompt_s[rows] + self.steps[rows] * (growth + self.slope[0] * mean_kv)
        work = np.where(first[rows], self.work(weights, rows), added)
        return np.where(self.able[rows], work, math.inf)

    def work(self, weights: _Weights, rows: slice | Ints) -> Floats:
        """The share of some requests, those that cannot be met included."""
        mu, nu, rho = weights.mu, weights.nu, weights.rho
        m = np.arange(1.0, len(self.base) + 1.0)[:, None]
        step = self.base[:, None] + self.slope[:, None] * m * self.knots
        share = np.minimum(step, step - mu * (weights.pace_s - step)) / m + rho * step
        share += nu * (self.knots - self.cache / m)
        least = np.minimum.accumulate(share, axis=0)
        most = np.minimum(self.company[rows], len(self.base)) - 1
        ends = self._at(least, most, self.first_kv[rows]) + self._at(least, most, self.last_kv[rows])
        limit_s = np.where(np.isfinite(self.step_limit_s[rows]), self.step_limit_s[rows], 0.0)
        prefill_s = self.fixed_s[rows] + (1.0 + mu) * self.prompt_s[rows]
        return prefill_s + self.steps[rows] * (ends / 2.0 - rho * limit_s)

    def _at(self, table: Floats, most: Ints, kv: Floats) -> Floats:
        """`table[most]` at `kv` tokens, by the chord between knots."""
        high = np.clip(np.searchsorted(self.knots, kv), 1, KNOTS - 1)
        part = np.clip((kv - self.knots[high - 1]) / (self.knots[high] - self.knots[high - 1]), 0.0, 1.0)
        return table[most, high - 1] * (1.0 - part) + table[most, high] * part


def _from_here_on(values: list[float]) -> Floats:
    return np.minimum.accumulate(np.array(values)[::-1])[::-1]


def _sample(rows: Ints) -> Ints:
    return rows[:: max(1, len(rows) // SAMPLE)]


def _best_plain(law: _Law) -> _Weights:
    """ν for one class of all requests, whatever the prices."""
    sample = _sample(np.flatnonzero(law.able))
    tried = [_Weights(nu=part * law.base[0] / law.cache) for part in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)]
    return max(tried, key=lambda weights: float(law.work(weights, sample).sum()))


def _best_paced(law: _Law, hurried: Ints) -> tuple[_Weights, Bools]:
    """Multipliers and first class, by coordinate search from several sizes of the class."""
    found: list[tuple[float, _Weights, Bools]] = []
    for part in (0.4, 0.6, 0.8, 0.9, 1.0):
        members = hurried[: max(1, int(part * len(hurried)))]
        first = np.zeros(len(law.able), bool)
        first[members] = True
        weights = _climb(law, _Weights(pace_s=float(law.pace_s[members[-1]])), _sample(np.sort(members)))
        sample = _sample(np.flatnonzero(law.able))
        found.append((float(law.spread(weights, first, sample).sum()), weights, first))
    _, weights, first = max(found, key=lambda one: one[0])
    return weights, first


def _climb(law: _Law, start: _Weights, sample: Ints) -> _Weights:
    """The multipliers that give the sample most, one after the other, twice."""
    base = float(law.base[0])
    pace = base / max(start.pace_s - base, 0.02 * base)
    kv = float(np.median(law.first_kv[sample]))
    per_sequence = (law.base[-1] - base) / max(1, len(law.base) - 1) + law.slope[0] * kv
    choices = {
        "mu": [part * pace for part in (0.0, 0.25, 0.5, 0.7, 0.85, 1.0, 1.15)],
        "rho": [0.0, *(base / (size**2 * max(per_sequence, 1e-12)) for size in np.geomspace(1, len(law.base), 16))],
        "nu": [part * base / law.cache for part in (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)],
    }
    best, most = start, float(law.work(start, sample).sum())
    for name in ("mu", "nu", "rho") * 2:
        for value in choices[name]:
            tried = replace(best, **{name: float(value)})
            work = float(law.work(tried, sample).sum())
            if work > most:
                best, most = tried, work
    return best
