"""The capacity layer of a controller under test: what it sees, and what its absolute answers do to the world.

The same for every controller that is not the loop itself: the shortfall is tried once a tick, the surplus goes
starting first, then empty, newest first, drained; noticed instances are drained; what never joins is given back. May
not decide how much of anything there should be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoscaler.core.lifecycle import TIMEOUT_S, InstanceState
from autoscaler.core.publish import QUEUE_MIN, QUEUE_PATIENT, QUEUE_SLOTS
from autoscaler.core.release import DRAIN_S
from autoscaler.ports import NotFound, PortError

from .cloud import WorldCloud
from .cluster import Cluster, Node
from .guard import Odd
from .metrics import WorldMetrics
from .serving import Gateways
from .supply import Machine, Pools, Row
from .timeline import Timeline

START_LIMIT_S = TIMEOUT_S[InstanceState.PENDING] + TIMEOUT_S[InstanceState.BOOTING]
MOST = 100_000
SIGNALS = ("arrival_rps", "prefill_tps", "decode_tps", "queued", "running")


@dataclass(frozen=True, slots=True)
class Waiting:
    """How requests of a service wait at the gateway: how long at most, after how long one lets others pass, and whether
    none is ever turned away.
    """

    timeout_s: float
    slack_s: float
    patient: bool

    def room(self, slots: int) -> int:
        """How many may wait; the loop's plans say the same."""
        return QUEUE_PATIENT if self.patient else max(QUEUE_MIN, QUEUE_SLOTS * slots)


class Nonsense(ValueError):
    """An answer that means nothing; the text says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a controller wants, checked: instances by offering, replicas by (application, offering)."""

    instances: dict[str, int] = field(default_factory=dict)
    replicas: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass
