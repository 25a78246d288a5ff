"""Follows a journal folder that another process writes. Needs no lock; may not write.

A half-written last line waits for the next look.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autoscaler.core.events import Record

from .journal import decode_line


@dataclass
class Tail:
    """Where one reader of `folder` stands. For one thread at a time.

    It begins with the `newest` so many segments, or with all; each of them begins with everything that is believed.
    """

    folder: Path
    newest: int = 0
    _segment: str = ""
    _offset: int = 0

    def look(self) -> Iterator[Record]:
        """The records written since the last look, oldest first, each once. Raises OSError as reading files does."""
        paths = sorted(self.folder.glob("*.jsonl"))
        for path in paths if self._segment else paths[-self.newest :]:
            if path.name > self._segment:
                self._segment, self._offset = path.name, 0
            if path.name == self._segment:
                yield from self._read(path)

    def _read(self, path: Path) -> Iterator[Record]:
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                record = decode_line(line)
                if record is None:
                    return
                self._offset += len(line)
                yield record
