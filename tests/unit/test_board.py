"""The board keeps the last word of everybody, with its age, and forgets after a minute."""

from __future__ import annotations

import asyncio

import pytest

from serve_apps.board import TTL_S, Board
from serve_apps.wire import NodeReport, WireError, encode


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_only_the_latest_plan_is_kept_with_its_age_since_receipt() -> None:
    clock = Clock()
    board = Board(clock)
    assert asyncio.run(board.plan()) is None
    asyncio.run(board.publish(b"one"))
    clock.now_s += 5
    asyncio.run(board.publish(b"two"))
    clock.now_s += 2.5
    assert asyncio.run(board.plan()) == b"two"
    assert asyncio.run(board.aged_plan()) == (2.5, b"two")


def test_each_gateway_has_one_report() -> None:
    clock = Clock()
    board = Board(clock)
    asyncio.run(board.report("g1", b"a"))
    clock.now_s += 1
    asyncio.run(board.report("g2", b"b"))
    asyncio.run(board.report("g1", b"c"))
    clock.now_s += 1
    assert asyncio.run(board.reports()) == {"g1": (1.0, b"c"), "g2": (1.0, b"b")}


def test_nodes_are_keyed_by_what_their_report_says() -> None:
    board = Board(Clock())
    raw = encode(NodeReport(instance_id="i-1", phase="joined", sent_at_s=0.0))
    asyncio.run(board.note(raw))
    assert asyncio.run(board.notes()) == {"i-1": (0.0, raw)}
    with pytest.raises(WireError):
        asyncio.run(board.note(b"{}"))


def test_what_nobody_repeats_for_a_minute_is_forgotten() -> None:
    clock = Clock()
    board = Board(clock)
    asyncio.run(board.publish(b"plan"))
    asyncio.run(board.report("g1", b"a"))
    clock.now_s += TTL_S
    assert asyncio.run(board.plan()) == b"plan"
    clock.now_s += 0.1
    assert asyncio.run(board.plan()) is None
    assert asyncio.run(board.reports()) == {}
