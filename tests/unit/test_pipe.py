"""Chunks from engines to gateways over one connection: order, ends, what breaks, and who is not listened to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps import pipe
from serve_apps.pipe import HEAD, Inbox, Outbox, Pipe, _Reader, pack


def chunk(n: int, last: bool = False, text: str = "wörd ") -> dict[str, Any]:
    return {"text": f"{text}{n}", "output_tokens": n, "input_tokens": 3, "finish_reason": "stop" if last else None}


async def words(count: int, *, then: Exception | None = None) -> AsyncGenerator[dict[str, Any], None]:
    for n in range(1, count + 1):
        yield chunk(n, last=n == count and then is None)
        await asyncio.sleep(0)
    if then is not None:
        raise then


@pytest.fixture
async def door() -> AsyncIterator[Pipe]:
    listening = Pipe()
    await listening.listen("127.0.0.1")
    yield listening
    listening.close()


@pytest.fixture
async def engine() -> AsyncIterator[Outbox]:
    made = Outbox()
    yield made
    made.close()
    await asyncio.sleep(0.01)  # both ends notice


async def all_of(inbox: Inbox, through_serve: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    async with asyncio.timeout(5.0):
        return [one async for one in inbox.merged(through_serve)]


async def test_many_answers_come_over_one_connection_each_whole_and_in_order(door: Pipe, engine: Outbox) -> None:
    inboxes = [door.open() for _ in range(20)]
    answers = [engine.deliver({"reply_to": inbox.reply_to}, words(30)) for inbox in inboxes]
    got = await asyncio.gather(*(all_of(i, a) for i, a in zip(inboxes, answers, strict=True)))
    assert got == [[chunk(n, last=n == 30) for n in range(1, 31)]] * 20
    assert len(engine._writers) == 1


async def test_without_a_way_there_chunks_come_through_serve(door: Pipe) -> None:
    inbox = door.open()
    host, port, key = inbox.reply_to
    door.close()
    await asyncio.sleep(0)
    for request in ({"reply_to": (host, port, key)}, {}):
        assert await all_of(inbox, Outbox().deliver(request, words(3))) == [chunk(1), chunk(2), chunk(3, last=True)]


async def test_an_engine_that_fails_says_so_after_what_it_had_sent(door: Pipe, engine: Outbox) -> None:
    inbox = door.open()
    broken = words(2, then=ValueError("too long"))
    with pytest.raises(ValueError, match="too long"):
        await all_of(inbox, engine.deliver({"reply_to": inbox.reply_to}, broken))


async def nothing() -> AsyncGenerator[dict[str, Any], None]:
    for n in range(0):
        yield chunk(n)


async def test_a_last_chunk_that_is_slower_than_serve_is_waited_for(
    door: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = door.open()
    reading = asyncio.create_task(all_of(inbox, nothing()))
    await asyncio.sleep(0.01)
    inbox.put(chunk(1, last=True))
    assert await reading == [chunk(1, last=True)]
    monkeypatch.setattr(pipe, "LAST_WAIT_S", 0.01)
    assert await all_of(door.open(), nothing()) == [], "an answer that just stops is not waited for, for ever"


async def test_a_broken_connection_ends_the_answers_that_came_over_it(door: Pipe, engine: Outbox) -> None:
    async def endless() -> AsyncGenerator[dict[str, Any], None]:
        yield chunk(1)
        await asyncio.sleep(60)

    inbox, other = door.open(), door.open()
    merged = inbox.merged(engine.deliver({"reply_to": inbox.reply_to}, endless()))
    assert await anext(merged) == chunk(1)
    writer = await engine._writer(inbox.reply_to)
    assert writer is not None
    writer.close()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(anext(merged), 5.0)
    assert not other.lost
    assert await all_of(other, engine.deliver({"reply_to": other.reply_to}, words(1))) == [chunk(1, last=True)]


async def test_a_caller_who_leaves_closes_the_engines_answer(door: Pipe, engine: Outbox) -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[dict[str, Any], None]:
        try:
            while True:
                yield chunk(1)
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    inbox = door.open()
    served = engine.deliver({"reply_to": inbox.reply_to}, endless())
    merged = inbox.merged(served)
    await anext(merged)
    await merged.aclose()
    inbox.close()
    await asyncio.wait_for(closed.wait(), 5.0)
    assert not door._inboxes


class Closing(asyncio.Transport):
    closed = False

    def close(self) -> None:
        self.closed = True


@given(st.lists(st.tuples(st.text(max_size=20), st.booleans()), max_size=8), st.integers(1, 40))
def test_frames_are_read_however_they_are_cut(texts: list[tuple[str, bool]], step: int) -> None:
    async def check() -> None:
        door = Pipe()
        inbox = door.open()
        key = bytes.fromhex(inbox.reply_to[2])
        sent = [chunk(n, last, text) for n, (text, last) in enumerate(texts)]
        sent = [one | {"cached_tokens": n} if n else one for n, one in enumerate(sent)]
        raw = b"".join(pack(key, one) for one in sent) + pack(bytes(16), chunk(1))  # the last is nobody's
        reader = _Reader(door._inboxes, set())
        for at in range(0, len(raw), step):
            reader.data_received(raw[at : at + step])
        assert [inbox.take() for _ in sent] == sent
        assert inbox.take() is None

    asyncio.run(check())


@pytest.mark.parametrize("head", [(2**31, 0), (0, 0), (HEAD.size, 9)])
async def test_nonsense_is_hung_up_on(head: tuple[int, int]) -> None:
    transport = Closing()
    reader = _Reader({}, set())
    reader.connection_made(transport)
    reader.data_received(HEAD.pack(head[0], bytes(16), 1, 1, 0, head[1]) + b"x" * 100)
    assert transport.closed


def test_it_works_on_the_event_loop_that_serve_uses() -> None:
    import uvloop

    async def check() -> list[dict[str, Any]]:
        door, engine = Pipe(), Outbox()
        await door.listen("127.0.0.1")
        inbox = door.open()
        try:
            got = await all_of(inbox, engine.deliver({"reply_to": inbox.reply_to}, words(3)))
            assert len(engine._writers) == 1
        finally:
            engine.close()
            door.close()
            await asyncio.sleep(0.01)
        return got

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(check()) == [chunk(1), chunk(2), chunk(3, last=True)]
