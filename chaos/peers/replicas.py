"""Replica rules of Kubernetes: Knative's KPA, the HPA, KEDA on vLLM's queue, and AIBrix's APA.

Each class holds one service's memory and answers how many units it wants. Written from the published formulas
(docs/peers.md); what the world's tick cannot show (samples between two ticks) they do not see. May not read a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, floor, inf

from .facts import EPSILON, Seen, Service, clip
from .windows import Every, Window


def per_unit(service: Service, knob: float) -> float:
    """Requests in flight that one unit is meant to hold: as many as at the planned rate, × `knob`."""
    return max(service.unit.ongoing * knob, EPSILON)


class Kpa:
    """Knative's pod autoscaler: mean concurrency over 60 s, over 6 s in panic, against a target per pod."""

    STABLE_S, PANIC_S, GRACE_S = 60.0, 6.0, 30.0
    PANIC_AT, UP, DOWN = 2.0, 1000.0, 2.0

    def __init__(self, service: Service, knob: float) -> None:
        self._service = service
        self._target = per_unit(service, knob)
        self._stable, self._panic = Window(self.STABLE_S), Window(self.PANIC_S)
        self._panic_at_s, self._panic_most = -inf, 0
        self._idle_at_s = inf
        self._last = service.floor

    def want(self, now_s: float, seen: Seen) -> int:
        """Units wanted; the last answer while the load is unknown."""
        if seen.ongoing is None:
            return self._last
        self._stable.add(now_s, seen.ongoing)
        self._panic.add(now_s, seen.ongoing)
        ready = max(seen.ready, 1.0)
        low, high = floor(ready / self.DOWN), ceil(ready * self.UP)
        over_panic = ceil(self._panic.mean / self._target - EPSILON)
        stable = min(max(ceil(self._stable.mean / self._target - EPSILON), low), high)
        panic = min(max(over_panic, low), high)
        self._turn(now_s, over_panic / ready >= self.PANIC_AT)
        wanted = stable
        if self._panic_at_s > -inf:
            wanted = max(stable, panic)
            if wanted > self._panic_most:
                self._panic_at_s, self._panic_most = now_s, wanted
            wanted = self._panic_most
        self._last = clip(self._graced(now_s, wanted), self._service)
        return self._last

    def _turn(self, now_s: float, over: bool) -> None:
        if over and self._panic_at_s == -inf:
            self._panic_at_s, self._panic_most = now_s, 0
        elif not over and now_s - self._panic_at_s > self.STABLE_S:
            self._panic_at_s, self._panic_most = -inf, 0

    def _graced(self, now_s: float, wanted: int) -> int:
        """Zero only once it was wanted for the grace period and nothing was in flight for the whole stable window."""
        if wanted > 0 or self._stable.most > 0:
            self._idle_at_s = inf
            return max(1, wanted)
        self._idle_at_s = min(self._idle_at_s, now_s)
        return 0 if now_s - self._idle_at_s >= self.GRACE_S else 1


@dataclass(slots=True)
class Behaviour:
    """The HPA's default behaviour: down to the most of 300 s, up by at most 4 or 100 % within 15 s."""

    wanted: Window
    changes: deque[tuple[float, int]]  # upward changes: instant, units added

    @staticmethod
    def default() -> Behaviour:
        """As `autoscaling/v2` has it."""
        return Behaviour(Window(300.0), deque())

    def limit(self, now_s: float, current: int, wanted: int) -> int:
        """`wanted` as far as it may be followed now."""
        self.wanted.add(now_s, wanted)
        if wanted < current:
            return min(current, int(self.wanted.most))
        while self.changes and self.changes[0][0] <= now_s - 15.0:
            self.changes.popleft()
        before = current - sum(added for _, added in self.changes)
        allowed = min(wanted, max(current, before + 4, 2 * before))
        if allowed > current:
            self.changes.append((now_s, allowed - current))
        return allowed


