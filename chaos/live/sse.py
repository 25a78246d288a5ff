"""A client that costs little: one streamed answer over HTTP/1.1, with the instants of what arrived.

For measuring: an ordinary client spends more on a streamed word than what is measured. Loopback only; nothing is
decoded but the head. May not know what the server is.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
EVENT = b"data: "
DONE = b"[DONE]"


@dataclass(slots=True)
class Streamed:
    """One answer. Instants are `time.monotonic()`; `events` counts SSE events, `status` 0 means no answer came."""

    sent_at_s: float
    status: int = 0
    first_at_s: float | None = None
    last_at_s: float | None = None
    events: int = 0
    whole: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first event."""
        return None if self.first_at_s is None else self.first_at_s - self.sent_at_s


class _Reader(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self._head = b""
        self._tail = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answer = Streamed(time.monotonic())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.answer.sent_at_s = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.answer.status:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            self._read_head(head)
        events = (self._tail[-len(EVENT) + 1 :] + data).count(EVENT)
        if events:
            self.answer.last_at_s = time.monotonic()
            if self.answer.first_at_s is None:
                self.answer.first_at_s = self.answer.last_at_s
            self.answer.events += events
        self._tail = (self._tail + data)[-64:]

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.answer.status = int(first.split(" ", 2)[1])
        pairs = (line.partition(":") for line in lines)
        self.answer.headers = {name.lower(): value.strip() for name, _, value in pairs}

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        self.answer.whole = DONE in self._tail
        if not self.ended.done():
            self.ended.set_result(None)


def post(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a POST after whose answer the server closes the connection."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw


async def ask(port: int, request: bytes, within_s: float = 300.0) -> Streamed:
    """Send a request of `post` and read its answer to the end. Never raises for what the server does."""
    loop = asyncio.get_running_loop()
    try:
        transport, reader = await loop.create_connection(lambda: _Reader(request), HOST, port)
    except OSError:
        return Streamed(time.monotonic())
    try:
        async with asyncio.timeout(within_s):
            await reader.ended
    except TimeoutError:
        reader.answer.status = 0
    finally:
        transport.close()
    return reader.answer
