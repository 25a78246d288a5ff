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
    policy (its own maximum, its unit's quota), and a less important one holds GPUs that it could use, beyond that one's
    own floor. A service that has more on its way than it has serving is given its share already: a place taken for it
    now would serve no sooner.
    """

    services: Mapping[str, Service]
    quotas: Mapping[str, int | None]  # GPUs, by unit
    cluster: Cluster
    metrics: WorldMetrics
    timeline: Timeline
    direction_changes: int = 0
    priority_inversion_s: float = 0.0
    behind: tuple[str, ...] = ()  # services that wait behind less important ones now
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
        self.behind = self._behind(now_s)
        if self.behind:
            self.priority_inversion_s += now_s - self._at_s
        self._at_s = now_s

    def _behind(self, now_s: float) -> tuple[str, ...]:
        waiting = []
        for service, entry in self.services.items():
            if not self.metrics.windows[service].queued:
                self._queued_since_s.pop(service, None)
            elif now_s - self._queued_since_s.setdefault(service, now_s) > entry.preemption_grace_s:
                waiting.append(service)
        return tuple(service for service in waiting if self._held_by_lower(service))

    def _held_by_lower(self, short: str) -> bool:
        entry = self.services[short]
        usable = {app.shape.instance_type for app in self.cluster.apps.values() if app.service == short}
        counts = Counter(replica.deployment.app.service for replica in self.cluster.replicas() if replica.nodes)
        states = Counter(r.state for r in self.cluster.replicas() if r.nodes and r.deployment.app.service == short)
        if counts[short] >= entry.max_replicas or self._unit_full(short) or states["loading"] > states["ready"]:
            return False
        return any(
            replica.deployment.app.shape.instance_type in usable
            and self.services[replica.deployment.app.service].priority < entry.priority
            and counts[replica.deployment.app.service] > self.services[replica.deployment.app.service].min_replicas
            for replica in self.cluster.replicas()
            if replica.nodes
        )

    def _unit_full(self, short: str) -> bool:
        """Whether its unit holds so much of its quota that no replica of the service fits in the rest."""
        unit = short.split("/")[0]
        quota = self.quotas.get(unit)
        if quota is None:
            return False
        sizes = [app.shape.gpus * app.shape.nodes for app in self.cluster.apps.values() if app.service == short]
        held = sum(
            len(replica.nodes) * replica.deployment.app.shape.gpus
            for replica in self.cluster.replicas()
            if replica.deployment.app.service.split("/")[0] == unit
        )
        return held + min(sizes) > quota

    # ---- for a watch ------------------------------------------------------------------------------------------------
    def lately_met(self, service: str, totals: Totals) -> float | None:
        """Fraction within its objectives of what has ended since the last call; None when nothing has."""
        ended = totals.requests - totals.in_flight
        before_met, before_ended = self._ended.get(service, (0, 0))
        self._ended[service] = (totals.met, ended)
        return (totals.met - before_met) / (ended - before_ended) if ended > before_ended else None
