"""A bound on waiting for the other ends of a stream: for the engine's next chunk, and for the caller who reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from .engine import EngineFailed

SILENT_MAX_S = 300.0  # between chunks, and before the first; also while the caller does not take what there is

T = TypeVar("T")


class Silence:
    """Cancels the task that made it once it has listened for `limit_s` and heard nothing. One timer per stream looks
    now and then, because re-arming one at each chunk would cost more than the chunk.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._heard_at_s: float | None = None  # None: nobody listens yet
        self._fired = False
        self._timer = self._loop.call_later(limit_s, self._look)

    def listen(self) -> None:
        """From now on something should be heard."""
        self._heard_at_s = self._loop.time()

    async def bound(self, chunks: AsyncGenerator[T, None]) -> T | None:
        """The next chunk, None when there is none. Raises EngineFailed when it takes too long."""
        self._heard_at_s = self._loop.time()
        try:
            return await anext(chunks, None)
        except asyncio.CancelledError:
            if not self._fired or self._task is None or self._task.uncancel():
                raise  # somebody else wants the task to end
            raise EngineFailed(f"nothing came for {self._limit_s:g} s") from None
        finally:
            self._heard_at_s = self._loop.time()

    def close(self) -> None:
        """The stream is over."""
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        left_s = (now_s if self._heard_at_s is None else self._heard_at_s) + self._limit_s - now_s
        if left_s > 0.0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif self._task is not None:
            self._fired = True
            self._task.cancel()
