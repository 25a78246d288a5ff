"""Follows the journal of a running controller, and keeps what it shows: the facts, and the last view of the world.

Reads files that another process writes; may not write.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from autoscaler.adapters.tail import Tail
from autoscaler.core.events import LaunchGranted, LaunchRefused, Observed, PolicyRefused, Record
from autoscaler.core.model import CloudView, ServingView
from chaos.facts import Facts


@dataclass
class Watch:
    """Call `look` now and then. `news` are lines worth telling, cleared by whoever tells them."""

    folder: Path
    facts: Facts = field(default_factory=Facts)
    cloud: CloudView | None = None
    serving: ServingView | None = None
    news: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tail = Tail(self.folder)

    def look(self) -> None:
        """Take in what was written since the last look."""
        for record in self._tail.look():
            self._take(record)

    def _take(self, record: Record) -> None:
        self.facts.take(record)
        match record.event:
            case Observed(observation=seen):
                self.cloud = seen.cloud if isinstance(seen.cloud, CloudView) else self.cloud
                self.serving = seen.serving if isinstance(seen.serving, ServingView) else self.serving
            case LaunchRefused(offering=offering, code=code):
                self.news.append(f"refused: {offering} ({code})")
            case LaunchGranted(offering=offering, instance_ids=ids):
                self.news.append(f"granted: {offering} → {', '.join(ids)}")
            case PolicyRefused(problems=problems):
                self.news.append(f"policy not taken, the last good one stays: {problems[0]}")

    def ready(self) -> Counter[str]:
        """Ready replicas by service, as last seen."""
        replicas = self.serving.replicas if self.serving is not None else ()
        return Counter(seen.service for seen in replicas if seen.state == "ready")

    def instances(self) -> Counter[str]:
        """Instances that we hold by offering, as last seen."""
        listed = self.cloud.instances if self.cloud is not None else ()
        return Counter(seen.offering for seen in listed if seen.state in ("pending", "running"))
