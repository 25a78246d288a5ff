"""The load of a live run: a trace's requests laid along a profile, and streaming clients that measure what users get.

May not know the controller. Only ever talks to loopback, with a bounded number of open requests, and is open-loop: a
request is sent when it is due, however slow the answers are; only above `MAX_OPEN` does it wait, and that wait counts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import numpy as np

from chaos.demand import Floats, Rates, Trace
from chaos.report import Outcome
from policies.model import Goal, PolicySet

MAX_OPEN = 256
# How long a caller waits for the next word. Work that may take ten minutes is not broken off after two.
READ_TIMEOUT_S: dict[Goal, float] = {"latency": 120.0, "throughput": 120.0, "cost": 600.0}
PATIENCE_S: dict[Goal, float] = {"latency": 30.0, "throughput": 60.0, "cost": 120.0}  # then a shed request is given up
SHARES: dict[Goal, float] = {"latency": 0.7, "throughput": 0.2, "cost": 0.1}
# Share of the peak rate at a fraction of the run: low, a rise to the plateau, and a fall for the last third.
PROFILE = ((0.0, 0.1), (0.1, 0.25), (0.45, 1.0), (0.68, 1.0), (0.72, 0.1), (1.0, 0.1))
TEXT = "the service answers and waits for a node that can take it while load grows so plan ahead and keep one more"
CHARS_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How a trace is made to fit an engine of this machine: peak rate, and lengths divided, then clipped."""

    peak_rps: float
    input_divisor: float
    output_divisor: float
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def text(self) -> str:
        """What was done to the recorded lengths, for the summary."""
        (low_in, high_in), (low_out, high_out) = self.input_tokens, self.output_tokens
        return (
            f"prompts ÷ {self.input_divisor:g} ({low_in}–{high_in} tokens), answers ÷ {self.output_divisor:g} "
            f"({low_out}–{high_out} tokens), peak {self.peak_rps:g} requests/s"
        )


SIZINGS: dict[Literal["vllm", "sim"], Sizing] = {
    "vllm": Sizing(peak_rps=5.0, input_divisor=10, output_divisor=8, input_tokens=(4, 300), output_tokens=(4, 48)),
    "sim": Sizing(peak_rps=6.0, input_divisor=10, output_divisor=8, input_tokens=(4, 300), output_tokens=(4, 48)),
}


@dataclass(frozen=True, slots=True)
class Send:
    """One request to be sent `at_s` seconds into the run."""

    at_s: float
    service: str
    goal: Goal
    input_tokens: int
    output_tokens: int


def as_requests(trace: Trace | Rates, seed: int, wanted: float) -> Trace:
    """Request rows as they are; rate rows as arrivals, enough of them for `wanted` requests where the rates allow."""
    if isinstance(trace, Trace):
        return trace
    span_s = float(trace.start_s[-1] + trace.bin_s[-1] - trace.start_s[0])
    whole = float(trace.rps @ trace.bin_s)
    scale = min(1.0, 2.0 * wanted / whole) if whole > 0 else 1.0
    return trace.arrivals(seed, duration_s=span_s, scale=scale)


def schedule(trace: Trace, policy: PolicySet, sizing: Sizing, duration_s: float, seed: int) -> tuple[Send, ...]:
    """The run's requests: the first of the trace, in its order and with its burstiness, warped onto `PROFILE`.

    The trace's clock is stretched so that its arrivals fill the profile; a trace that is too short is repeated. Each
    request goes to a service by the goal's share, drawn from `seed`.
    """
    fine_s, filled = _cumulative(sizing, duration_s)
    count = max(1, round(float(filled[-1])))
    laps, index = np.divmod(np.arange(count), len(trace))
    at = trace.at_s[index] + laps * (float(trace.at_s[-1]) + 1.0)
    at = (at - at[0]) / max(float(at[-1] - at[0]), 1e-9) * float(filled[-1]) * count / (count + 1)
    at_s = np.interp(at, filled, fine_s)
    inputs = np.clip(trace.input_tokens[index] / sizing.input_divisor, *sizing.input_tokens).astype(int)
    outputs = np.clip(trace.output_tokens[index] / sizing.output_divisor, *sizing.output_tokens).astype(int)
    services = _services(policy, count, seed)
    return tuple(
        Send(float(when), *services[i], int(inputs[i]), int(outputs[i])) for i, when in enumerate(at_s.tolist())
    )


def expected_requests(sizing: Sizing, duration_s: float) -> float:
    """How many requests a run of `duration_s` sends."""
    return float(_cumulative(sizing, duration_s)[1][-1])


def _cumulative(sizing: Sizing, duration_s: float) -> tuple[Floats, Floats]:
    """Instants of the run, and how many requests the profile has sent by each."""
    at_s = np.linspace(0.0, duration_s, 4096)
    fractions, shares = zip(*PROFILE, strict=True)
    rate_rps = np.interp(at_s / duration_s, fractions, shares) * sizing.peak_rps
    return at_s, np.concatenate([[0.0], np.cumsum(np.diff(at_s) * (rate_rps[1:] + rate_rps[:-1]) / 2)])


def _services(policy: PolicySet, count: int, seed: int) -> list[tuple[str, Goal]]:
    """A service for each request: a goal's share is split evenly among its services."""
    rows = [(key, service.goal) for key, _, service in policy.services()]
    goals = [goal for _, goal in rows]
    weights = np.array([SHARES[goal] / goals.count(goal) for goal in goals])
    picks = np.random.default_rng(seed).choice(len(rows), count, p=weights / weights.sum())
    return [rows[pick] for pick in picks]


