"""Declared load: when an event is demand and how much of it, by whose clock it repeats, and a rate to start from."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from autoscaler.core.declared import PRIOR_WORTH_S, begun, with_event, with_prior
from policies.clocks import changes
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
    assert (begun(event(repeats), at(now), LEAD_S) is not None) is counts


def test_an_event_longer_than_its_period_always_counts() -> None:
    night = Event(name="batch", starts_at="2026-03-02T20:00:00+00:00", lasts_s=30 * HOUR_S, repeats="daily")
    begins = [begun(night, at("2026-03-20T00:00:00+00:00") + k * HOUR_S, LEAD_S) for k in range(48)]
    assert all(start is not None for start in begins)
    assert begins[20] == at("2026-03-20T20:00:00+00:00"), "of two at once the latest"


def by_clock(zone: str | None, starts_at: str = "2026-03-02T09:00:00+01:00", repeats: Any = "daily") -> Event:
    made = Event(name="launch", starts_at=starts_at, lasts_s=HOUR_S, expected_rps=5.0, repeats=repeats, zone=zone)
    return made.model_copy(update={"clock_changes": changes(made) if zone else ()})


@pytest.mark.parametrize(
    ("zone", "starts_at", "now", "start"),
    [
        ("Europe/Berlin", "2026-03-02T09:00:00+01:00", "2026-03-28T09:30:00+01:00", "2026-03-28T09:00:00+01:00"),
        ("Europe/Berlin", "2026-03-02T09:00:00+01:00", "2026-03-29T09:30:00+02:00", "2026-03-29T09:00:00+02:00"),
        ("Europe/Berlin", "2026-03-02T09:00:00+01:00", "2026-07-01T08:55:00+02:00", "2026-07-01T09:00:00+02:00"),
        ("Europe/Berlin", "2026-03-02T09:00:00+01:00", "2026-07-01T10:30:00+02:00", None),
        ("Europe/Berlin", "2026-03-02T09:00:00+01:00", "2026-10-25T09:30:00+01:00", "2026-10-25T09:00:00+01:00"),
        ("Europe/Berlin", "2026-03-02T09:00:00+01:00", "2040-07-02T09:30:00+02:00", "2040-07-02T09:00:00+02:00"),
        ("America/New_York", "2026-10-30T23:30:00-04:00", "2026-11-01T23:45:00-05:00", "2026-11-01T23:30:00-05:00"),
        ("Asia/Kolkata", "2026-03-02T09:00:00+05:30", "2026-07-01T09:30:00+05:30", "2026-07-01T09:00:00+05:30"),
        (None, "2026-03-02T09:00:00+01:00", "2026-07-01T10:30:00+02:00", "2026-07-01T09:00:00+01:00"),
    ],
)
def test_it_repeats_by_the_clock_of_its_zone(zone: str | None, starts_at: str, now: str, start: str | None) -> None:
    assert begun(by_clock(zone, starts_at), at(now), LEAD_S) == (None if start is None else at(start))


def test_a_weekly_event_keeps_its_wall_clock_and_weekday_across_a_year() -> None:
    weekly = by_clock("Europe/Berlin", repeats="weekly")
    starts = {begun(weekly, at("2026-03-02T00:00:00+01:00") + 600.0 * k, LEAD_S) for k in range(365 * 144)} - {None}
    local = [datetime.fromtimestamp(start, ZoneInfo("Europe/Berlin")) for start in sorted(s for s in starts if s)]
    assert len(local) == 53
    assert {(when.weekday(), when.hour, when.minute) for when in local} == {(0, 9, 0)}


@pytest.mark.parametrize(
    ("after_s", "forecast", "now", "before", "wanted"),
    [
        (-300.0, 12.0, 10.0, None, 17.0),  # nothing of it can be seen yet: on top
        (60.0, 12.0, 10.0, 10.0, 15.0),  # it has begun, the load has not come: what was before, and the event
        (60.0, 16.0, 15.0, 10.0, 16.0),  # the forecast sees it: not twice
        (7200.0, 16.0, 15.0, None, 16.0),
        (7200.0, 2.0, 2.0, None, 5.0),  # it never came: the policy's word until the end
    ],
)
def test_load_that_is_seen_is_not_added_again(
    after_s: float, forecast: float, now: float, before: float | None, wanted: float
) -> None:
    assert with_event(event("once"), forecast, now, before, after_s) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("after_s", "forecast", "now", "wanted"),
    [
        (-300.0, 10.0, 9.0, 10.0),  # the holiday has not begun: nothing is given back
        (60.0, 10.0, 9.0, 9.0),  # it begins, and people are still there
        (1800.0, 10.0, 3.0, 4.0),  # the forecast expects a working day, the policy four tenths of it
        (7200.0, 3.5, 3.0, 3.0),  # the forecast has learnt it
    ],
)
def test_a_holiday_takes_nothing_that_is_still_there(
    after_s: float, forecast: float, now: float, wanted: float
) -> None:
    holiday = event("once").model_copy(update={"expected_rps": 0.0, "load_factor": 0.4})
    assert with_event(holiday, forecast, now, 10.0, after_s) == pytest.approx(wanted)


def test_a_declared_rate_counts_until_minutes_of_history_say_better() -> None:
    assert with_prior(8.0, 0.0, 0.0, 0.0) == 8.0
    assert with_prior(8.0, 2.5, 2.0, PRIOR_WORTH_S) == pytest.approx(5.0)
    assert with_prior(8.0, 2.5, 2.0, 100 * PRIOR_WORTH_S) == 2.5
    assert with_prior(8.0, 20.0, 18.0, 60.0) == 20.0, "more than declared is followed at once"
    assert with_prior(0.0, 2.5, 2.4, 60.0) == 2.5
