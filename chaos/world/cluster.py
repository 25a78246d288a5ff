"""Ray and Serve in the world: nodes, and the deployments whose replicas Serve starts, places, migrates and stops.

A replica is placed, first come first served, on the fullest node of its instance type that has its GPUs free (all its
nodes at once, if it spans several), loads, and serves. Serve's order when there are too many: those not running first,
then those on the nodes with the fewest replicas, newest first. A draining node takes no work; its replicas serve until
their successors run, they are surplus, or its deadline comes near. May not decide how many replicas there should be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autoscaler.core.model import Node as NodeSeen
from autoscaler.core.model import Replica as ReplicaSeen
from autoscaler.core.model import ReplicaState, Shape
from autoscaler.ports import NotFound
from chaos.engine import Engine
from chaos.scenario import Dist, Fault, Scenario
from serve_apps.timing import Timing
from serve_apps.wire import app_name

from .faults import Faults
from .supply import Machine
from .tally import Tally
from .timeline import Timeline, stream

POLL_S = 2.0
LEAVES_AFTER_S = 1.0  # a drained, empty node
REMEMBERED_S = 60.0  # a dead node is still listed for so long
ANYWHERE = ""  # a deployment that may be placed on any offering's nodes


@dataclass(slots=True, eq=False)
class Node:
    """A machine in the cluster. `replicas` have their GPUs here."""

    machine: Machine
    free_gpus: int
    replicas: list[Replica] = field(default_factory=list)
    alive: bool = True
    draining: bool = False
    deadline_at_s: float = math.inf
    left_at_s: float = math.inf
    seen: NodeSeen | None = None

    @property
    def open(self) -> bool:
        """Whether work may be placed here."""
        return self.alive and not self.draining


@dataclass(slots=True, eq=False)
class App:
    """One variant of one service: its place in the engine, what its replicas take, and how long they may finish."""

    service: str
    variant: str
    number: tuple[int, int]
    shape: Shape
    timing: Timing
    shutdown_s: float
    slots: int = 1
    rps: float = 0.0

    @property
    def name(self) -> str:
        """The Serve application."""
        return app_name(self.service, self.variant)


@dataclass(slots=True, eq=False)
class Replica:
    """One engine. `handle` is the world engine's number of it while it serves."""

    name: str
    deployment: Deployment
    serial: int
    since_s: float
    state: ReplicaState = "pending"
    nodes: tuple[Node, ...] = ()
    handle: int = -1
    stop_by_s: float = math.inf
    seen: ReplicaSeen | None = None

    @property
    def migrating(self) -> bool:
        """Whether any of its nodes is draining."""
        return any(node.draining for node in self.nodes)


@dataclass(slots=True, eq=False)
class Deployment:
    """Replicas of one application that may be placed on one offering, or anywhere; `target` of them are wanted."""

    app: App
    offering: str
    target: int = 0
    replicas: list[Replica] = field(default_factory=list)


