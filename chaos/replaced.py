"""Parts of the core replaced for a while, in this process's memory only: what breaks and ablations are made of.

May not know what is replaced, or why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Change = tuple[Any, str, Any]  # owner (a module or a class), attribute, what it is meanwhile


@contextmanager
def replaced(changes: Iterable[Change]) -> Iterator[None]:
    """The changes hold within the `with` block."""
    made = list(changes)
    whole = [(owner, attr, getattr(owner, attr)) for owner, attr, _ in made]
    for owner, attr, changed in made:
        setattr(owner, attr, changed)
    try:
        yield
    finally:
        for owner, attr, real in whole:
            setattr(owner, attr, real)
