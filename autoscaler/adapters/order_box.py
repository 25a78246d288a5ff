"""The road of an operator's order into a running controller: a file in the journal's folder, under ``orders``.

Whoever may write there may order; the controller journals each at its next tick and takes the file away. One writer of
the journal remains. May not judge an order.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from autoscaler.core.events import Ordered
from autoscaler.core.orders import LONGEST_S

MOST_BYTES = 4096
_ORDER: TypeAdapter[Ordered] = TypeAdapter(Ordered)


@dataclass(frozen=True, slots=True)
class OrderBox:
    """ports.Orders of a journal's folder. What cannot be read is put aside as ``NAME.refused``."""

    folder: Path

    @classmethod
    def of(cls, journal: Path) -> OrderBox:
        """That of a journal."""
        return cls(journal / "orders")

    def put(self, order: Ordered) -> Path:
        """Hand an order in, whole or not at all; the file is gone once it is journalled. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / f"{time.time_ns():020d}-{os.getpid()}.json"
        partial = path.with_suffix(".part")
        partial.write_bytes(_ORDER.dump_json(order))
        partial.rename(path)
        return path

    def waiting(self) -> tuple[tuple[str, Ordered], ...]:
        """See ports.Orders."""
        try:
            paths = sorted(self.folder.glob("*.json"))
        except OSError:
            return ()
        return tuple((path.name, order) for path in paths if (order := self._read(path)) is not None)

    def taken(self, name: str) -> None:
        """See ports.Orders. What cannot be taken away is journalled again, which changes nothing."""
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def _read(self, path: Path) -> Ordered | None:
        with contextlib.suppress(OSError):
            try:
                with path.open("rb") as file:
                    order = _ORDER.validate_json(file.read(MOST_BYTES))
            except ValidationError:
                order = None
            if order is not None and order.until_s - order.at_s <= LONGEST_S:
                return order
            path.rename(path.with_suffix(".refused"))
        return None
