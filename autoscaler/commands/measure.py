"""Drives an OpenAI endpoint with a mix at a few fixed concurrencies, and fits the iteration law to what clients saw.

Bounded in requests, concurrency and time; talks to loopback unless told otherwise. May not know the policy or the
catalogue beyond a prior law. Each prompt begins with words of its own, so that no prefix cache answers for the engine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any
from urllib.parse import urlsplit

import httpx

from autoscaler.commands.outcome import BadInput
from autoscaler.sizing.closed_loop import Law, Load, answer
from autoscaler.sizing.fit import Point, fit

LEVELS = (1, 2, 4, 8)
ROUNDS = 4  # requests a client sends one after the other at each level; the first is not counted
MOST_S = 240.0
REQUEST_S = 120.0
MOST_TOKENS = 512  # of a prompt or an answer: a measurement, not a benchmark
WORDS = ("plan", "node", "load", "wait", "grow", "keep", "time", "size")


@dataclass(frozen=True, slots=True)
class Answered:
    """One request as its client saw it. Seconds and tokens; `tpot_s` is None below two tokens."""

    ttft_s: float
    tpot_s: float | None
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Level:
    """What `concurrency` clients saw: medians over their requests, and the mean lengths the endpoint counted."""

    concurrency: int
    requests: int
    failed: int
    input_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """All levels, the law fitted to them, and the error of its TPOT at each level when that level was left out."""

    levels: tuple[Level, ...]
    law: Law
    tpot_errors: tuple[float, ...]


def check_url(url: str, *, allow_remote: bool) -> None:
    """Raises BadInput unless `url` is a web address, and on this machine where `allow_remote` is not given."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host:
        raise BadInput(f"--measure {url}: is no web address; give one as http://127.0.0.1:8000")
    if not (allow_remote or _is_loopback(host)):
        raise BadInput(
            f"--measure {url}: is not on this machine; measuring puts load on it, so say --allow-remote if it is yours"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def measure(url: str, model: str, input_tokens: float, output_tokens: float, prior: Law) -> Measurement:
    """Levels 1 to 8, and the law they say. Raises BadInput when the endpoint does not answer as OpenAI's would.

    Lengths above 512 tokens are cut to that, in proportion; the law extrapolates. Takes four minutes at most.
    """
    cut = min(1.0, MOST_TOKENS / max(input_tokens, output_tokens))
    prompt, output = max(1, round(cut * input_tokens)), max(2, round(cut * output_tokens))
    levels = asyncio.run(_levels(url.rstrip("/").removesuffix("/v1"), model, prompt, output))
    points = [_point(level) for level in levels]
    errors = []
    for at, level in enumerate(levels):
        rest = points[:at] + points[at + 1 :]
        errors.append(answer(fit(rest, prior), _point(level).load)[1] / level.tpot_s - 1.0)
    return Measurement(levels, fit(points, prior), tuple(errors))


def _point(level: Level) -> Point:
    load = Load(level.input_tokens, level.output_tokens, float(level.concurrency))
    return Point(load, level.ttft_s, level.tpot_s)


async def _levels(url: str, model: str, prompt: int, output: int) -> tuple[Level, ...]:
    found: list[Level] = []
    deadline_s = time.monotonic() + MOST_S
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, timeout=httpx.Timeout(REQUEST_S, connect=5.0)
    ) as client:
        for concurrency in LEVELS:
            if found and time.monotonic() > deadline_s - MOST_S / 4:
                break
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline_s - time.monotonic()):
                    found.append(await _level(client, model, prompt, output, concurrency))
            except TimeoutError:
                if not found:
                    raise BadInput(f"--measure {url}: gave no figures within {MOST_S:g} s; is it overloaded?") from None
                break
    return tuple(found)


async def _level(client: httpx.AsyncClient, model: str, prompt: int, output: int, concurrency: int) -> Level:
    answers: list[Answered] = []
    errors: list[str] = []

    async def caller(number: int) -> None:
        for turn in range(ROUNDS):
            text = _text(prompt, f"{concurrency}.{number}.{turn}")
            try:
                seen = await _ask(client, model, text, output)
            except (httpx.HTTPError, ValueError, LookupError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                continue
            if turn:  # the first finds caches cold and all others starting too
                answers.append(seen)

    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            group.create_task(caller(number))
    speeds = [seen.tpot_s for seen in answers if seen.tpot_s]
    if not speeds:
        why = errors[0] if errors else "answers of fewer than two tokens"
        raise BadInput(f"--measure {client.base_url}: gives no answer to measure ({why[:200]}); check URL and --model")
    return Level(
        concurrency,
        len(answers),
        len(errors),
        mean(seen.input_tokens for seen in answers),
        mean(seen.output_tokens for seen in answers),
        median(seen.ttft_s for seen in answers),
        median(speeds),
    )


def _text(tokens: int, name: str) -> str:
    """About `tokens` tokens of text whose beginning no other request has; the endpoint's own count is what is used."""
    return f"{name} " + " ".join(WORDS[at % len(WORDS)] for at in range(tokens))


async def _ask(client: httpx.AsyncClient, model: str, text: str, output: int) -> Answered:
    """One streamed completion. Raises httpx.HTTPError or ValueError for anything but a whole answer."""
    body = {
        "model": model,
        "prompt": text,
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_s = time.monotonic()
    stamps: list[float] = []
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != httpx.codes.OK:
            raise ValueError(f"HTTP {reply.status_code}: {(await reply.aread()).decode(errors='replace')[:200]}")
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                return _answered(started_s, stamps, usage)
            if line.startswith("data: "):
                frame = json.loads(line[6:])
                usage = frame.get("usage") or usage
                if any("text" in choice for choice in frame.get("choices", ())):
                    stamps.append(time.monotonic())
    raise ValueError("the stream ended before [DONE]")


def _answered(started_s: float, stamps: Sequence[float], usage: dict[str, Any]) -> Answered:
    if not stamps:
        raise ValueError("the answer has no token")
    given, made = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    tpot_s = (stamps[-1] - stamps[0]) / (made - 1) if made > 1 else None
    return Answered(stamps[0] - started_s, tpot_s, given, made)


def served_model(url: str, model: str) -> str:
    """The name under which the endpoint serves: `model` if it lists it, else the only one it has.

    Raises BadInput when it cannot be asked, or has several and not this one.
    """
    base = url.rstrip("/").removesuffix("/v1")
    try:
        reply = httpx.get(f"{base}/v1/models", timeout=5.0, trust_env=False)
        names = [str(row["id"]) for row in reply.raise_for_status().json()["data"]]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise BadInput(f"--measure {url}: does not list its models ({error}); is it an OpenAI endpoint?") from error
    if model in names:
        return model
    if len(names) == 1:
        return names[0]
    raise BadInput(f"--measure {url}: serves {', '.join(names) or 'nothing'}, not {model}; say --served-model")


def lines(found: Measurement) -> Iterable[str]:
    """The measurement in words, one level a line."""
    for level, error in zip(found.levels, found.tpot_errors, strict=True):
        failed = f", {level.failed} failed" if level.failed else ""
        yield (
            f"{level.concurrency} at a time: {level.requests} requests{failed}, {level.input_tokens:.0f} + "
            f"{level.output_tokens:.0f} tokens, TTFT {level.ttft_s * 1e3:.1f} ms, TPOT {level.tpot_s * 1e3:.2f} ms; "
            f"predicted from the other levels {error:+.1%}"
        )
