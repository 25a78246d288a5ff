"""When a declared event is demand: once, daily, on weekdays, weekly."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from autoscaler.core.declared import touches
from policies.model import Event

HOUR_S, LEAD_S = 3600.0, 600.0


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def event(repeats: Any, starts_at: str = "2026-03-02T09:00:00+01:00") -> Event:  # a Monday
    return Event(name="launch", starts_at=starts_at, lasts_s=HOUR_S, expected_rps=5.0, repeats=repeats)


@pytest.mark.parametrize(
    ("repeats", "now", "counts"),
    [
        ("once", "2026-03-02T08:49:59+01:00", False),
        ("once", "2026-03-02T08:50:00+01:00", True),
        ("once", "2026-03-02T09:59:59+01:00", True),
        ("once", "2026-03-02T10:00:00+01:00", False),
        ("once", "2026-03-03T09:30:00+01:00", False),
        ("daily", "2026-03-01T09:30:00+01:00", False),
        ("daily", "2026-03-08T08:55:00+01:00", True),
        ("daily", "2026-03-08T10:30:00+01:00", False),
        ("weekdays", "2026-03-06T09:30:00+01:00", True),
        ("weekdays", "2026-03-07T09:30:00+01:00", False),
        ("weekdays", "2026-03-09T08:55:00+01:00", True),
        ("weekly", "2026-03-03T09:30:00+01:00", False),
        ("weekly", "2026-03-16T09:30:00+01:00", True),
        ("weekly", "2030-03-04T08:55:00+01:00", True),
    ],
)
def test_an_event_counts_from_one_lead_before_it_to_its_end(repeats: str, now: str, counts: bool) -> None:
    assert touches(event(repeats), at(now), LEAD_S) is counts


def test_an_event_longer_than_its_period_always_counts() -> None:
    night = Event(name="batch", starts_at="2026-03-02T20:00:00+00:00", lasts_s=30 * HOUR_S, repeats="daily")
    assert all(touches(night, at("2026-03-20T00:00:00+00:00") + k * HOUR_S, LEAD_S) for k in range(48))