class Desk:
    """The world as a controller under test sees and changes it. Instants are seconds from the scenario's start."""

    pools: Pools
    cloud: WorldCloud
    cluster: Cluster
    metrics: WorldMetrics
    gateways: Gateways
    timeline: Timeline
    waiting: dict[str, Waiting]
    _tick: int = 0

    # ---- seeing -----------------------------------------------------------------------------------------------------
    def view(self) -> dict[str, Any]:
        """DESIGN's view. A metric that is missing is None; `last_refusal` is None or {"at_s", "class"}."""
        return {
            "services": {service: self._service(service) for service in self.metrics.services},
            "offerings": {row.id: self._offering(row) for row in self.pools.rows.values()},
            "replicas": [
                {
                    "service": replica.deployment.app.service,
                    "variant": replica.deployment.app.variant,
                    "offering": replica.nodes[0].machine.row.id if replica.nodes else replica.deployment.offering,
                    "state": "draining" if replica.migrating else STATES[replica.state],
                    "since_s": replica.since_s,
                }
                for replica in self.cluster.replicas()
            ],
        }

    def _service(self, service: str) -> dict[str, float | None]:
        told = self.metrics.told(service)
        return dict.fromkeys(SIGNALS) if told is None else dict(zip(SIGNALS, told, strict=False))

    def _offering(self, row: Row) -> dict[str, Any]:
        ready = starting = draining = 0
        for machine in row.machines:
            if not self._stays(machine):
                draining += 1
            elif machine.instance in self.cluster.nodes:
                ready += 1
            else:
                starting += 1
        refusal = self.cloud.last_refusal.get(row.id)
        return {
            "ready": ready,
            "starting": starting,
            "draining": draining,
            "price_usd_per_h": self.pools.price_usd_per_h(row),
            "last_refusal": None if refusal is None else {"at_s": refusal[0], "class": refusal[1]},
            "ends_at_s": row.supply.end_s,
        }

    def _stays(self, machine: Machine) -> bool:
        node = self.cluster.nodes.get(machine.instance)
        return machine.stays and (node is None or node.open)

    # ---- the answer -------------------------------------------------------------------------------------------------
    def read(self, given: object) -> Answer:
        """The answer in what a controller returned. Raises Nonsense."""
        if not isinstance(given, Mapping):
            kind = given.kind if isinstance(given, Odd) else type(given).__name__
            raise Nonsense(f"decide returned {kind}; it must return a dict")
        if unknown := [key for key in given if key not in ("instances", "replicas")]:
            raise Nonsense(f"decide returned the key {str(unknown[0])[:60]!r}; there are instances and replicas")
        parts = [given.get(name, {}) for name in ("instances", "replicas")]
        if not all(isinstance(part, Mapping) for part in parts):
            raise Nonsense("instances and replicas must be dicts")
        instances, replicas = parts
        return Answer(
            {self._offered("instances", key): _count(key, count) for key, count in instances.items()},
            {self._placed(key): _count(key, count) for key, count in replicas.items()},
        )

    def _offered(self, part: str, key: object) -> str:
        if not isinstance(key, str) or key not in self.pools.rows:
            raise Nonsense(f"{part} names {str(key)[:60]!r}, which is no offering")
        return key

    def _placed(self, key: object) -> tuple[str, str]:
        if not isinstance(key, tuple) or len(key) != 3:
            raise Nonsense(f"replicas has the key {str(key)[:60]!r}; it must be (service, variant, offering)")
        service, variant, offering = key
        app = next((a for a in self.cluster.apps.values() if (a.service, a.variant) == (service, variant)), None)
        if app is None:
            raise Nonsense(f"replicas names {str((service, variant))[:90]}, which is no variant of a service")
        return app.name, self._offered("replicas", offering)

    # ---- doing ------------------------------------------------------------------------------------------------------
    def carry_out(self, answer: Answer) -> None:
        """Make the world go towards the answer; what could not be done now is done at the next tick."""
        self._tick += 1
        for row in self.pools.rows.values():
            self._give_back(row, answer.instances.get(row.id, 0))
        wanted = dict.fromkeys(self.cluster.deployments, 0)
        self.cluster.set_targets(wanted | answer.replicas)
        self._open_queues()
        for number, (offering, count) in enumerate(answer.instances.items()):
            row = self.pools.rows[offering]
            short = count - sum(self._stays(machine) for machine in row.machines)
            if short > 0:
                self._try(lambda: self.cloud.launch(offering, short, f"{self._tick}/{number}"))  # noqa: B023

    def _open_queues(self) -> None:
        """Room to wait at the gateways grows with the slots, as it does with the loop's plans."""
        slots = dict.fromkeys(self.metrics.services, 0)
        for deployment in self.cluster.deployments.values():
            slots[deployment.app.service] += deployment.target * deployment.app.slots
        for service, count in slots.items():
            rule = self.waiting[service]
            self.gateways.queue(service, rule.room(count), rule.timeout_s, rule.slack_s)

    def _give_back(self, row: Row, wanted: int) -> None:
        """The surplus, and what leaves anyway."""
        nodes, now_s = self.cluster.nodes, self.timeline.now_s
        staying = [machine for machine in row.machines if self._stays(machine)]
        if len(staying) > wanted:
            order = sorted(staying, key=lambda m: (m.instance in nodes, self._busy(m), -m.launched_at_s, m.instance))
            for machine in order[: len(staying) - wanted]:
                if machine.instance in nodes:
                    self._drain(nodes[machine.instance], now_s + DRAIN_S)
                else:
                    self._end(machine)
        for machine in tuple(row.machines):
            node = nodes.get(machine.instance)
            if node is None:
                if now_s - machine.launched_at_s > START_LIMIT_S:
                    self._end(machine)
            elif node.open and not machine.stays:
                self._drain(node, machine.reclaim_at_s)
            elif not node.open and not node.replicas:
                self._end(machine)

    def _busy(self, machine: Machine) -> bool:
        node = self.cluster.nodes.get(machine.instance)
        return node is not None and bool(node.replicas)

    def _drain(self, node: Node, deadline_at_s: float) -> None:
        try:
            self.cluster.drain(node.machine.instance, min(deadline_at_s, node.machine.reclaim_at_s))
        except NotFound:
            return

    def _end(self, machine: Machine) -> None:
        self._try(lambda: self.cloud.terminate(machine.instance))

    def _try(self, call: Any) -> None:
        """A call that is refused or lost is simply made again at the next tick, if it is still wanted."""
        try:
            call()
        except PortError:
            return


STATES = {"pending": "starting", "loading": "starting", "ready": "ready", "draining": "draining"}


def _count(key: object, count: object) -> int:
    """A whole number from 0 to MOST. Numbers of NumPy are numbers, too."""
    if isinstance(count, bool) or not hasattr(count, "__float__"):
        raise Nonsense(f"{str(key)[:90]} gets {str(count)[:40]!r}; it must be a whole number")
    number = float(count)
    if not number.is_integer() or not 0 <= number <= MOST:
        raise Nonsense(f"{str(key)[:90]} gets {number:g}; it must be a whole number from 0 to {MOST:,}")
    return int(number)
