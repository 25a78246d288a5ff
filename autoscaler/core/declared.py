"""Load that policies declare in advance: launches, batches and holidays, once or by the calendar.

Pure; may not do I/O or read a clock. A repeating event keeps the offset from UTC that its `starts_at` has: it does not
follow a change of the clock.
"""

from __future__ import annotations

from datetime import datetime

from policies.model import Event

DAY_S = 86_400.0
WEEKEND = 5  # the first weekday that is none


def touches(event: Event, now_s: float, lead_s: float) -> bool:
    """Whether capacity ordered now would still stand in the event, or stands in it already."""
    first = datetime.fromisoformat(event.starts_at)
    start_s = first.timestamp()
    if event.repeats == "once":
        return start_s - lead_s <= now_s < start_s + event.lasts_s
    period_s = 7.0 * DAY_S if event.repeats == "weekly" else DAY_S
    oldest = max(0, int((now_s - start_s - event.lasts_s) // period_s))
    newest = int((now_s + lead_s - start_s) // period_s)
    for turn in range(oldest, newest + 1):
        begins_s = start_s + turn * period_s
        weekday = (first.weekday() + turn) % 7
        if event.repeats == "weekdays" and weekday >= WEEKEND:
            continue
        if begins_s - lead_s <= now_s < begins_s + event.lasts_s:
            return True
    return False
