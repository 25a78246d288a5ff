"""Which faults act now, and whether one strikes. Kinds and meanings: `chaos.faults`. May not change anything else.

What a fault does at its two ends (a pool that shrinks, machines that die) is registered by whoever owns the thing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from chaos.faults import INSTANT, KINDS
from chaos.scenario import Fault, Scenario

from .timeline import Timeline, stream

Listener = Callable[[Fault], None]


@dataclass
class Faults:
    """The faults of a scenario on its timeline. `names` of a thing are all that a target may call it, except ``*``."""

    scenario: Scenario
    seed: int
    timeline: Timeline
    _active: dict[str, list[Fault]] = field(default_factory=dict)
    _listeners: dict[str, list[Listener]] = field(default_factory=dict)
    _rng: dict[str, np.random.Generator] = field(default_factory=dict)

    def begin(self) -> None:
        """Put every fault on the timeline."""
        for fault in self.scenario.faults:
            self.timeline.at(fault.at_s, lambda fault=fault: self._begins(fault))  # type: ignore[misc]

    def on(self, kind: str, listener: Listener) -> None:
        """Call `listener` at the beginning and the end of each fault of `kind` (at its instant, if it has no length).

        During the call the fault is active at its beginning, and no longer at its end.
        """
        assert kind in KINDS, kind
        self._listeners.setdefault(kind, []).append(listener)

    def active(self, kind: str, names: Collection[str] = ()) -> list[Fault]:
        """Faults of `kind` that act now on something with these names, in the order in which they began."""
        found = self._active.get(kind)
        return [fault for fault in found if hits(fault, names)] if found else []

    def factor(self, kind: str, names: Collection[str]) -> float:
        """The product of the values of those that act."""
        product = 1.0
        for fault in self.active(kind, names):
            product *= value(fault)
        return product

    def strikes(self, kind: str, names: Collection[str]) -> bool:
        """Whether one that acts strikes now: drawn with its value as probability, from the kind's own stream."""
        return any(self.draw(kind) < value(fault) for fault in self.active(kind, names))

    def draw(self, kind: str) -> float:
        """The next number in [0, 1) of the kind's stream."""
        if kind not in self._rng:
            self._rng[kind] = stream(self.seed, f"faults/{kind}")
        return float(self._rng[kind].random())

    def some(self, fault: Fault, count: int) -> list[int]:
        """Which of `count` things an instant fault hits: round(value × count) of them, at least one, drawn."""
        hit = min(count, max(1, round(value(fault) * count))) if count and value(fault) > 0.0 else 0
        ranked = sorted((self.draw(fault.kind), index) for index in range(count))
        return sorted(index for _, index in ranked[:hit])

    def _begins(self, fault: Fault) -> None:
        if fault.kind in INSTANT:
            self._tell(fault)
            return
        self._active.setdefault(fault.kind, []).append(fault)
        self._tell(fault)
        self.timeline.after(fault.for_s, lambda: self._ends(fault))

    def _ends(self, fault: Fault) -> None:
        # By identity: two equal faults overlap as two.
        kept = self._active[fault.kind]
        del kept[next(index for index, each in enumerate(kept) if each is fault)]
        self._tell(fault)

    def _tell(self, fault: Fault) -> None:
        for listener in self._listeners.get(fault.kind, ()):
            listener(fault)


def hits(fault: Fault, names: Collection[str]) -> bool:
    """Whether the fault's target is one of these names, or everything."""
    return fault.target == "*" or fault.target in names


def value(fault: Fault) -> float:
    """The fault's value, or its kind's default."""
    return KINDS[fault.kind].default if fault.value is None else fault.value
