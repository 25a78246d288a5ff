"""An engine without a model: vLLM's timing law in real time, its interface and metric names, for clusters without GPUs.

`batching` says who runs and how long each step takes; this module waits those steps out, streams words for tokens
and exports vLLM's series through Ray. It may not import numpy, torch or vLLM: thirty of these share a small machine.
Tokens are words here (long words count once more per eight bytes), so the tiny model's prompts weigh about the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any
from zlib import crc32

from serve_apps.batching import Batch, Sequence
from serve_apps.engine_args import EngineArgs, parse
from serve_apps.pipe import Outbox
from serve_apps.sim_metrics import SimMetrics
from serve_apps.timing import Timing
from serve_apps.wire import LLM_DEPLOYMENT

# A loop that was kept from the processor catches up at most this much; what is beyond shows as slower service.
CATCH_UP_S = 0.25
EXPORT_EVERY_S = 1.0
DEFAULT_MAX_TOKENS = 256
WORDS = (
    "the",
    "model",
    "read",
    "what",
    "you",
    "asked",
    "and",
    "takes",
    "as",
    "long",
    "to",
    "say",
    "nothing",
    "as",
    "it",
    "should",
)


class Stream:
    """One request as its caller sees it: the sequence, and two moments to wait for."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.first = asyncio.Event()
        self.done = asyncio.Event()


class SimEngine:
    """Runs a Batch in real time (or another: `clock_s` and `sleep` are given). All methods belong to one event loop."""

    def __init__(
        self,
        timing: Timing,
        *,
        time_scale: float = 1.0,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_finish: Callable[[Sequence], None] = lambda _: None,
        on_step: Callable[[Batch, float], None] = lambda _, __: None,
    ) -> None:
        self.batch = Batch(timing)
        self._time_scale = time_scale
        self._clock_s = clock_s
        self._sleep = sleep
        self._on_finish = on_finish
        self._on_step = on_step
        self._streams: dict[Sequence, Stream] = {}
        self._work = asyncio.Event()

    def submit(self, request_id: str, input_tokens: int, max_tokens: int, priority: int) -> Stream:
        """Queue a request. Raises ValueError when its prompt can never fit."""
        sequence = Sequence(
            request_id=request_id,
            input_tokens=input_tokens,
            max_tokens=max_tokens,
            priority=priority,
            arrived_at_s=self._clock_s(),
        )
        self.batch.add(sequence)
        stream = self._streams[sequence] = Stream(sequence)
        self._work.set()
        return stream

    def withdraw(self, stream: Stream) -> None:
        """Forget a request whose caller has gone; no-op when it has finished."""
        self.batch.abort(stream.sequence)
        self._streams.pop(stream.sequence, None)

    async def run(self) -> None:
        """Step for ever. Steps follow each other on the law's schedule, not on when the loop got round to them."""
        due_s = self._clock_s()
        while True:
            duration_s = self.batch.start_step(self._clock_s())
            if duration_s is None:
                self._work.clear()
                await self._work.wait()
                due_s = self._clock_s()
                continue
            began_s = due_s
            due_s = max(due_s + duration_s / self._time_scale, self._clock_s() - CATCH_UP_S)
            await self._sleep(max(0.0, due_s - self._clock_s()))
            self._on_step(self.batch, due_s - began_s)
            self._tell(self.batch.end_step(due_s))

    def _tell(self, served: list[Sequence]) -> None:
        for sequence in served:
            stream = self._streams.get(sequence)
            if stream is None:
                continue
            stream.first.set()
            if sequence.finished_at_s is not None:
                stream.done.set()
                del self._streams[sequence]
                self._on_finish(sequence)


