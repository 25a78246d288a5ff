"""Memory of what was measured lately: means, greatest values and due instants. May not read a clock."""

from __future__ import annotations

from collections import deque
from math import floor


class Window:
    """Samples of the last `span_s` seconds: those taken after `now - span_s`, and at least the newest."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> None:
        """Take a sample and forget those that are too old."""
        self._samples.append((now_s, value))
        while len(self._samples) > 1 and self._samples[0][0] <= now_s - self._span_s:
            self._samples.popleft()

    @property
    def mean(self) -> float:
        """Mean of the samples, 0 without any."""
        return sum(value for _, value in self._samples) / len(self._samples) if self._samples else 0.0

    @property
    def most(self) -> float:
        """The greatest sample, 0 without any."""
        return max((value for _, value in self._samples), default=0.0)


class Every:
    """Whether a loop of a given period is due. It turns at most once a tick of the world."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._turn = -1

    def due(self, now_s: float) -> bool:
        """True once for every period that `now_s` has entered."""
        turn = floor(now_s / self._period_s + 1e-9)
        due, self._turn = turn > self._turn, max(turn, self._turn)
        return due
