"""Drives an OpenAI endpoint with a mix at a few fixed concurrencies, and fits the iteration law to what clients saw.

Bounded in requests, concurrency and time; talks to loopback unless told otherwise. May not know the policy or the
catalogue beyond a prior law. Each prompt begins with words of its own, so that no prefix cache answers for the engine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any
from urllib.parse import urlsplit

import httpx

from autoscaler.commands.outcome import BadInput
from autoscaler.sizing.closed_loop import Law, Load, answer
from autoscaler.sizing.fit import Point, fit

LEVELS = (1, 2, 4, 8)
PASSES = 12  # through all levels, up and down, so that what drifts meanwhile does not look like a law
REQUESTS = 6  # of a level and pass at least; a client sends three at least, of which the first is not counted
POLISHES = 10
MOST_S = 240.0
LEVEL_S = MOST_S / (PASSES * len(LEVELS) + 2)
REQUEST_S = 120.0
WAY_S = 0.02  # to begin with: HTTP, a proxy, a gateway; there the law of the engine alone would look for it in prefills
DOUBT = 3.0  # the endpoint's machine may be any: what it shows outweighs the catalogue
AT_ONCE_S = 0.001  # no step of an engine is as short: frames this close were sent earlier and held up together
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
    """What `concurrency` clients saw in the typical pass, and the mean lengths the endpoint counted."""

    concurrency: int
    requests: int
    failed: int
    input_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """All levels, the law fitted to them, and what it says of each: seconds, (TTFT, TPOT).

    `unseen` is the same from a law that was fitted without the level.
    """

    levels: tuple[Level, ...]
    law: Law
    said: tuple[tuple[float, float], ...]
    unseen: tuple[tuple[float, float], ...]


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


def measure(
    url: str, model: str, input_tokens: float, output_tokens: float, prior: Law, passes: int = PASSES
) -> Measurement:
    """Levels 1 to 8, and the law they say. Raises BadInput when the endpoint does not answer as OpenAI's would.

    Lengths above 512 tokens are cut to that, in proportion; the law extrapolates. Takes four minutes at most.
    """
    cut = min(1.0, MOST_TOKENS / max(input_tokens, output_tokens))
    prompt, output = max(1, round(cut * input_tokens)), max(2, round(cut * output_tokens))
    levels = asyncio.run(_levels(url.rstrip("/").removesuffix("/v1"), model, prompt, output, passes))
    points = [_point(level) for level in levels]
    law = law_of(points, prior)
    others = [law_of(points[:at] + points[at + 1 :], prior) for at in range(len(points))]
    return Measurement(
        levels,
        law,
        tuple(answer(law, point.load) for point in points),
        tuple(answer(other, point.load) for other, point in zip(others, points, strict=True)),
    )


def law_of(points: Sequence[Point], prior: Law) -> Law:
    """The law that explains the points best, with the requests that it lets run at a time, which no endpoint tells."""
    slots = sorted({min(level, prior.timing.max_num_seqs) for level in (*LEVELS, prior.timing.max_num_seqs)})
    prior = replace(prior, way_s=WAY_S)
    laws = [fit(points, replace(prior, timing=replace(prior.timing, max_num_seqs=n)), doubt=DOUBT) for n in slots]
    return min(reversed(laws), key=lambda law: sum(_miss(law, point) for point in points))


def _miss(law: Law, point: Point) -> float:
    ttft_s, tpot_s = answer(law, point.load)
    pairs = ((ttft_s, point.ttft_s), (tpot_s, point.tpot_s))
    return sum(abs(math.log(said / seen)) for said, seen in pairs if seen is not None)


def _point(level: Level) -> Point:
    load = Load(level.input_tokens, level.output_tokens, float(level.concurrency))
    return Point(load, level.ttft_s, level.tpot_s)


async def _levels(url: str, model: str, prompt: int, output: int, passes: int) -> tuple[Level, ...]:
    """Each level's requests of all passes. What time does not suffice for is left out, larger levels first."""
    seen: dict[tuple[int, int], list[Answered]] = {}
    errors: dict[int, list[str]] = {}
    ends_s = time.monotonic() + MOST_S
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, timeout=httpx.Timeout(REQUEST_S, connect=5.0)
    ) as client:
        try:
            async with asyncio.timeout(MOST_S):
                words = await _words(client, model, prompt, output)
                for turn in range(passes):
                    for level in LEVELS if turn % 2 == 0 else LEVELS[::-1]:
                        if time.monotonic() > ends_s - LEVEL_S:
                            break
                        answers, failed = await _level(client, model, words, output, level, turn)
                        seen[level, turn] = answers
                        errors.setdefault(level, []).extend(failed)
        except TimeoutError:
            pass
    found = _summaries(seen, errors)
    if not found:
        first = next((text for texts in errors.values() for text in texts), f"no whole answer within {MOST_S:g} s")
        raise BadInput(f"--measure {url}: gives no answer to measure ({first[:200]}); check URL and --model")
    return found


