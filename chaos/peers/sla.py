"""A rule in the manner of Dynamo's planner: forecast rate over what an engine serves within its SLA, nudged by load.

Written from the published behaviour (docs/peers.md). May not read a clock.
"""

from __future__ import annotations

from .facts import EPSILON, Seen, Service, clip
from .windows import Every, Window


class Dynamo:
    """Every 180 s the floor: predicted rate ÷ SLA-bounded engine rate, at most 8 up a step. Between, one more or less.

    The predictor is the constant one (the mean of the last interval): the default ARIMA measured three to four times
    its error. Load mode waits while engines start: one more if the engines' mean batch misses the SLA, one less if
    the rest would stay safe, never below the floor.
    """

    INTERVAL_S, MOST_STEP, SAFE = 180.0, 8, 0.8

    def __init__(self, service: Service, knob: float) -> None:
        self._service = service
        self._engine_rps = service.unit.capacity_rps * knob
        self._engine_batch = service.unit.max_batch * knob
        self._every, self._rates = Every(self.INTERVAL_S), Window(self.INTERVAL_S)
        self._current = self._least = service.floor

    def want(self, now_s: float, seen: Seen) -> int:
        """Units wanted; the last answer while rate or load are unknown."""
        if seen.arrival_rps is not None:
            self._rates.add(now_s, seen.arrival_rps)
        if self._every.due(now_s):
            self._least = clip(self._rates.mean / self._engine_rps, self._service)
            self._current = max(self._current, min(self._least, self._current + self.MOST_STEP))
        elif seen.ongoing is not None and seen.ready >= self._current - EPSILON:
            self._current = clip(self._current + self._nudge(seen.ongoing, seen.ready), self._service)
        return self._current

    def _nudge(self, ongoing: float, ready: float) -> int:
        if ongoing > ready * self._engine_batch:
            return 1
        safe = ongoing <= (self._current - 1) * self._engine_batch * self.SAFE
        return -1 if safe and self._current > max(self._least, 1) else 0
