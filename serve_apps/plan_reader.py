"""The latest plan as this process knows it, kept fresh by one background thread.

Serve copies a policy's own module into its controller by value, once per application; a module that the policy imports
is shared by all of them. That is why the thread lives here. It may not decide anything, and `latest` may not block;
only the thread talks to Ray, with bounded waits.
"""

from __future__ import annotations

import logging
import threading
import time  # noqa: TID251 - an edge: ages of what was read are measured here
from collections.abc import Callable
from typing import NamedTuple

from serve_apps.wire import PlanMessage, WireError, decode

READ_EVERY_S = 0.3
READ_TIMEOUT_S = 2.0

_log = logging.getLogger("ray.serve")


class SeenPlan(NamedTuple):
    """A plan and the instant, on this process's monotonic clock, at which the board received it."""

    plan: PlanMessage
    published_at_s: float


class PlanReader:
    """Polls `fetch` (returns ``(age_s, bytes)`` or None, may raise anything) and remembers the last good plan."""

    def __init__(
        self, fetch: Callable[[], tuple[float, bytes] | None], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._fetch = fetch
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._trouble = ""
        self.seen: SeenPlan | None = None

    def latest(self) -> SeenPlan | None:
        """The last plan read, however old. Never blocks; the first call starts the thread."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._loop, name="qm-plan-reader", daemon=True)
                    self._thread.start()
        return self.seen

    def read_once(self) -> None:
        """One poll. An unreadable plan, a lost board or an empty one leaves what is known, with its age growing."""
        try:
            aged = self._fetch()
            if aged is not None:
                self.seen = SeenPlan(decode(PlanMessage, aged[1]), self._clock_s() - aged[0])
            self._note("")
        except WireError as error:
            self._note(f"the plan on the board is unreadable: {error}")
        except Exception as error:  # any failure of Ray: the policy must live on without the board
            self._note(f"no plan from the board: {type(error).__name__}: {error}")

    def _note(self, trouble: str) -> None:
        if trouble != self._trouble:
            _log.warning("Quartermaster: %s", trouble or "the board answers again")
        self._trouble = trouble

    def _loop(self) -> None:
        while True:
            self.read_once()
            time.sleep(READ_EVERY_S)


def _from_board() -> tuple[float, bytes] | None:
    import ray

    from serve_apps.board import get_board

    if not ray.is_initialized():  # outside a cluster (a unit test) Ray would start one
        return None
    try:
        board = get_board(create=False)
    except ValueError:  # nobody has published yet
        return None
    aged: tuple[float, bytes] | None = ray.get(board.aged_plan.remote(), timeout=READ_TIMEOUT_S)
    return aged


_reader = PlanReader(_from_board)


def latest() -> SeenPlan | None:
    """The last plan this process has read from the board. Never blocks."""
    return _reader.latest()
