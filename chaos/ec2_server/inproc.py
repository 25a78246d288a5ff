"""The server inside the client's process: botocore's own hook hands each request over, and parses what comes back.

No socket is opened. Whoever waits (a hang, botocore's sleep between attempts) moves the virtual clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import botocore.endpoint
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

from chaos.ec2_server.server import Ec2Server
from chaos.ec2_server.signature import Request


@dataclass
class VirtualClock:
    """Stands still until somebody waits."""

    at_s: float = 1_000_000.0

    def now_s(self) -> float:
        """UTC seconds."""
        return self.at_s

    def advance(self, by_s: float) -> None:
        """Let time pass."""
        self.at_s = round(self.at_s + by_s, 6)


class _Body:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        """The whole body at once."""
        yield self._content


@dataclass
class Switch:
    """Where requests go: `server` may be replaced between tests while clients, which are slow to make, stay."""

    server: Ec2Server | None = None
    clock: VirtualClock | None = None
    timeout_s: float = 5.0

    def attach(self, client: Any) -> None:
        """From now on `client` talks to the server and to nothing else."""
        client.meta.events.register("before-send", self._send)

    def _send(self, request: Any, **_: Any) -> AWSResponse:
        assert self.server is not None
        body = request.body.encode() if isinstance(request.body, str) else request.body or b""
        headers = {name.lower(): _text(value) for name, value in request.headers.items()}
        reply = self.server.handle(Request(request.method, request.url, headers, body))
        if reply.broken == "hang":
            if self.clock is not None:
                self.clock.advance(self.timeout_s)
            raise ReadTimeoutError(endpoint_url=request.url)
        if reply.broken == "lost":
            raise ConnectionClosedError(endpoint_url=request.url)
        return AWSResponse(request.url, reply.status, {"content-type": reply.media}, _Body(reply.body))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@contextmanager
def sleeping_on(clock: VirtualClock) -> Iterator[None]:
    """botocore's sleeps between attempts move the clock, without waiting."""
    real = botocore.endpoint.time
    botocore.endpoint.time = SimpleNamespace(sleep=clock.advance)
    try:
        yield
    finally:
        botocore.endpoint.time = real
