"""What the gateway expects of whoever answers: chunks, two ways to fail, and that leaving early stops the work."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

# {"text": delta, "output_tokens": so far, "input_tokens": n, "finish_reason": str | None} and, where the engine says,
# "cached_tokens": those of the prompt that it found in its prefix cache.
Chunk = dict[str, Any]


class EngineFailed(Exception):
    """The engine, its replica or the way to it failed; another replica may do better."""


class EngineRefused(Exception):
    """The engine found the request itself invalid (longer than its context, say)."""


class Backend(Protocol):
    """The engines. An answer that is closed early must stop the engine's work on it."""

    def generate(self, app: str, request: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer from some replica of `app`. Raises EngineFailed, EngineRefused."""
        ...
