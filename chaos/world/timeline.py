"""Virtual time: what is due when, in one order. May not read a clock, draw a random number or know what it runs.

Instants are seconds from the scenario's start. Things due at the same instant run in the order in which they were put
in; nothing may be due in the past.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """The random numbers of one concern: what one draws never moves another's."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


@dataclass
class Timeline:
    """A heap of what is to happen. `now_s` is the instant of what happens now."""

    now_s: float = 0.0
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _made: int = 0

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Have `action` run at `at_s`. Raises ValueError for an instant that is over."""
        if not at_s >= self.now_s:
            raise ValueError(f"an event for {at_s:g} s at {self.now_s:g} s: it would be in the past")
        self._made += 1
        heapq.heappush(self._heap, (at_s, self._made, action))

    def after(self, wait_s: float, action: Callable[[], None]) -> None:
        """Have `action` run `wait_s` from now."""
        self.at(self.now_s + wait_s, action)

    def next_s(self) -> float:
        """When the next thing is due; inf when nothing is."""
        return self._heap[0][0] if self._heap else float("inf")

    def run_until(self, until_s: float, before: Callable[[float], None]) -> None:
        """Run everything that is due up to and at `until_s`; `before(at_s)` is called whenever time moves."""
        while self.next_s() <= until_s:
            at_s, _, action = heapq.heappop(self._heap)
            if at_s > self.now_s:
                before(at_s)
                self.now_s = at_s
            action()
        if until_s > self.now_s:
            before(until_s)
            self.now_s = until_s