@dataclass
class Cluster:
    """The whole cluster. `epoch_s` only stamps what is shown."""

    scenario: Scenario
    seed: int
    timeline: Timeline
    faults: Faults
    tally: Tally
    engine: Engine
    apps: dict[str, App]
    epoch_s: float
    nodes: dict[str, Node] = field(default_factory=dict)
    deployments: dict[tuple[str, str], Deployment] = field(default_factory=dict)
    _pending: list[Replica] = field(default_factory=list)
    _stopping: list[Replica] = field(default_factory=list)
    _loads: dict[tuple[str, str], Dist] = field(default_factory=dict)
    _made: int = 0
    _polling: bool = False

    def __post_init__(self) -> None:
        self._rng = stream(self.seed, "loads")
        self._services = {app.service: app.number[0] for app in self.apps.values()}
        self._warm = dict.fromkeys(self._services, -1)
        self.faults.on("replica_crash", self._crash)
        self._count_ready()

    # ---- targets ----------------------------------------------------------------------------------------------------
    def set_targets(self, targets: Mapping[tuple[str, str], int]) -> None:
        """How many replicas there should be, by application and offering (or ANYWHERE); others stay as they are."""
        changed = False
        for (app, offering), target in targets.items():
            known = self.deployments.get((app, offering))
            if known is None:
                if target == 0:
                    continue
                known = self.deployments[app, offering] = Deployment(self.apps[app], offering)
            changed = changed or target != known.target
            known.target = target
        if changed:
            self._reconcile()

    def _reconcile(self) -> None:
        """What Serve's controller does about ten times a second, done whenever anything has changed."""
        for deployment in self.deployments.values():
            self._match(deployment)
        self._place()
        self._count_ready()

    def _match(self, deployment: Deployment) -> None:
        serving = [r for r in deployment.replicas if r.state != "draining" and not r.migrating]
        for _ in range(deployment.target - len(serving)):
            self._start(deployment)
        surplus = len(serving) - deployment.target
        if surplus > 0:
            for replica in sorted(serving, key=_first_to_stop)[:surplus]:
                self._stop(replica)
        self._migrate(deployment)

    def _migrate(self, deployment: Deployment) -> None:
        """Stop what leaves with its node: at once what does not serve yet, else when a successor runs or time is up."""
        leaving = [r for r in deployment.replicas if r.state != "draining" and r.migrating]
        if not leaving:
            return
        serving = sum(r.state == "ready" for r in deployment.replicas)
        for replica in sorted(leaving, key=_deadline_s):
            late = self.timeline.now_s >= _deadline_s(replica)
            if replica.state != "ready":
                self._stop(replica)
            elif late or serving > deployment.target:
                serving -= 1
                self._stop(replica)

    def _start(self, deployment: Deployment) -> None:
        self._made += 1
        replica = Replica(f"{deployment.app.name}#{self._made}", deployment, self._made, self.timeline.now_s)
        deployment.replicas.append(replica)
        self._pending.append(replica)

    # ---- placement and loading --------------------------------------------------------------------------------------
    def _place(self) -> None:
        waiting, full = [], set()
        for replica in self._pending:
            deployment = replica.deployment
            nodes = () if id(deployment) in full else self._room(deployment)
            if not nodes:
                full.add(id(deployment))  # its brothers fit no better
                waiting.append(replica)
                continue
            self._put(replica, nodes)
        self._pending = waiting

    def _room(self, deployment: Deployment) -> tuple[Node, ...]:
        """The nodes for one more replica, or none. The fullest that fit, the oldest of equals."""
        shape, offering = deployment.app.shape, deployment.offering
        fit = [
            node
            for node in self.nodes.values()
            if node.free_gpus >= shape.gpus
            and node.open
            and node.machine.row.supply.instance_type == shape.instance_type
            and offering in (ANYWHERE, node.machine.row.id)
        ]
        if len(fit) < shape.nodes:
            return ()
        fit.sort(key=lambda node: node.free_gpus)
        return tuple(fit[: shape.nodes])

    def _put(self, replica: Replica, nodes: tuple[Node, ...]) -> None:
        now_s = self.timeline.now_s
        app = replica.deployment.app
        replica.nodes, replica.state, replica.since_s, replica.seen = nodes, "loading", now_s, None
        for node in nodes:
            node.free_gpus -= app.shape.gpus
            node.replicas.append(replica)
            self.tally.occupied(node.machine.instance, app.service.split("/")[0], app.shape.gpus, now_s)
        self._load(replica)

    def _load(self, replica: Replica) -> None:
        """One try at loading; a try that fails is followed by another."""
        app = replica.deployment.app
        names = (app.service,)
        key = (replica.nodes[0].machine.row.id, app.name)
        if key not in self._loads:
            self._loads[key] = self.scenario.load_s(key[0], app.service, app.variant)
        load_s = self._loads[key].draw(self._rng) * self.faults.factor("load_slow", names)
        if self.faults.strikes("load_hang", names):
            return
        again = self.faults.strikes("load_fail", names)
        self.timeline.after(load_s, lambda: self._loaded(replica, again))

    def _loaded(self, replica: Replica, again: bool) -> None:
        if replica.state != "loading":  # stopped, or lost with its node
            return
        if again:
            self._load(replica)
            return
        app = replica.deployment.app
        service, variant = app.number
        slowdown = max(node.machine.slow for node in replica.nodes)
        replica.handle = self.engine.add_replica(service, variant, app.timing, slowdown=slowdown, slots=app.slots)
        replica.state, replica.seen = "ready", None
        self._reconcile()

    # ---- ends of replicas -------------------------------------------------------------------------------------------
    def _stop(self, replica: Replica) -> None:
        """As Serve stops one: what runs may finish for a while, what waits elsewhere never comes here."""
        if replica.state != "ready":
            self._drop(replica)
            return
        self.engine.drain(replica.handle)
        replica.state, replica.seen = "draining", None
        replica.stop_by_s = self.timeline.now_s + replica.deployment.app.shutdown_s
        self._stopping.append(replica)
        self._poll_later()

    def _drop(self, replica: Replica) -> None:
        """It is gone now, and so is what it ran."""
        if replica.handle >= 0:
            self.engine.remove(replica.handle)
            replica.handle = -1
        if replica.state == "pending":
            self._pending.remove(replica)
        elif replica.state == "draining":
            self._stopping.remove(replica)
        app = replica.deployment.app
        for node in replica.nodes:
            node.free_gpus += app.shape.gpus
            node.replicas.remove(replica)
            self.tally.occupied(node.machine.instance, app.service.split("/")[0], -app.shape.gpus, self.timeline.now_s)
            self._leave_when_empty(node)
        replica.deployment.replicas.remove(replica)
        replica.state, replica.nodes = "draining", ()

    def _poll_later(self) -> None:
        if not self._polling:
            self._polling = True
            self.timeline.after(POLL_S, self._poll)

    def _poll(self) -> None:
        """Replicas that have finished, or may no longer finish, go."""
        self._polling = False
        for replica in tuple(self._stopping):
            if self.timeline.now_s >= replica.stop_by_s or self.engine.in_flight(replica.handle) == 0:
                self._drop(replica)
        if self._stopping:
            self._poll_later()
        self._reconcile()

    def _crash(self, fault: Fault) -> None:
        ready = [
            replica
            for deployment in self.deployments.values()
            for replica in deployment.replicas
            if replica.state == "ready" and fault.target in ("*", deployment.app.service)
        ]
        for index in self.faults.some(fault, len(ready)):
            self._drop(ready[index])
        self._reconcile()

    # ---- nodes ------------------------------------------------------------------------------------------------------
    def join(self, machine: Machine) -> None:
        """An instance's node is in the cluster."""
        self.nodes[machine.instance] = Node(machine, machine.row.gpus)
        self._reconcile()

    def lose(self, machine: Machine) -> None:
        """An instance ended: its node and what ran on it are gone."""
        node = self.nodes.get(machine.instance)
        if node is not None and node.alive:
            self._leave(node)
            self._reconcile()

    def drain(self, instance: str, deadline_at_s: float) -> None:
        """Take a node out of service by the deadline; again only shortens or extends that. Raises NotFound."""
        node = self.nodes.get(instance)
        if node is None or not node.alive:
            raise NotFound(f"no live node of {instance!r}")
        node.deadline_at_s = deadline_at_s
        if not node.draining:
            node.draining, node.seen = True, None
            for replica in node.replicas:
                replica.seen = None
            self._leave_when_empty(node)
        for replica in node.replicas:
            self.timeline.at(max(self.timeline.now_s, _deadline_s(replica)), self._reconcile)
        self.timeline.at(max(self.timeline.now_s, deadline_at_s), lambda: self._expire(node))
        self._reconcile()

    def _expire(self, node: Node) -> None:
        if node.alive and self.timeline.now_s >= node.deadline_at_s:
            self._leave(node)
            self._reconcile()

    def _leave_when_empty(self, node: Node) -> None:
        if node.draining and node.alive and not node.replicas:
            self.timeline.after(LEAVES_AFTER_S, lambda: self._left(node))

    def _left(self, node: Node) -> None:
        if node.alive and not node.replicas:
            self._leave(node)

    def _leave(self, node: Node) -> None:
        node.alive, node.left_at_s, node.seen = False, self.timeline.now_s, None
        for replica in tuple(node.replicas):
            self._drop(replica)
        self.timeline.after(REMEMBERED_S, lambda: self._forget(node))

    def _forget(self, node: Node) -> None:
        del self.nodes[node.machine.instance]

    # ---- what is seen -----------------------------------------------------------------------------------------------
    def _count_ready(self) -> None:
        """Tell the engine which services have no ready replica: whoever misses while waiting then, missed a start."""
        ready = dict.fromkeys(self._services, 0)
        for deployment in self.deployments.values():
            ready[deployment.app.service] += sum(replica.state == "ready" for replica in deployment.replicas)
        for service, count in ready.items():
            if self._warm[service] != (count > 0):
                self._warm[service] = count > 0
                self.engine.note_coming(self._services[service], int(count == 0))

    def replicas(self) -> Iterator[Replica]:
        """All of them, by deployment."""
        for deployment in self.deployments.values():
            yield from deployment.replicas

    def of(self, app: str) -> Iterator[Replica]:
        """Those of one application."""
        return (replica for (name, _), each in self.deployments.items() if name == app for replica in each.replicas)

    def seen_replicas(self) -> tuple[ReplicaSeen, ...]:
        """As Serve lists them."""
        return tuple(replica.seen or self._see(replica) for replica in self.replicas())

    def _see(self, replica: Replica) -> ReplicaSeen:
        app = replica.deployment.app
        replica.seen = ReplicaSeen(
            replica_id=replica.name,
            service=app.service,
            variant=app.variant,
            instance_id=replica.nodes[0].machine.instance if replica.nodes else "",
            state=replica.state,
            also_on=tuple(node.machine.instance for node in replica.nodes[1:]),
            since_s=self.epoch_s + replica.since_s,
        )
        return replica.seen

    def seen_nodes(self) -> tuple[NodeSeen, ...]:
        """As Ray lists them, lately dead ones included."""
        return tuple(node.seen or self._see_node(node) for node in self.nodes.values())

    @staticmethod
    def _see_node(node: Node) -> NodeSeen:
        instance = node.machine.instance
        node.seen = NodeSeen(node_id=f"n-{instance}", instance_id=instance, alive=node.alive, draining=node.draining)
        return node.seen


def _first_to_stop(replica: Replica) -> tuple[bool, bool, int, int]:
    """Serve's order: not running before running, then by the replicas on its node, newest first."""
    crowd = len(replica.nodes[0].replicas) if replica.nodes else 0
    return (
        replica.state == "ready",
        replica.state == "loading",
        crowd if replica.state == "ready" else 0,
        -replica.serial,
    )


def _deadline_s(replica: Replica) -> float:
    """When Serve stops a replica on a draining node, successor or not: as long before the node's deadline as it may
    take to finish.
    """
    deadline = min(node.deadline_at_s for node in replica.nodes)
    return deadline - replica.deployment.app.shutdown_s