class Hpa:
    """The HPA on requests in flight per pod, every 15 s, tolerance 10 %.

    A pod that is not ready counts as idle on the way up and as exactly loaded on the way down.
    """

    PERIOD_S, TOLERANCE = 15.0, 0.1

    def __init__(self, service: Service, knob: float) -> None:
        self._service = service
        self._target = per_unit(service, knob)
        self._every, self._behaviour = Every(self.PERIOD_S), Behaviour.default()
        self._current = max(1, service.floor)

    def want(self, now_s: float, seen: Seen) -> int:
        """Units wanted. The HPA never goes to zero: an idle service keeps one."""
        if self._every.due(now_s) and seen.ongoing is not None:
            wanted = max(1, clip(self._ratio(seen.ongoing, seen.ready), self._service))
            self._current = self._behaviour.limit(now_s, self._current, wanted)
        return self._current

    def _ratio(self, ongoing: float, ready: float) -> float:
        if ready <= 0:
            return self._current  # no pod reports: nothing to go by
        missing = max(0.0, self._current - ready)
        ratio = ongoing / ready / self._target
        if abs(ratio - 1.0) <= self.TOLERANCE + EPSILON:
            return self._current
        filled = ongoing + (missing * self._target if ratio < 1.0 else 0.0)
        again = filled / (ready + missing) / self._target
        if abs(again - 1.0) <= self.TOLERANCE + EPSILON or (again < 1.0) != (ratio < 1.0):
            return self._current
        return again * (ready + missing)


class Keda:
    """KEDA on vLLM's waiting requests: 0 ↔ 1 itself, above that the HPA on waiting requests per pod."""

    PERIOD_S, COOLDOWN_S, TOLERANCE, WAITING = 15.0, 360.0, 0.1, 5.0

    def __init__(self, service: Service, knob: float) -> None:
        self._service = service
        self._target = self.WAITING * knob
        self._every, self._behaviour = Every(self.PERIOD_S), Behaviour.default()
        self._current = service.floor
        self._active_at_s = 0.0

    def want(self, now_s: float, seen: Seen) -> int:
        """Units wanted; the last answer while the queue is unknown."""
        if not self._every.due(now_s) or seen.queued is None:
            return self._current
        if seen.queued > 0 or (seen.running or 0.0) > 0:
            self._active_at_s = now_s
        if self._current == 0:
            self._current = 1 if seen.queued > 0 else 0
            return self._current
        if self._service.floor == 0 and now_s - self._active_at_s >= self.COOLDOWN_S:
            self._current = 0
            return 0
        ratio = seen.queued / (self._target * self._current)
        near = abs(ratio - 1.0) <= self.TOLERANCE + EPSILON
        wanted = self._current if near else max(1, clip(seen.queued / self._target, self._service))
        self._current = self._behaviour.limit(now_s, self._current, wanted)
        return self._current


class Apa:
    """AIBrix's APA: the mean over 180 s of what ready pods hold, at most doubling, at most halving, ±10 % ignored."""

    PERIOD_S, WINDOW_S, COOLDOWN_S, TOLERANCE = 10.0, 180.0, 300.0, 0.1

    def __init__(self, service: Service, knob: float) -> None:
        self._service = service
        self._target = per_unit(service, knob)
        self._every, self._window = Every(self.PERIOD_S), Window(self.WINDOW_S)
        self._current = max(1, service.floor)
        self._changed_at_s = -inf

    def want(self, now_s: float, seen: Seen) -> int:
        """Units wanted; the last answer while the load is unknown or no pod is ready to report one."""
        if not self._every.due(now_s) or seen.ongoing is None or seen.ready <= 0:
            return self._current
        self._window.add(now_s, seen.ongoing / seen.ready)
        ratio, now = self._window.mean / self._target, self._current
        wanted = now
        if ratio > 1.0 + self.TOLERANCE:
            wanted = min(ceil(now * ratio - EPSILON), 2 * now)
        elif ratio < 1.0 - self.TOLERANCE and now_s - self._changed_at_s >= self.COOLDOWN_S:
            wanted = max(ceil(now * ratio - EPSILON), floor(now / 2))
        wanted = max(1, clip(wanted, self._service))
        if wanted != now:
            self._current, self._changed_at_s = wanted, now_s
        return self._current
