"""The journal and the beliefs it amounts to, changed together: an event is written, then learnt, under one lock.

So beliefs are always the fold of what is in the journal, whichever thread an event came from. May not import an adapter
or a vendor's package.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from autoscaler.core.events import Configured, Event, Opened, Snapshot
from autoscaler.core.learn import EMPTY, Beliefs, learn
from autoscaler.core.snapshot import save
from autoscaler.ports import Journal

E = TypeVar("E", bound=Event)


@dataclass
class Ledger:
    """`on_event` sees each new event, in order, with what is believed after it; `at_s` is the newest instant."""

    journal: Journal
    on_event: Callable[[Event, Beliefs], None]
    beliefs: Beliefs = EMPTY
    at_s: float = 0.0
    seq: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def resume(self) -> None:
        """Fold what the journal already holds."""
        for record in self.journal.read():
            self._learn(record.event)
            self.seq = record.seq

    def record(self, event: E, *, durable: bool = False) -> E:
        """Write, then learn; returns the event as it reads back, so that live and replay work on the same values.

        Raises Transient when it could not be written; it is not learnt then.
        """
        with self._lock:
            record = self.journal.append(event, durable=durable)
            self.seq, written = record.seq, cast(E, record.event)
            self._learn(written)
            self.on_event(written, self.beliefs)
        return written

    def roll(self, opened: Opened, now_s: float) -> None:
        """Let the journal start a new segment if its current one is full: the state so far is written at its head."""
        beliefs = self.beliefs
        if beliefs.policy is None:
            return
        configured = Configured(at_s=now_s, policy=beliefs.policy, shapes=beliefs.shapes, digest=beliefs.digest)
        with self._lock:
            head = self.journal.roll(lambda: self._head(opened, configured))
            for record in head:
                self._learn(record.event)
                self.seq = record.seq

    def _head(self, opened: Opened, configured: Configured) -> tuple[Event, ...]:
        after = learn(learn(self.beliefs, opened), configured)
        return (opened, configured, Snapshot(at_s=configured.at_s, beliefs_json=save(after)))

    def _learn(self, event: Event) -> None:
        self.beliefs = learn(self.beliefs, event)
        self.at_s = max(self.at_s, event.at_s)