async def _words(client: httpx.AsyncClient, model: str, prompt: int, output: int) -> int:
    """How many words make `prompt` tokens there. Also wakes the engine: its first answers are not like the others."""
    counted = 0
    for turn in range(2):
        try:
            seen = await _ask(client, model, _text(prompt, f"first.{turn}"), output)
        except (httpx.HTTPError, ValueError, LookupError):
            return prompt  # the levels will say what is wrong
        counted = seen.input_tokens
    return max(1, round(prompt * prompt / max(1, counted)))


async def _level(
    client: httpx.AsyncClient, model: str, words: int, output: int, concurrency: int, turn: int
) -> tuple[list[Answered], list[str]]:
    """What `concurrency` clients see that each send one request after the other; and errors, in words."""
    answers: list[Answered] = []
    errors: list[str] = []
    ends_s = time.monotonic() + LEVEL_S

    async def caller(number: int) -> None:
        for at in range(max(3, REQUESTS // concurrency)):
            if at >= 2 and time.monotonic() > ends_s:
                return
            try:
                seen = await _ask(client, model, _text(words, f"{turn}.{concurrency}.{number}.{at}"), output)
            except (httpx.HTTPError, ValueError, LookupError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                continue
            if at:  # at the first, all others start too
                answers.append(seen)

    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            group.create_task(caller(number))
    return answers, errors


def _summaries(
    seen: Mapping[tuple[int, int], Sequence[Answered]], errors: Mapping[int, Sequence[str]]
) -> tuple[Level, ...]:
    """Every level whose tokens could be timed, from the answers by level and pass."""
    whole = {key: answers for key, answers in seen.items() if answers}
    timed = {key: [one.tpot_s for one in answers if one.tpot_s] for key, answers in whole.items()}
    ttfts = polished({key: median(one.ttft_s for one in answers) for key, answers in whole.items()})
    tpots = polished({key: median(times) for key, times in timed.items() if times})
    found = []
    for level in sorted(tpots):
        answers = [one for (concurrency, _), rows in whole.items() if concurrency == level for one in rows]
        inputs, outputs = mean(one.input_tokens for one in answers), mean(one.output_tokens for one in answers)
        found.append(
            Level(level, len(answers), len(errors.get(level, ())), inputs, outputs, ttfts[level], tpots[level])
        )
    return tuple(found)


def polished(values: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """What each level takes in the typical pass, from positive values by (level, pass): Tukey's median polish in logs.

    What all levels of a pass have in common, as the load of the machine's other work, is the pass's and no level's.
    """
    left = {key: math.log(value) for key, value in values.items()}
    level_of, pass_of = ({key[at]: 0.0 for key in left} for at in (0, 1))
    for _ in range(POLISHES):
        for at, effects in ((1, pass_of), (0, level_of)):
            for name in effects:
                alike = [key for key in left if key[at] == name]
                step = median(left[key] for key in alike)
                effects[name] += step
                left |= {key: left[key] - step for key in alike}
    typical = median(pass_of.values()) if pass_of else 0.0
    return {level: math.exp(effect + typical) for level, effect in level_of.items()}


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
    frames: list[tuple[float, int]] = []
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != httpx.codes.OK:
            raise ValueError(f"HTTP {reply.status_code}: {(await reply.aread()).decode(errors='replace')[:200]}")
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                return answered(started_s, frames, usage)
            if line.startswith("data: "):
                frame = json.loads(line[6:])
                usage = frame.get("usage") or usage
                texts = [choice["text"] for choice in frame.get("choices", ()) if "text" in choice]
                if texts:
                    frames.append((time.monotonic(), sum(map(len, texts))))
    raise ValueError("the stream ended before [DONE]")


def answered(started_s: float, frames: Sequence[tuple[float, int]], usage: Mapping[str, Any]) -> Answered:
    """What the frames of one stream say, as (arrival in seconds, letters), with the endpoint's own counts of tokens.

    A frame may hold several tokens, and several may arrive at once where one waited on its way: what came with the
    first took no time that was seen, so TPOT counts the tokens after it, by their share of the text.
    Raises ValueError without a frame.
    """
    if not frames:
        raise ValueError("the answer has no token")
    given, made = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    first_s, last_s = frames[0][0], frames[-1][0]
    letters = sum(count for _, count in frames)
    at_once = sum(count for at_s, count in frames if at_s - first_s < AT_ONCE_S)
    after = min(made - 1.0, made * (1.0 - at_once / letters)) if letters else made - 1.0
    return Answered(first_s - started_s, (last_s - first_s) / after if after >= 1.0 else None, given, made)


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
