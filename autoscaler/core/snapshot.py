"""Beliefs as one JSON string, so that a restart need not fold more than the newest segment of the journal.

Pure; may not do I/O.
"""

from __future__ import annotations

from pydantic import TypeAdapter

from .beliefs import Beliefs

_BELIEFS: TypeAdapter[Beliefs] = TypeAdapter(Beliefs)


def save(beliefs: Beliefs) -> str:
    """Every belief; `restore` gives an equal value."""
    return _BELIEFS.dump_json(beliefs).decode()


def restore(text: str) -> Beliefs:
    """The beliefs that `save` wrote. Raises pydantic.ValidationError for another shape."""
    return _BELIEFS.validate_json(text)
