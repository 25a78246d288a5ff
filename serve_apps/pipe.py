"""Chunks of answers from engines to gateways: one TCP connection a pair of processes, whatever number of answers is on.

A request travels through Serve, which picks the replica, counts it and cancels it; only what the engine says comes this
way, because a message of Serve's costs more than the token in it (docs/decisions.md). A gateway names its address and a
secret key per request in `reply_to`; frames with a key that is not known are not read. Where no connection can be made,
the chunks go back through Serve. May not know of Ray, HTTP or policies.

Frame: length, key, output, input and cached tokens, length of the reason, reason, text; integers big-endian.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, cast

Chunk = dict[str, Any]

HEAD = struct.Struct("!I16sIIIB")
MAX_FRAME = 2**20
CONNECT_S = 2.0
FULL_BYTES = 2**18  # unsent bytes from which on a writer waits
LAST_WAIT_S = 5.0  # for chunks that are still on their way when Serve says that the answer is over


def pack(key: bytes, chunk: Chunk) -> bytes:
    """One frame."""
    reason, text = (chunk["finish_reason"] or "").encode(), chunk["text"].encode()
    size = HEAD.size + len(reason) + len(text)
    tokens = chunk["output_tokens"], chunk["input_tokens"], chunk.get("cached_tokens", 0)
    return b"".join((HEAD.pack(size, key, *tokens, len(reason)), reason, text))


# ---- the gateway's side ---------------------------------------------------------------------------------------------
class Inbox:
    """The chunks of one answer as they come. `close` when they are no longer wanted."""

    def __init__(self, pipe: Pipe, key: bytes) -> None:
        self._pipe = pipe
        self._key = key
        self._chunks: deque[Chunk] = deque()
        self._woken: asyncio.Future[None] | None = None
        self.lost = False

    @property
    def reply_to(self) -> tuple[str, int, str]:
        """What the request says, so that the chunks come here."""
        return (*self._pipe.address, self._key.hex())

    def put(self, chunk: Chunk) -> None:
        """A chunk has come."""
        self._chunks.append(chunk)
        self._wake()

    def break_off(self) -> None:
        """The connection that chunks came from is gone."""
        self.lost = True
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def take(self) -> Chunk | None:
        """The next chunk that is here."""
        return self._chunks.popleft() if self._chunks else None

    async def _wait(self) -> None:
        if not self._chunks and not self.lost:
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken

    async def merged(self, through_serve: AsyncIterator[Chunk]) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer, whichever way they come, until it is over. Serve's stream says when that is, and
        why; it fails as Serve's does, and with ConnectionError when the pipe broke.
        """
        said: asyncio.Future[Chunk | None] = self._next(through_serve)
        try:
            while True:
                chunk = self.take()
                if chunk is None and said.done():
                    chunk = said.result()
                    if chunk is None:
                        chunk = await self._straggler()
                    else:
                        said = self._next(through_serve)
                if chunk is not None:
                    yield chunk
                    if chunk["finish_reason"]:
                        await asyncio.wait({said}, timeout=LAST_WAIT_S)  # Serve has to count it as ended
                        return
                elif self.lost:
                    raise ConnectionError("the engine has closed its connection")
                elif not said.done():
                    await self._wait()
                else:
                    return
        finally:
            said.cancel()
            if not said.done():
                await asyncio.wait({said})

    def _next(self, through_serve: AsyncIterator[Chunk]) -> asyncio.Future[Chunk | None]:
        said: asyncio.Future[Chunk | None] = asyncio.ensure_future(anext(through_serve, None))
        said.add_done_callback(self._heard)
        return said

    def _heard(self, said: asyncio.Future[Chunk | None]) -> None:
        if not said.cancelled():
            said.exception()  # whoever waits for it reads it; if nobody does any more, that is all right
        self._wake()

    async def _straggler(self) -> Chunk | None:
        """A chunk that is still on its way when Serve says that the answer is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WAIT_S):
                await self._wait()
        return self.take()

    def close(self) -> None:
        """No more chunks are read."""
        self._pipe.forget(self._key)


class Pipe:
    """Listens for engines. All methods belong to one event loop."""

    def __init__(self) -> None:
        self.address = ("", 0)
        self._inboxes: dict[bytes, Inbox] = {}
        self._engines: set[asyncio.BaseTransport] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> None:
        """Open a port on that address. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Reader(self._inboxes, self._engines), host, 0)
        self.address = (host, self._server.sockets[0].getsockname()[1])

    def open(self) -> Inbox:
        """A new inbox."""
        key = secrets.token_bytes(16)
        inbox = self._inboxes[key] = Inbox(self, key)
        return inbox

    def forget(self, key: bytes) -> None:
        """What still comes for that key is dropped."""
        self._inboxes.pop(key, None)

    def close(self) -> None:
        """Stop listening, and hang up on all engines."""
        if self._server is not None:
            self._server.close()
        for transport in tuple(self._engines):
            transport.close()


