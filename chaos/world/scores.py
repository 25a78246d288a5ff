"""What a run is judged by besides cost and objectives: changes of direction, priority inversions. Counts only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from chaos.engine import Totals
from policies.model import Service

from .cluster import Cluster
from .metrics import WorldMetrics
from .timeline import Timeline


@dataclass
class Scores:
    """Call `tick` once a tick, when the controller has done what it does.

    A direction change: the total target of a service goes the other way than it last went. Inverted seconds: those in
    which a service has had requests waiting at every tick for longer than its grace, could have more replicas by its
    policy, and a less important one holds GPUs that it could use, beyond that one's own floor.
    """

    services: Mapping[str, Service]
    cluster: Cluster
    metrics: WorldMetrics
    timeline: Timeline
    direction_changes: int = 0
    priority_inversion_s: float = 0.0
    _last: dict[str, tuple[int, int]] = field(default_factory=dict)  # service → target, direction
    _queued_since_s: dict[str, float] = field(default_factory=dict)
    _ended: dict[str, tuple[int, int]] = field(default_factory=dict)
    _at_s: float = 0.0

    def tick(self) -> None:
        """Look at the targets and queues of now."""
        totals: Counter[str] = Counter()
        for deployment in self.cluster.deployments.values():
            totals[deployment.app.service] += deployment.target
        for service in self.services:
            last, direction = self._last.get(service, (totals[service], 0))
            step = (totals[service] > last) - (totals[service] < last)
            self.direction_changes += step * direction < 0
            self._last[service] = (totals[service], step or direction)
        now_s = self.timeline.now_s
        if self._inverted(now_s):
            self.priority_inversion_s += now_s - self._at_s
        self._at_s = now_s

    def _inverted(self, now_s: float) -> bool:
        waiting = []
        for service, entry in self.services.items():
            if not self.metrics.windows[service].queued:
                self._queued_since_s.pop(service, None)
            elif now_s - self._queued_since_s.setdefault(service, now_s) > entry.preemption_grace_s:
                waiting.append(service)
        return bool(waiting) and any(self._held_by_lower(service) for service in waiting)

    def _held_by_lower(self, short: str) -> bool:
        entry = self.services[short]
        usable = {app.shape.instance_type for app in self.cluster.apps.values() if app.service == short}
        counts = Counter(replica.deployment.app.service for replica in self.cluster.replicas() if replica.nodes)
        if counts[short] >= entry.max_replicas:
            return False
        return any(
            replica.deployment.app.shape.instance_type in usable
            and self.services[replica.deployment.app.service].priority < entry.priority
            and counts[replica.deployment.app.service] > self.services[replica.deployment.app.service].min_replicas
            for replica in self.cluster.replicas()
            if replica.nodes
        )

    # ---- for a watch ------------------------------------------------------------------------------------------------
    def lately_met(self, service: str, totals: Totals) -> float | None:
        """Fraction within its objectives of what has ended since the last call; None when nothing has."""
        ended = totals.requests - totals.in_flight
        before_met, before_ended = self._ended.get(service, (0, 0))
        self._ended[service] = (totals.met, ended)
        return (totals.met - before_met) / (ended - before_ended) if ended > before_ended else None
