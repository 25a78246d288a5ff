"""SIGINT and SIGTERM end a long command with one line, and the exit code a shell expects: 130 or 143.

May not know a command: each says for itself what it keeps. Commands that live until they are told to stop (`qm run`,
`qm up`) have their own handlers.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NOTHING = "nothing was written; the same command starts again"


class Interrupted(BaseException):
    """The user, or the machine, wants the command to end. `kept`: what there is of its work, and how to go on."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)
        self.kept = NOTHING

    @property
    def code(self) -> int:
        """Exit code."""
        return 128 + self.number

    def __str__(self) -> str:
        return f"stopped by {self.number.name}: {self.kept}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, both signals raise Interrupted in the main thread; a second one ends the process at once."""

    def stop(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupted(kept: str) -> Iterator[None]:
    """What to say was kept, should the command be stopped inside."""
    try:
        yield
    except Interrupted as stop:
        stop.kept = kept
        raise
