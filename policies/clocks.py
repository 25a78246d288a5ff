"""When a zone's wall clock changes: what a repeating event needs to keep its time of day.

Reads the time zone database and nothing else; may not look at a clock. What it finds becomes part of the policy, so
that a plan made again elsewhere, with another edition of that database, is the same plan.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from .model import Event, Service

YEARS = 15
DAY = timedelta(days=1)


def is_zone(name: str) -> bool:
    """Whether the time zone database has it."""
    try:
        ZoneInfo(name)
    except (KeyError, OSError, ValueError):  # not found, a folder's name, no name at all
        return False
    return True


def with_clock_changes(service: Service) -> Service:
    """The service with the clock changes of its repeating events, whose zones and instants have been checked."""
    events = tuple(
        event.model_copy(update={"clock_changes": changes(event)}) if event.zone and event.repeats != "once" else event
        for event in service.events
    )
    return service.model_copy(update={"events": events})


def changes(event: Event) -> tuple[tuple[float, float], ...]:
    """(instant, offset from UTC from then on), seconds each: the offset at the first start, then every change of
    `YEARS` years.
    """
    assert event.zone is not None
    zone, at = ZoneInfo(event.zone), datetime.fromisoformat(event.starts_at).astimezone(UTC)
    rows = [(at.timestamp(), _offset_s(at, zone))]
    for _ in range(YEARS * 365):
        before, at = at, at + DAY
        if _offset_s(at, zone) != rows[-1][1]:
            rows.append((_change(before, at, zone), _offset_s(at, zone)))
    return tuple(rows)


def _offset_s(at: datetime, zone: ZoneInfo) -> float:
    offset = at.astimezone(zone).utcoffset()
    assert offset is not None
    return offset.total_seconds()


def _change(low: datetime, high: datetime, zone: ZoneInfo) -> float:
    """The second from which the offset is that of `high`."""
    first, last = int(low.timestamp()), int(high.timestamp())
    wanted = _offset_s(high, zone)
    while last - first > 1:
        middle = (first + last) // 2
        if _offset_s(datetime.fromtimestamp(middle, UTC), zone) == wanted:
            last = middle
        else:
            first = middle
    return float(last)
