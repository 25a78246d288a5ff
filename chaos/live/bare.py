"""The simulated engine as a bare Serve ingress: what the gateway is measured against. Does nothing else.

The engine runs in the ingress's own process, and frames like the gateway's are written without a look at the request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from serve_apps.engine_sim import SimLLM
from serve_apps.gateway.openai import DONE

HEAD = b'data: {"id": "cmpl-0123456789abcdef0123456789ab", "object": "text_completion", "created": 1, "model": "u/s"'
OPEN, CLOSE = b', "choices": [{"index": 0, "text": ', b', "logprobs": null, "finish_reason": null}]}\n\n'


class Bare:
    """`args` as for the engine's own application."""

    def __init__(self, args: dict[str, Any]) -> None:
        self._engine = SimLLM(args)

    async def __call__(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self._frames(await request.json()), media_type="text/event-stream")

    async def _frames(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for piece in self._engine.generate(body):
            yield HEAD + OPEN + json.dumps(piece["text"]).encode() + CLOSE
        yield DONE


def build(args: dict[str, Any]) -> Any:
    """The Serve application."""
    return serve.deployment(Bare, name="Bare", max_ongoing_requests=10_000).bind(args)
