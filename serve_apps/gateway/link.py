"""The gateway's two conversations with the board: what it saw, once a second; the plan, twice a second.

May not import Ray: the board is a protocol. A board that is absent, slow or speaks another version changes nothing but
the age of the plan; the gateway serves on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from serve_apps.wire import PlanMessage, WireError, decode, encode

from .core import Gateway

REPORT_PERIOD_S = 1.0
PLAN_PERIOD_S = 0.5
BOARD_TIMEOUT_S = 2.0
GATEWAY_GONE_S = 5.0  # a gateway silent for so long no longer counts when slots are shared

# Serve collects what this logger says in the replica's own log file.
_log = logging.getLogger("ray.serve")


class Board(Protocol):
    """The board as a gateway needs it. Any exception means: not now."""

    async def aged_plan(self) -> tuple[float, bytes] | None:
        """The last plan published, if any, and the seconds since."""
        ...

    async def report(self, gateway_id: str, raw: bytes) -> None:
        """Leave this gateway's report."""
        ...

    async def report_ages_s(self) -> dict[str, float]:
        """Seconds since the last report of every gateway, this one included, by its id."""
        ...


@asynccontextmanager
async def linked(gateway: Gateway, board: Board) -> AsyncIterator[None]:
    """Both conversations, for as long as the context lasts."""
    tasks = [asyncio.create_task(_report(gateway, board)), asyncio.create_task(_follow(gateway, board))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _report(gateway: Gateway, board: Board) -> None:
    while True:
        try:
            async with asyncio.timeout(BOARD_TIMEOUT_S):
                await board.report(gateway.id, encode(gateway.report(time.time())))
                ages_s = await board.report_ages_s()
            alive = sorted(name for name, age_s in ages_s.items() if age_s <= GATEWAY_GONE_S)
            gateway.refresh(len(alive), alive.index(gateway.id) if gateway.id in alive else 0)
        except Exception as error:
            _log.debug("no report to the board: %s", error)
        await asyncio.sleep(REPORT_PERIOD_S)


async def _follow(gateway: Gateway, board: Board) -> None:
    known: bytes | None = None
    while True:
        try:
            async with asyncio.timeout(BOARD_TIMEOUT_S):
                aged = await board.aged_plan()
        except Exception as error:
            _log.debug("no plan from the board: %s", error)
            aged = None
        if aged is not None and aged[1] != known:
            known = aged[1]  # neither parsed nor complained about twice
            _take(gateway, *aged)
        gateway.refresh()
        await asyncio.sleep(PLAN_PERIOD_S)


def _take(gateway: Gateway, age_s: float, raw: bytes) -> None:
    """Put a received plan in force; one that cannot be read leaves the last one there."""
    try:
        gateway.apply(decode(PlanMessage, raw), age_s)
    except WireError as error:
        _log.warning("a plan was not taken: %s", error)
