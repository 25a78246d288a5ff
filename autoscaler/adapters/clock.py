"""The wall clock. The only place of the controller that reads one; may not do anything else."""

from __future__ import annotations

import time


class SystemClock:
    """Clock port over the system's clock, which may step: the loop clamps it to be non-decreasing."""

    def now_s(self) -> float:
        """Seconds since 1970 UTC."""
        return time.time()
