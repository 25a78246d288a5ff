"""Load that policies declare: a rate to start from, launches, batches and holidays, once or by the calendar.

Pure; may not do I/O, read a clock, or look up a time zone: a repeating event brings its zone's clock changes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from policies.model import Event

DAY_S = 86_400.0
WEEKEND = 5  # the first weekday that is none
PRIOR_WORTH_S = 600.0  # a declared rate counts as so long a history
SEEN_AFTER_S = 3600.0  # a forecast made so long after an event began has its load in it


def begun(event: Event, now_s: float, lead_s: float) -> float | None:
    """The start of the occurrence in which capacity ordered now would still stand, or stands already; of several the
    latest. None when there is none.
    """
    return max(
        (start for start in _starts(event, now_s, lead_s) if start - lead_s <= now_s < start + event.lasts_s),
        default=None,
    )


def _starts(event: Event, now_s: float, lead_s: float) -> Iterator[float]:
    """Starts about now, by the clock of the event."""
    first = datetime.fromisoformat(event.starts_at)
    start_s = first.timestamp()
    if event.repeats == "once":
        yield start_s
        return
    days = 7 if event.repeats == "weekly" else 1
    oldest = max(0, int((now_s - start_s - event.lasts_s) // (days * DAY_S)) - 1)
    newest = int((now_s + lead_s - start_s) // (days * DAY_S)) + 1
    for turn in range(oldest, newest + 1):
        if event.repeats != "weekdays" or (first.weekday() + turn) % 7 < WEEKEND:
            even_s = start_s + turn * days * DAY_S
            yield even_s + _offset_s(event, start_s) - _offset_s(event, even_s)


def _offset_s(event: Event, at_s: float) -> float:
    """The offset from UTC of the event's clock; 0 where it keeps the one that it has."""
    return next((offset for since_s, offset in reversed(event.clock_changes) if since_s <= at_s), 0.0)


def with_event(event: Event, rps: float, now: float, before: float | None, after_s: float) -> float:
    """The rate to be ready for, `after_s` seconds after an event began (below 0: before). `rps` is what is forecast,
    `now` what is seen, `before` what was seen before it began, None when nobody knows any more.

    Before, the declared load comes on top. Once it is there a forecast sees it too, and the larger of the two counts:
    adding would count it twice. Less load is believed only as far as it is seen, so that nothing is missing when it
    comes all the same.
    """
    if after_s < 0.0:
        return max(rps, rps * event.load_factor + event.expected_rps)
    if event.load_factor < 1.0:
        rps = max(rps * event.load_factor, min(rps, now))
    base = before if before is not None and after_s < SEEN_AFTER_S else 0.0
    return max(rps, base * event.load_factor + event.expected_rps)


def with_prior(declared_rps: float, rps: float, level: float, seen_s: float) -> float:
    """The forecast `rps`, or what is expected when `level` has been seen for `seen_s` seconds and `declared_rps` counts
    as a history of `PRIOR_WORTH_S` (the mean of a gamma distribution), whichever is larger.
    """
    expected = (declared_rps * PRIOR_WORTH_S + level * seen_s) / (PRIOR_WORTH_S + seen_s)
    return max(rps, expected) if declared_rps > 0.0 else rps
