"""LB1: a proven lower bound on what it costs to meet so many requests of each service.

Pure; may not do I/O, read a clock or draw a random number.

Claim. Let a controller, clairvoyant or not, run a scenario with one seed in the world, meeting the limits of at least
M_s requests of each service s within its policy's markets, zones and types. It costs at least `Bound.usd(M)`.

The program. Such a run fulfils all of the following, whose cheapest fulfilment therefore costs no more than it:
variables are, per period p, u_op ≥ 0 (instances of offering o that could serve, on average), g_op ≥ 0 (starts),
y_swop ≥ 0 (replica seconds of service s by way w at o), and for each request i whether it is met, where and when.

 a. Σ of the met requests' work by way w in p ≤ Σ_o y_swop: `work` proves it for `Way.work_s`, with any prices.
 b. Σ_sw gpus_w·y_swop ≤ GPUs_o·seconds_p·u_op: a GPU serves one replica at a time. (Which replica fits beside which is
    left out.)
 c. u_op ≤ most_op: no more than the pool held (`supply`), nothing before its opening and the least lead.
 d. Σ GPUs_o·u_op ≤ quota, by account.
 e. u_op − u_o,p−1 ≤ g_op, u_o,−1 = 0: every instance is started once. The number that can serve is a step function
    R(t); its means over periods lie between its least and its largest value there, so that their rises, added up, are
    no more than the rises of R, each of which is a start. An instance is paid for from its launch, and serves the
    least lead (boot + load as declared) later at the earliest: so a start costs the price of that lead, and the rest
    of its bill is that of the time in which it could serve. Reservations and blocks are paid anyway (`sunk_usd`).
 f. What goes to the overflow endpoint costs its tokens, at most rpm of them a minute.
 g. Σ met requests of s ≥ M_s. Which are missed is free.
 h. A request is served between its arrival and the last instant its limits allow; after the end, for AFTER_S, for free.

Instances and replicas may be fractions. Budgets, floors, refusals, ties and everything unknown are left out.

The bound. For any multipliers ≥ 0 of b (`gpu_s`), c, d, e, f and g the Lagrangian is a lower bound (weak duality).
Its minimum over u, g and y is finite when
  GPUs·seconds·gpu_s ≤ usd + start_p − start_p+1 + GPUs·quota + c   and   start ≤ start_usd,
so c is set to what is missing there and start is cut down to start_usd; a way's replica second is worth the cheapest
gpus_w·gpu_s of its places (which minimises over y), and of the periods in which a request may be served it takes the
cheapest. Each request then decides for itself: it is met where cheapest, if that is less than what meeting it earns.
All of it is evaluated here, request by request, from multipliers that are feasible by construction, so errors of the
solver that proposed them (`program`) cannot raise the bound above the truth; rounding is allowed for by ROUNDING.
As a function of M the bound is affine for fixed multipliers, so a `Bound` made for one M holds for every other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .problem import Load, Problem
from .program import Prices, prices
from .work import Floats

PARTS = (1.0, 0.97, 0.93, 0.85, 0.7, 0.5)
ROUNDING = 1e-9  # relative; sums of a million terms err by less


@dataclass(frozen=True, slots=True)
class Bound:
    """``at_zero_usd + Σ per_met_usd × met`` is never above the cost of meeting `met`; `sunk_usd` is paid anyway."""

    at_zero_usd: float
    per_met_usd: dict[str, float]
    sunk_usd: float

    def usd(self, met: Mapping[str, float]) -> float:
        """The bound for so many met requests by service."""
        earned = sum(usd * met[service] for service, usd in self.per_met_usd.items())
        return max(self.sunk_usd, self.at_zero_usd + earned)


def bounds(problem: Problem, met: Mapping[str, float], parts: Sequence[float] = PARTS) -> tuple[Bound, ...]:
    """Bounds whose multipliers are chosen for `parts` of `met`; all hold for whatever was met.

    Less than all is tried because the program's prices explode where capacity hardly suffices for the mean works, and
    because other controllers meet less.
    """
    found = []
    for part in parts:
        near = {service: part * count for service, count in met.items()}
        multipliers = prices(problem, near)
        found += [prove(problem, multipliers, wanted) for wanted in ((near, met) if part < 1.0 else (met,))]
    return tuple(found)


def best(bounds: Iterable[Bound], met: Mapping[str, float]) -> float:
    """The largest of several bounds, USD."""
    return max(bound.usd(met) for bound in bounds)


def prove(problem: Problem, multipliers: Prices, met: Mapping[str, float]) -> Bound:
    """The Lagrangian's least value for some multipliers, feasible or not; those of g are the best for `met`."""
    quota = {account: np.maximum(multipliers.quota[account], 0.0) for account in problem.quotas}
    gpu_s = np.maximum(multipliers.gpu_s, 0.0)
    terms = [problem.sunk_usd]
    terms += [-float(quota[account].sum()) * limit for account, limit in problem.quotas.items()]
    lengths_s = np.diff(problem.edges_s)
    for index, place in enumerate(problem.places):
        start = np.clip(multipliers.start[index], 0.0, place.start_usd)
        own = quota[place.quota] if place.quota else np.zeros(problem.periods)
        price = place.usd + start - np.append(start[1:], 0.0) + place.gpus * own
        scarcity = np.maximum(place.gpus * lengths_s * gpu_s[index] - price, 0.0)
        terms.append(-float((scarcity * place.most).sum()))
    earned: dict[str, float] = {}
    for load in problem.loads:
        cost, quota_usd = _cost(load, multipliers, gpu_s, lengths_s)
        earned[load.service] = _earned(cost, met[load.service])
        terms += [-quota_usd, float(np.minimum(cost - earned[load.service], 0.0).sum())]
    slack = ROUNDING * math.fsum(abs(term) for term in terms)
    return Bound(math.fsum(terms) - slack, earned, problem.sunk_usd)


def _earned(cost: Floats, met: float) -> float:
    """What meeting a request earns: as much as the last of the `met` cheapest costs, which makes the bound largest."""
    able = cost[np.isfinite(cost)]
    count = min(len(able), math.ceil(met))
    return float(np.partition(able, count - 1)[count - 1]) if count else 0.0


def _cost(load: Load, multipliers: Prices, gpu_s: Floats, lengths_s: Floats) -> tuple[Floats, float]:
    """What it costs to meet each request where that is cheapest, shape (n,); what the overflow's quota takes off."""
    reach = load.last - load.first
    extra = np.maximum(multipliers.overflow[load.service], 0.0)
    cost = np.full(len(load), np.inf)
    for way in load.ways:
        if not way.places:
            continue
        second = way.gpus * gpu_s[list(way.places)].min(axis=0)
        able = np.isfinite(way.work_s)
        work_s = np.where(able, way.work_s, 0.0)
        cost = np.minimum(cost, np.where(able, _least(second)[reach, load.first] * work_s, np.inf))
    if load.overflow_rpm:
        cost = np.minimum(cost, load.overflow_usd + _least(extra)[reach, load.first])
    return cost, float((extra * load.overflow_rpm * (lengths_s / 60.0 + 1.0)).sum())


def _least(values: Floats) -> Floats:
    """Entry [d, p]: the least of period p and the next d. Shape (periods, periods)."""
    periods = len(values)
    rows = [values]
    for ahead in range(1, periods):
        rows.append(np.minimum(rows[-1], np.append(values[ahead:], np.full(ahead, np.inf))))
    return np.array(rows)


def counted(load: Load, attainment: float) -> int:
    """How many requests an attainment means, rounded down."""
    return math.floor(attainment * len(load) + 1e-6)
