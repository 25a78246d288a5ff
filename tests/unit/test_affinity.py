"""Where a session belongs: always the same replica, evenly, moved as little as possible, and not against its load."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serve_apps.affinity import home

NAMES = [f"r{n}" for n in range(8)]
SESSIONS = [f"s{n}" for n in range(800)]
IDLE = dict.fromkeys(NAMES, 0)


def test_sessions_are_spread_over_all_replicas() -> None:
    counts = Counter(home(session, IDLE) for session in SESSIONS)
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 2 * min(counts.values())


@given(st.sampled_from(NAMES), st.sampled_from(SESSIONS))
def test_a_replica_that_goes_moves_its_own_sessions_only(gone: str, session: str) -> None:
    before = home(session, IDLE)
    after = home(session, {name: 0 for name in reversed(NAMES) if name != gone})
    assert after == before or before == gone


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50), max_size=8), st.sampled_from(SESSIONS))
def test_a_home_never_has_much_more_to_do_than_the_mean(loads: dict[str, int], session: str) -> None:
    chosen = home(session, loads)
    if chosen is not None:
        assert loads[chosen] <= 1.25 * sum(loads.values()) / len(loads) + 1.0
    elif loads:
        assert max(loads.values()) > 1.25 * sum(loads.values()) / len(loads)


def test_without_replicas_there_is_no_home() -> None:
    assert home("s", {}) is None