def prompt(tokens: int) -> str:
    """Text of roughly `tokens` tokens; the engine's own count is what the report uses."""
    wanted = int(tokens * CHARS_PER_TOKEN)
    return (f"{TEXT}. " * (wanted // len(TEXT) + 1))[:wanted]


def body(send: Send) -> tuple[str, dict[str, Any]]:
    """Path and JSON body: chat for people, completions for batch work. The answer has exactly the length asked for."""
    common: dict[str, Any] = {
        "model": send.service,
        "max_tokens": send.output_tokens,
        "min_tokens": send.output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = prompt(send.input_tokens)
    if send.goal == "cost":
        return "/v1/completions", common | {"prompt": text}
    return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}


class _FailedError(Exception):
    """The request got no whole answer."""


class _ShedError(Exception):
    """The gateway asked to come back later."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"429, retry after {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Stream:
    """What one answer has shown so far."""

    now_s: Callable[[], float]
    first_at_s: float | None = None
    last_at_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0

    def see(self, line: str) -> bool:
        """Take one line of the event stream; True when the answer is whole. Raises _FailedError for an error frame."""
        if not line.startswith("data: "):
            return False
        if line == "data: [DONE]":
            return True
        frame = json.loads(line[6:])
        if "error" in frame:
            raise _FailedError(str(frame["error"].get("message", frame["error"])))
        if usage := frame.get("usage"):
            self.input_tokens, self.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if any(_has_token(choice) for choice in frame.get("choices", ())):
            self.last_at_s = self.now_s()
            self.first_at_s = self.first_at_s if self.first_at_s is not None else self.last_at_s
        return False


def _has_token(choice: Mapping[str, Any]) -> bool:
    """Whether a choice brings a token. Its text may be empty, as half a character has none; chat's first is a role."""
    delta = choice.get("delta")
    return "text" in choice if delta is None else "role" not in delta


@dataclass(slots=True)
class Load:
    """The clients. `outcomes` grows as requests end; `sent` counts those that were due."""

    url: str
    sends: Sequence[Send]
    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0
    now_s: Callable[[], float] = time.time
    _open: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_OPEN))

    @property
    def in_flight(self) -> int:
        """Requests sent and not yet ended."""
        return self.sent - len(self.outcomes)

    async def run(self) -> None:
        """Send every request when it is due, and return when all have ended."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_OPEN)
        start_s = self.now_s()
        async with (
            httpx.AsyncClient(base_url=self.url, limits=limits, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            for send in self.sends:
                await asyncio.sleep(max(0.0, start_s + send.at_s - self.now_s()))
                self.sent += 1
                group.create_task(self._one(client, send, start_s + send.at_s))

    async def _one(self, client: httpx.AsyncClient, send: Send, due_s: float) -> None:
        async with self._open:
            self.outcomes.append(await self._answer(client, send, due_s))

    async def _answer(self, client: httpx.AsyncClient, send: Send, due_s: float) -> Outcome:
        """One request to its end: answered, given up after being shed, or failed."""
        path, content = body(send)
        while True:
            stream = _Stream(self.now_s)
            try:
                timeout = httpx.Timeout(READ_TIMEOUT_S[send.goal], connect=10.0)
                await _post(client, path, content, timeout, stream)
            except _ShedError as error:
                if self.now_s() + error.retry_after_s > due_s + PATIENCE_S[send.goal]:
                    return self._outcome(send, due_s, stream, "shed", str(error))
                await asyncio.sleep(error.retry_after_s)
            except (_FailedError, httpx.HTTPError, ValueError, LookupError) as error:
                return self._outcome(send, due_s, stream, "failed", f"{type(error).__name__}: {error}")
            else:
                return self._outcome(send, due_s, stream, "ok", "")

    def _outcome(
        self, send: Send, due_s: float, seen: _Stream, state: Literal["ok", "shed", "failed"], error: str
    ) -> Outcome:
        first_s, gaps = seen.first_at_s, seen.output_tokens - 1
        return Outcome(
            service=send.service,
            at_s=due_s,
            state=state,
            e2e_s=(seen.last_at_s if state == "ok" else self.now_s()) - due_s,
            ttft_s=None if first_s is None else first_s - due_s,
            tpot_s=(seen.last_at_s - first_s) / gaps if first_s is not None and gaps > 0 else None,
            input_tokens=seen.input_tokens,
            output_tokens=seen.output_tokens,
            error=error,
        )


async def _post(
    client: httpx.AsyncClient, path: str, content: dict[str, Any], timeout: httpx.Timeout, stream: _Stream
) -> None:
    """Send once and read the stream to its end. Raises _ShedError, _FailedError or httpx.HTTPError."""
    async with client.stream("POST", path, json=content, timeout=timeout) as reply:
        if reply.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise _ShedError(float(reply.headers.get("retry-after", "1")))
        if reply.status_code != httpx.codes.OK:
            text = (await reply.aread()).decode(errors="replace")
            raise _FailedError(f"HTTP {reply.status_code}: {text[:300]}")
        async for line in reply.aiter_lines():
            if stream.see(line):
                return
    raise _FailedError("the stream ended before [DONE]")


def errors(outcomes: Iterable[Outcome]) -> list[tuple[str, int]]:
    """Different errors of failed requests with their counts, most frequent first."""
    counts: dict[str, int] = {}
    for seen in outcomes:
        if seen.state == "failed":
            counts[seen.error] = counts.get(seen.error, 0) + 1
    return sorted(counts.items(), key=lambda row: -row[1])
