"""How much more than Poisson a service's arrivals vary, from the counts of successive observations.

Pure; may not do I/O or read a clock. Of three successive counts of a Poisson stream whose rate is steady, or grows
steadily, (n1 − 2·n2 + n3)² is on average six times their mean; of a bursty stream it is as many times that as its index
of dispersion of counts, which is the squared coefficient of variation of a renewal stream's gaps. A crowd is a change
of level: it shows in one or two of these triples, each of which counts a few times what is believed at most, while
bursts show in all of them. Silence teaches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from typing import NamedTuple

KEPT_S = 3600.0  # time constant of what is remembered
PRIOR = 5.0  # observations that speak for Poisson
CLIP = 12.0  # times what is believed: of a χ² with one degree of freedom .05 % is beyond
STEP = 1.5  # what decisions use of Ca² moves in such steps, and not for less than most of one
STAYS = 0.9  # of a step


class Bursts(NamedTuple):
    """Sum and weight of what was seen, and the Ca² that decisions use: a power of STEP, 1 for Poisson."""

    total: float = 0.0
    weight: float = 0.0
    held: float = 1.0

    @property
    def arrival_cv(self) -> float:
        """Coefficient of variation of the gaps between requests."""
        return sqrt(self.held)

    @property
    def seen(self) -> float:
        """Ca² as estimated: of few observations near 1, and never below it."""
        return max(1.0, (self.total + PRIOR) / (self.weight + PRIOR))


POISSON = Bursts()


def observe(known: Bursts, rates: Sequence[tuple[float, float]], at_s: float, rps: float) -> Bursts:
    """After one more observation of `rps` since the last. `rates` are (at_s, requests/s) seen before, newest last."""
    if len(rates) < 2:
        return known
    (before_s, first), (last_s, second) = rates[-2:]
    span_s, spans = at_s - last_s, (last_s - before_s) / max(at_s - last_s, 1e-9)
    mean = span_s * (first + second + rps) / 3.0
    if not 0.8 < spans < 1.25 or mean <= 0.0:
        return known
    ratio = (span_s * (first - 2.0 * second + rps)) ** 2 / (6.0 * mean)
    kept, new = exp(-span_s / KEPT_S), mean / (1.0 + mean)
    total = kept * known.total + new * min(ratio, CLIP * known.seen)
    return _held(Bursts(total, kept * known.weight + new, known.held))


def _held(known: Bursts) -> Bursts:
    step = log(STEP)
    if abs(log(known.seen / known.held)) <= STAYS * step:
        return known
    return known._replace(held=exp(round(log(known.seen) / step) * step))
