"""What is wrong with a file, in words a person can act on. May not do I/O."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

Path = tuple[str | int, ...]
MOST_SHOWN = 1200  # characters of a key or a text


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing to mend. `line` counts from 1, 0 is none; `key` is empty when the file as a whole is meant."""

    file: str
    line: int
    key: str
    text: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {_plain(self.key)}: {_plain(self.text)}" if self.key else f"{where}: {_plain(self.text)}"


def _plain(words: str) -> str:
    """One line that no terminal takes for a command, the middle of what is endless left out: files hold anything."""
    if len(words) > MOST_SHOWN:
        words = f"{words[: MOST_SHOWN // 2]}...{words[-MOST_SHOWN // 2 :]}"
    return words if words.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


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
