"""The gateway's bench: its client sees what a server sends and when, and bars are read the right way round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from chaos.live.gateway_bench import BARS, missed
from chaos.live.processes import free_ports
from chaos.live.sse import ask, post

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[int]:
    answered = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await talk(reader, writer)
        writer.close()
        await writer.wait_closed()
        answered.set()

    running = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with running:
        yield running.sockets[0].getsockname()[1]
        await asyncio.wait_for(answered.wait(), 5.0)


async def test_events_are_counted_however_the_bytes_are_cut() -> None:
    whole = HEAD + b"".join(b'data: {"n": %d}\n\n' % n for n in range(20)) + b"data: [DONE]\n\n"

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(whole), 7):
            writer.write(whole[at : at + 7])
            await writer.drain()
            await asyncio.sleep(0)

    async with server(drip) as port:
        seen = await ask(port, post("/v1/completions", {"prompt": "a"}))
    assert (seen.status, seen.events, seen.whole) == (200, 21, True)
    assert seen.ttft_s is not None
    assert seen.last_at_s is not None
    assert seen.sent_at_s < seen.sent_at_s + seen.ttft_s <= seen.last_at_s


async def test_a_refusal_an_answer_that_breaks_off_and_no_server_are_told_apart() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\n\r\n{}")

    async def break_off(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"data: {}\n\n")

    async def stall(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)

    request = post("/", {})
    async with server(refuse) as port:
        refused = await ask(port, request)
    assert (refused.status, refused.headers["retry-after"], refused.ttft_s) == (429, "7", None)
    async with server(break_off) as port:
        broken = await ask(port, request)
    assert (broken.status, broken.events, broken.whole) == (200, 1, False)
    async with server(stall) as port:
        assert (await ask(port, request, within_s=0.02)).status == 0
    assert (await ask(free_ports(1)[0], request)).status == 0


def test_a_bar_is_missed_on_its_own_side() -> None:
    good = {name: bar for name, (bar, _) in BARS.items()}
    assert missed(good) == []
    assert missed({}) == []
    worse = {name: bar + (1 if sign == "<=" else -0.1) for name, (bar, sign) in BARS.items()}
    assert len(missed(worse)) == len(BARS)
    assert missed({"peak_fraction": 0.5}) == ["peak_fraction is 0.5, not >= 0.7"]
