"""A stranger's controller in a process of its own: what it prints, raises, hangs in or ends cannot end or spoil a run.

The process is forked, so that it starts at once and sees what this one does, and speaks over a pipe. It may only answer
in plain values. May not know a world, or what an answer means.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from numbers import Integral, Real
from typing import Any, NamedTuple

LIMIT_S = 30.0
GRACE_S = 0.2
FORK = multiprocessing.get_context("fork")
PLAIN = (str, int, float, bool, type(None))
MOST_DEPTH = 4


class TimedOut(Exception):
    """It has not answered."""


class Ended(Exception):
    """Its process is gone."""


class Raised(Exception):
    """It raised; the text says what."""


class Odd(NamedTuple):
    """Something that is no plain value: the name of its type."""

    kind: str

    def __str__(self) -> str:
        return f"a value of type {self.kind}"


class Foreign:
    """The controller that `load()(told)` makes. Each call may take `limit_s` of real time; once one has taken longer,
    or the process has ended, `gone` is set and it is not asked again.

    Raises Raised, TimedOut or Ended, and TypeError when what was loaded or made cannot be used.
    """

    def __init__(self, load: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        self.limit_s, self.gone = limit_s, False
        self._here, there = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(self._here, there, load), daemon=True)
        self._process.start()
        there.close()

    def loaded(self) -> None:
        """Load it."""
        able, kind = self._ask("load")
        if not able:
            raise TypeError(f"is {kind}, not something that can be called")

    def made(self, told: Mapping[str, Any]) -> None:
        """Make it."""
        able, kind = self._ask("make", told)
        if not able:
            raise TypeError(f"what it made is {kind}, which has no decide(now_s, view)")

    def decide(self, now_s: float, view: Mapping[str, Any]) -> Any:
        """What it answers, as plain values."""
        return self._ask("decide", now_s, view)

    def _ask(self, *call: Any) -> Any:
        try:
            self._here.send(call)
            if not self._here.poll(self.limit_s):
                self.close()
                raise TimedOut(f"no answer within {self.limit_s:g} s")
            answer, raised = self._here.recv()
        except (EOFError, ConnectionError):
            self.close()
            raise Ended(f"its process ended with exit code {self._process.exitcode}") from None
        if raised:
            raise Raised(raised)
        return answer

    def close(self) -> None:
        """No more calls."""
        self.gone = True
        self._here.close()  # an idle one ends by itself
        self._process.join(GRACE_S)
        self._process.kill()
        self._process.join()


def _serve(here: Connection, there: Connection, load: Callable[[], Any]) -> None:
    """In the process: answers until nobody asks any more."""
    here.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # the screen may be where the report goes
    sys.stdout = sys.stderr
    made: list[Any] = []
    while True:
        try:
            step, *given = there.recv()
        except EOFError:
            return
        try:
            there.send((_step(step, given, load, made), ""))
        except BaseException as error:
            there.send((None, _quoted(error)))


def _step(step: str, given: list[Any], load: Callable[[], Any], made: list[Any]) -> Any:
    if step == "load":
        made.append(load())
        return callable(made[-1]), type(made[-1]).__name__
    if step == "make":
        made.append(made[-1](*given))
        return callable(getattr(made[-1], "decide", None)), type(made[-1]).__name__
    return _plain(made[-1].decide(*given))


def _plain(value: Any, depth: int = 0) -> Any:
    """The value in Python's own types, read to its end; what has none is an `Odd`."""
    if type(value) in PLAIN:
        return value
    if depth > MOST_DEPTH:
        return Odd(type(value).__name__)
    if isinstance(value, Mapping):
        return {_plain(key, depth + 1): _plain(each, depth + 1) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each, depth + 1) for each in value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else Odd(type(value).__name__)


def _quoted(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its text is the stranger's code as well
        return type(error).__name__
