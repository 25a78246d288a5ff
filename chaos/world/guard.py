"""Calls into code that may raise, answer nonsense or never return, without ever hanging. May not know what it calls.

A call that has not returned within its limit is left behind in its daemon thread, and the guard refuses further ones.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

LIMIT_S = 30.0


class TimedOut(Exception):
    """It has not returned."""


class Raised(Exception):
    """It raised `error`, which may be what would end this process: SystemExit, say."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class Guard:
    """One thread for all calls. `limit_s` of real time for each."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self.stuck = False
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="qm-controller", daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                answer: tuple[Any, BaseException | None] = (call(), None)
            except BaseException as error:
                answer = (None, error)
            self._answers.put(answer)

    def call(self, call: Callable[[], Any]) -> Any:
        """What it returns. Raises Raised or TimedOut."""
        if self.stuck:
            raise TimedOut("an earlier call has not returned")
        self._calls.put(call)
        try:
            answer, error = self._answers.get(timeout=self.limit_s)
        except queue.Empty:
            self.stuck = True
            raise TimedOut(f"no answer within {self.limit_s:g} s") from None
        if error is not None:
            raise Raised(error) from error
        return answer

    def close(self) -> None:
        """No more calls."""
        self._calls.put(None)
