"""What nodes say of themselves on the board, for a cloud whose own listing does not tell it. May not act on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from autoscaler.ports import PortError
from serve_apps.wire import NodeReport, WireError, decode


class NodeNotes:
    """`fetch` gives the board's notes (``{instance: (age_s, NodeReport bytes)}``, raises PortError)."""

    def __init__(self, fetch: Callable[[], Mapping[str, tuple[float, bytes]]]) -> None:
        self._fetch = fetch

    def __call__(self) -> dict[str, NodeReport]:
        """The newest report of each node heard of late; none when the board does not answer. Never raises."""
        found: dict[str, NodeReport] = {}
        with suppress(PortError):
            for instance_id, (_, message) in self._fetch().items():
                with suppress(WireError):  # of a newer version: what is known stays
                    found[instance_id] = decode(NodeReport, message)
        return found
