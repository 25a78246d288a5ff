"""The board: one small actor where the controller, the gateways, Serve's policies and the nodes leave messages.

It stores bytes and the instant it received them, and nothing else: it may not decide anything or call anybody. Ages are
measured here on a monotonic clock, so no two machines' clocks need to agree, and anything older than `TTL_S` is
forgotten. Losing the board loses nothing: every writer writes again within seconds, every reader keeps what it read. It
lives on the head node, because any other node may be reclaimed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from serve_apps.wire import BOARD_NAME, BOARD_NAMESPACE, NodeReport, decode

TTL_S = 60.0


class Board:
    """The actor's class. Methods are async so that Ray runs it as an async actor: no call ever waits behind another."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._plan: dict[str, tuple[float, bytes]] = {}
        self._reports: dict[str, tuple[float, bytes]] = {}
        self._notes: dict[str, tuple[float, bytes]] = {}

    async def publish(self, message: bytes) -> None:
        """Replace the plan (an encoded PlanMessage)."""
        self._plan["plan"] = (self._clock_s(), message)

    async def plan(self) -> bytes | None:
        """The latest plan, or None when there is none younger than TTL_S."""
        aged = await self.aged_plan()
        return aged[1] if aged else None

    async def aged_plan(self) -> tuple[float, bytes] | None:
        """``(age_s, plan)``: a reader that starts late must not take an old plan for a new one."""
        return self._aged(self._plan).get("plan")

    async def report(self, gateway_id: str, message: bytes) -> None:
        """Replace one gateway's counters (an encoded GatewayReport)."""
        self._reports[gateway_id] = (self._clock_s(), message)

    async def reports(self) -> dict[str, tuple[float, bytes]]:
        """``{gateway_id: (age_s, GatewayReport bytes)}`` of the gateways heard within TTL_S."""
        return self._aged(self._reports)

    async def note(self, message: bytes) -> None:
        """Replace what one node says of itself (an encoded NodeReport). Raises WireError when it is not one."""
        self._notes[decode(NodeReport, message).instance_id] = (self._clock_s(), message)

    async def notes(self) -> dict[str, tuple[float, bytes]]:
        """``{instance_id: (age_s, NodeReport bytes)}`` of the nodes heard within TTL_S."""
        return self._aged(self._notes)

    def _aged(self, entries: dict[str, tuple[float, bytes]]) -> dict[str, tuple[float, bytes]]:
        now_s = self._clock_s()
        for key in [key for key, (at_s, _) in entries.items() if now_s - at_s > TTL_S]:
            del entries[key]
        return {key: (now_s - at_s, message) for key, (at_s, message) in entries.items()}


def get_board(create: bool) -> Any:
    """Handle of the cluster's board actor; with `create`, make it when it is not there (several callers may race).

    Raises ValueError when there is none and `create` is false. The caller must be connected to Ray.
    """
    import ray

    if not create:
        return ray.get_actor(BOARD_NAME, namespace=BOARD_NAMESPACE)
    return (
        ray.remote(Board)
        .options(
            name=BOARD_NAME,
            namespace=BOARD_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
        )
        .remote()
    )
