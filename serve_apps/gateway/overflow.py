"""Somebody else's OpenAI-compatible endpoint, for what own replicas cannot serve in time.

It is trusted only after it has answered a probe, and no longer than TRUST_S after its last good answer; a failure shuts
it out for a while, longer each time. Its API key is read where the policy says, at each use, and goes nowhere else. May
not decide when it is used: that is `admission`'s. May not import Ray.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from serve_apps.admission import share
from serve_apps.wire import OverflowRoute

from .engine import Chunk, EngineFailed

TRUST_S = 60.0
SHUT_MIN_S, SHUT_MAX_S = 15.0, 300.0
CONNECT_S, READ_S = 5.0, 60.0
PROBE_S = 20.0
WINDOW_S = 60.0
OURS_ONLY = ("priority", "request_id", "ignore_eos", "min_tokens")  # what vLLM knows and others refuse

_log = logging.getLogger("ray.serve")


class Endpoint:
    """One endpoint as one service uses it. All methods belong to one event loop.

    `spent` is told the tokens, prompt and answer, of all that was paid for; `opened` is called when trust begins.
    """

    def __init__(
        self,
        route: OverflowRoute,
        *,
        spent: Callable[[int], None],
        opened: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.route = route
        self._spent = spent
        self._opened = opened
        self._now_s = now_s
        timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
        self._client = httpx.AsyncClient(base_url=route.url.rstrip("/"), timeout=timeout, transport=transport)
        self._trusted_until_s = self._shut_until_s = float("-inf")
        self._failures = 0
        self._window = (0, 0)  # number of the minute, requests sent in it
        self._probe: asyncio.Task[None] | None = None

    def take(self, gateways: int = 1, rank: int = 0) -> bool:
        """Whether it takes one more request now; it then counts against the rate limit. Starts a probe if need be."""
        now_s = self._now_s()
        if now_s < self._shut_until_s:
            return False
        if now_s >= self._trusted_until_s:
            if self._probe is None or self._probe.done():
                self._probe = asyncio.create_task(self._ask_first())
            return False
        minute, sent = self._window
        if int(now_s // WINDOW_S) != minute:
            minute, sent = int(now_s // WINDOW_S), 0
        if sent >= share(self.route.rpm, gateways, rank):
            return False
        self._window = (minute, sent + 1)
        return True

    @property
    def trusted(self) -> bool:
        """Whether it has answered lately and is not shut out."""
        return self._shut_until_s <= self._now_s() < self._trusted_until_s

    async def close(self) -> None:
        """No longer used: connections are closed once what is in flight has ended by itself."""
        if self._probe is not None:
            self._probe.cancel()
        await self._client.aclose()

    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The answer to an engine's request, in chunks as an engine's. Raises EngineFailed, after which it is shut."""
        path, body = _asked(self.route.model, request)
        reader = _Reader()
        try:
            async with self._client.stream("POST", path, json=body, headers=self._headers()) as response:
                await _refuse(response)
                async for line in response.aiter_lines():
                    chunk = reader.read(line)
                    if chunk is not None:
                        yield chunk
                        if chunk["finish_reason"]:
                            self._good()
                            return
            raise EngineFailed("the overflow endpoint broke off")
        except (httpx.HTTPError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._bad(error)
            raise EngineFailed(f"overflow: {type(error).__name__}") from None
        except EngineFailed as error:
            self._bad(error)
            raise
        finally:
            self._spent(reader.input_tokens + reader.output_tokens)

    async def _ask_first(self) -> None:
        """One token, through the same door as all that follows."""
        request = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 1}
        try:
            async with asyncio.timeout(PROBE_S), aclosing(self.generate(request)) as chunks:
                async for _ in chunks:
                    pass
        except EngineFailed:
            return  # noted where it was raised
        except TimeoutError as error:
            self._bad(error)
            return
        self._opened()

    def _good(self) -> None:
        self._failures = 0
        self._trusted_until_s = self._now_s() + TRUST_S

    def _bad(self, error: Exception) -> None:
        """Shut it out, for as long as it said if it said so. Its message is not repeated: who knows what it holds."""
        wait_s = error.retry_after_s if isinstance(error, _BusyError) else SHUT_MIN_S * 2**self._failures
        self._failures += 1
        self._shut_until_s = self._now_s() + min(max(wait_s, 1.0), SHUT_MAX_S)
        if not isinstance(error, _BusyError):
            self._trusted_until_s = float("-inf")
        _log.warning("overflow endpoint %s is left alone for a while: %s", self.route.url, type(error).__name__)

    def _headers(self) -> dict[str, str]:
        key = None
        if self.route.key_env is not None:
            key = os.environ[self.route.key_env]
        elif self.route.key_file is not None:
            key = Path(self.route.key_file).read_text().strip()
        return {} if key is None else {"Authorization": f"Bearer {key}"}


class _BusyError(EngineFailed):
    """429: it may be asked again later."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the overflow endpoint is at its limit")
        self.retry_after_s = retry_after_s


async def _refuse(response: httpx.Response) -> None:
    if response.status_code == 429:
        told = response.headers.get("retry-after", "")
        raise _BusyError(float(told) if told.isdigit() else SHUT_MIN_S)
    if response.status_code != 200:
        raise EngineFailed(f"the overflow endpoint answered {response.status_code}")


def _asked(model: str, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Path and body of an engine's request."""
    body = {key: value for key, value in request.items() if key not in OURS_ONLY}
    if "prompt_token_ids" in body:
        body["prompt"] = body.pop("prompt_token_ids")
    body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    return ("/chat/completions" if "messages" in request else "/completions"), body


class _Reader:
    """Reads an answer's SSE lines. Tokens are counted by the chunk until the endpoint says how many there were."""

    def __init__(self) -> None:
        self.input_tokens = 0
        self.output_tokens = 0
        self._reason: str | None = None

    def read(self, line: str) -> Chunk | None:
        """A chunk, or None when the line holds no text. Raises whatever nonsense makes Python raise."""
        if not line.startswith("data:"):
            return None
        data = line[5:].strip()
        if data == "[DONE]":
            if self._reason is None:
                raise EngineFailed("the overflow endpoint ended without a reason")
            return self._chunk("", self._reason)
        event = json.loads(data)
        if event.get("error"):
            raise EngineFailed("the overflow endpoint failed in mid answer")
        if event.get("usage"):
            self.input_tokens = int(event["usage"]["prompt_tokens"])
            self.output_tokens = int(event["usage"]["completion_tokens"])
        return self._choice(event["choices"][0]) if event.get("choices") else None

    def _choice(self, choice: dict[str, Any]) -> Chunk | None:
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        self._reason = choice.get("finish_reason") or self._reason
        if not text:
            return None
        self.output_tokens += 1
        return self._chunk(text, None)

    def _chunk(self, text: str, reason: str | None) -> Chunk:
        return {
            "text": text,
            "output_tokens": self.output_tokens,
            "input_tokens": self.input_tokens,
            "finish_reason": reason,
        }
