"""What is wrong with a file, in words a person can act on. May not do I/O."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing to mend. `line` counts from 1, 0 is none; `key` is empty when the file as a whole is meant."""

    file: str
    line: int
    key: str
    text: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.key}: {self.text}" if self.key else f"{where}: {self.text}"


class Problems(ValueError):
    """Every problem found, in the order of file, line and key."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(sorted(set(problems)))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` for a near miss, otherwise the known words."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(words)}"