class _Reader(asyncio.Protocol):
    def __init__(self, inboxes: dict[bytes, Inbox], engines: set[asyncio.BaseTransport]) -> None:
        self._inboxes = inboxes
        self._engines = engines
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None
        self._mine: set[bytes] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._engines.add(transport)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= HEAD.size:
            size, key, made, read, cached, reason_size = HEAD.unpack_from(data, at)
            if not HEAD.size + reason_size <= size <= MAX_FRAME:
                return self._refuse()
            if end - at < size:
                break
            inbox = self._inboxes.get(key)
            if inbox is not None:
                body = at + HEAD.size
                reason = data[body : body + reason_size].decode()
                text = data[body + reason_size : at + size].decode()
                self._mine.add(key)
                if reason:
                    self._mine.discard(key)
                chunk = {"text": text, "output_tokens": made, "input_tokens": read, "finish_reason": reason or None}
                inbox.put(chunk | {"cached_tokens": cached} if cached else chunk)
            at += size
        self._rest = data[at:]
        return None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        if self._transport is not None:
            self._engines.discard(self._transport)
        for key in self._mine:
            inbox = self._inboxes.get(key)
            if inbox is not None:
                inbox.break_off()

    def _refuse(self) -> None:
        self._rest = b""
        if self._transport is not None:
            self._transport.close()


# ---- the engine's side ----------------------------------------------------------------------------------------------
class _Writer(asyncio.Protocol):
    """One connection to a gateway. What is sent in one turn of the loop leaves in one write."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._frames: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, under Serve, is none by inheritance
        self._transport.set_write_buffer_limits(high=FULL_BYTES)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        self.lost = True
        self._room.set()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    async def send(self, frame: bytes) -> None:
        """Raises ConnectionError when the gateway is gone."""
        if self.lost:
            raise ConnectionError("the gateway has closed its connection")
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(frame)
        if not self._room.is_set():
            await self._room.wait()

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if self._transport is not None and not self.lost:
            self._transport.write(b"".join(frames))


class Outbox:
    """An engine's connections to gateways."""

    def __init__(self) -> None:
        self._writers: dict[tuple[str, int], asyncio.Task[_Writer | None]] = {}

    async def deliver(
        self, request: dict[str, Any], chunks: AsyncGenerator[Chunk, None]
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks, sent where the request says; yielded where it says nothing or there is no way there."""
        reply_to = request.get("reply_to")
        writer = await self._writer(reply_to) if reply_to else None
        async with aclosing(chunks):
            if writer is None or reply_to is None:
                async for chunk in chunks:
                    yield chunk
                return
            key = bytes.fromhex(reply_to[2])
            async for chunk in chunks:
                await writer.send(pack(key, chunk))

    def close(self) -> None:
        """Hang up on all gateways."""
        for task in self._writers.values():
            if task.done() and not task.cancelled() and (writer := task.result()) is not None:
                writer.close()
            task.cancel()

    async def _writer(self, reply_to: tuple[str, int, str]) -> _Writer | None:
        address = (str(reply_to[0]), int(reply_to[1]))
        known = self._writers.get(address)
        if known is None or (known.done() and ((found := known.result()) is None or found.lost)):
            known = self._writers[address] = asyncio.ensure_future(_connect(*address))
        return await asyncio.shield(known)


async def _connect(host: str, port: int) -> _Writer | None:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.get_running_loop().create_connection(_Writer, host, port)
    except (OSError, TimeoutError):
        return None
    return writer