class SimLLM:
    """The deployment class. `args` as `engine_args.EngineArgs`; the constructor takes `load_s`, as loading would."""

    def __init__(self, args: dict[str, Any]) -> None:
        from ray import serve

        self._args = parse(args)
        time.sleep(self._args.load_s / self._args.time_scale)
        self._metrics = SimMetrics(self._args.model, serve.get_replica_context().replica_id.unique_id)
        self._engine = SimEngine(
            self._args.shape(),
            time_scale=self._args.time_scale,
            on_finish=self._metrics.finished,
            on_step=self._metrics.stepped,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._number = 0
        self._outbox = Outbox()

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer one request in pieces ``{"text", "output_tokens" so far, "input_tokens", "finish_reason"}``.

        `request`: "prompt", "prompt_token_ids" or "messages", and "max_tokens", "priority" (lower first),
        "request_id", "reply_to" (see `pipe`); the other sampling
        fields have no effect on words without meaning. Raises ValueError for a prompt that can never fit.
        """
        async with aclosing(self._outbox.deliver(request, self._answer(request))) as pieces_here:
            async for piece in pieces_here:
                yield piece

    async def _answer(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self._start()
        tokens = request.get("prompt_token_ids")
        text = prompt_text(request) if tokens is None else repr(tokens)
        self._number += 1
        stream = self._engine.submit(
            str(request.get("request_id") or self._number),
            count_tokens(text) if tokens is None else len(tokens),
            int(request.get("max_tokens") or DEFAULT_MAX_TOKENS),
            int(request.get("priority") or 0),
        )
        try:
            async for piece in pieces(stream, crc32(text.encode()), self._args.stream_every_s):
                yield piece
        finally:
            self._engine.withdraw(stream)

    async def check_health(self) -> None:
        """Raises RuntimeError when the step loop has died."""
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"the engine has stopped: {task!r}")

    def _start(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._engine.run()), asyncio.create_task(self._export())]

    async def _export(self) -> None:
        while True:
            self._metrics.export(self._engine.batch)
            await asyncio.sleep(EXPORT_EVERY_S)


async def pieces(stream: Stream, seed: int, every_s: float) -> AsyncIterator[dict[str, Any]]:
    """The answer as it comes: the first token at once, then every `every_s`, then the rest at once with the reason."""
    sequence, sent = stream.sequence, 0
    await stream.first.wait()
    while sent < sequence.max_tokens:
        upto = sequence.output_tokens
        if upto > sent:
            yield {
                "text": answer(seed, sent, upto),
                "output_tokens": upto,
                "input_tokens": sequence.input_tokens,
                "finish_reason": "length" if sequence.finished_at_s is not None else None,
            }
            sent = upto
        if sequence.finished_at_s is None:
            try:
                await asyncio.wait_for(stream.done.wait(), every_s)
            except TimeoutError:
                continue


def answer(seed: int, start: int, end: int) -> str:
    """Words `start` to `end` of the answer to the prompt with this checksum: the same prompt gets the same answer."""
    return "".join(f"{' ' if number else ''}{WORDS[(seed + number) % len(WORDS)]}" for number in range(start, end))


def prompt_text(request: dict[str, Any]) -> str:
    """The text the model would read. Raises ValueError when the request holds neither "prompt" nor "messages"."""
    if request.get("prompt") is not None:
        return str(request["prompt"])
    if request.get("messages"):
        return "\n".join(f"{one.get('role', 'user')}: {one.get('content') or ''}" for one in request["messages"])
    raise ValueError('the request holds neither "prompt" nor "messages"')


def count_tokens(text: str) -> int:
    """Words, or an eighth of the bytes when that is more (text without spaces); at least one."""
    return max(1, len(text.split()), len(text.encode()) // 8)


def build(args: dict[str, Any]) -> Any:
    """The Serve application of one engine variant. Raises ValueError that names every wrong argument."""
    from ray import serve

    checked: EngineArgs = parse(args)
    timing = checked.shape()
    return serve.deployment(SimLLM, name=LLM_DEPLOYMENT, max_ongoing_requests=2 * timing.max_num_seqs).bind(args)
