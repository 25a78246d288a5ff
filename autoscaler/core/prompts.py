"""How much of a service's prompts engines need not compute, because their prefix caches hold it.

Pure; may not do I/O or read a clock. Gateways count whole prompts as they arrive, engines what they prefill: the share
is one less the ratio of the two means. What prompts have in common changes with applications and not with load, so the
mean is taken over an hour; but a cache that is met no more is load at once, so a lower share is believed in minutes.
Sums of tokens over sums of requests: a queue delays one against the other but does not bias their ratio.
"""

from __future__ import annotations

from math import exp, floor
from typing import NamedTuple

KEPT_S = 3600.0  # time constants of what is remembered
QUICK_S = 300.0
PRIOR = 100.0  # requests that speak for no cache, and in the quick mean for the slow one
STEP = 0.05  # decisions use the share in whole steps, rounded down
MOST = 0.95


class Sums(NamedTuple):
    """Requests that arrived and their tokens, requests that were prefilled and the tokens that was: decaying sums."""

    arrived: float = 0.0
    tokens: float = 0.0
    prefilled: float = 0.0
    prefilled_tokens: float = 0.0

    def share(self, prior: float) -> float:
        """The part of prompt tokens that was not computed, where `PRIOR` requests had `prior`, which is also what is
        said where engines say nothing."""
        if not self.prefilled_tokens or not self.tokens:
            return prior
        computed = self.prefilled_tokens / self.prefilled / (self.tokens / self.arrived)
        return ((1.0 - computed) * self.prefilled + prior * PRIOR) / (self.prefilled + PRIOR)


class Prompts(NamedTuple):
    """The same over an hour and over minutes."""

    slow: Sums = Sums()
    quick: Sums = Sums()

    @property
    def prefix_share(self) -> float:
        """The part of prompt tokens that caches hold, as decisions use it; 0 where engines say nothing."""
        slow = self.slow.share(0.0)
        share = min(slow, self.quick.share(slow))
        return min(MOST, floor(max(0.0, share) / STEP + 1e-9) * STEP)


NONE = Prompts()


def observe(known: Prompts, span_s: float, rps: float, tokens_ps: float, engines: tuple[float, float]) -> Prompts:
    """After `span_s` seconds of such arrivals, in which `engines` prefilled (requests, tokens) in all.

    Arrivals without tokens are those of which nobody knows yet how long they are.
    """
    arrived = rps * span_s if tokens_ps > 0.0 else 0.0
    seen = Sums(arrived, tokens_ps * span_s, *engines)
    return Prompts(_add(known.slow, seen, exp(-span_s / KEPT_S)), _add(known.quick, seen, exp(-span_s / QUICK_S)))


def _add(before: Sums, new: Sums, kept: float) -> Sums:
    return Sums(*(kept * old + more for old, more in zip(before, new, strict=True)))
