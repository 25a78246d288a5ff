"""How many calls a task of a service makes, and how many tasks begin: what tells an agents' burst from its first calls.

Pure; may not do I/O or read a clock. Gateways count the requests that begin a task: the first with its task's id, and
every one without an id, which is a task of one call. The calls of a task are the ratio of sums over an hour, so neither
a burst's first minutes, when tasks begin and most of their calls are still to come, nor its last ones change it much.
The rate at which tasks begin is a mean of minutes, and says what will be asked once those tasks are under way.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

KEPT_S = 3600.0  # time constants of what is remembered
QUICK_S = 60.0
PRIOR = 30.0  # tasks that speak for one call each
MOST = 50.0
STEP = 0.25  # decisions use calls a task in whole steps, rounded down
SPAN_S = 300.0  # one observation speaks for the time since the one before, up to this long


class Tasks(NamedTuple):
    """Decaying sums of requests and of tasks over an hour, and the tasks that begin, per second over a minute."""

    requests: float = 0.0
    begun: float = 0.0
    begun_rps: float = 0.0

    @property
    def calls(self) -> float:
        """Calls a task; 1 where nobody says which requests belong together."""
        calls = (self.requests + PRIOR) / (self.begun + PRIOR)
        return min(MOST, max(1.0, calls // STEP * STEP))

    @property
    def ahead_rps(self) -> float:
        """Requests/s that tasks amount to when they go on beginning as now; 0 where every task is one call."""
        return self.begun_rps * self.calls if self.calls > 1.0 else 0.0


NO_TASKS = Tasks()


def observe(known: Tasks, span_s: float, rps: float, begun_rps: float) -> Tasks:
    """After `span_s` seconds of so many requests/s and of so many that began a task."""
    span_s = min(max(span_s, 0.0), SPAN_S)
    kept, quick = exp(-span_s / KEPT_S), exp(-span_s / QUICK_S)
    return Tasks(
        kept * known.requests + rps * span_s,
        kept * known.begun + begun_rps * span_s,
        quick * known.begun_rps + (1.0 - quick) * begun_rps,
    )
