"""The Serving port over the world's cluster, and the gateways' side of a published plan.

May not decide how many replicas there should be: it obeys the plan while it is fresh, and Serve's local rule after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from autoscaler.core.model import ServingView
from autoscaler.ports import Transient
from chaos.engine import Engine
from chaos.scenario import Fault
from serve_apps.local_rule import Held, Load, choose
from serve_apps.wire import LocalRule, PlanMessage, ServiceRoute

from .cluster import ANYWHERE, App, Cluster
from .faults import Faults, hits, value
from .timeline import Timeline

NO_RULE = LocalRule(target_ongoing_per_replica=1.0, min_replicas=0, max_replicas=0, downscale_hold_s=60.0)


@dataclass
class Gateways:
    """What the gateways are told of each service: routes, slots, the length of the queue."""

    engine: Engine
    apps: dict[str, App]
    services: dict[str, int]
    _queues: dict[str, tuple[int, float, float]] = field(default_factory=dict)

    def route(self, route: ServiceRoute) -> None:
        """Take one service's routes."""
        slack_s = inf if route.slack_s is None else route.slack_s
        self.queue(route.service, route.max_queued, route.queue_timeout_s, slack_s)
        self.engine.expect(self.services[route.service], route.next_capacity_s)
        for variant in route.variants:
            self.carry(self.apps[variant.app], variant.capacity_rps_per_replica, variant.max_concurrency_per_replica)

    def queue(self, service: str, max_queued: int, timeout_s: float, slack_s: float) -> None:
        """How many of its requests may wait, how long each, and after how long one lets others pass."""
        rule = (max_queued, timeout_s, slack_s)
        if self._queues.get(service) != rule:
            self._queues[service] = rule
            number = self.services[service]
            self.engine.set_queue(number, max_queued=max_queued, queue_timeout_s=timeout_s, slack_s=slack_s)

    def carry(self, app: App, rps: float, slots: int) -> None:
        """What one replica of the application carries, and how many requests it is sent at once."""
        service, variant = app.number
        if rps != app.rps:
            app.rps = rps
            self.engine.set_capacity_rps(service, variant, rps)
        if slots != app.slots:
            app.slots = slots
            self.engine.set_slots(service, variant, slots)


@dataclass
class WorldServing:
    """ports.Serving. `targets` is what was last published, by application."""

    cluster: Cluster
    gateways: Gateways
    faults: Faults
    timeline: Timeline
    epoch_s: float
    targets: dict[str, int]
    plan: PlanMessage | None = None
    _received_s: float = 0.0
    _held: dict[str, Held] = field(default_factory=dict)
    _listed: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        self.faults.on("manual_targets", self._by_hand)

    def observe(self, now_s: float) -> ServingView:
        """See ports.Serving."""
        if self.faults.active("serving_gone"):
            raise Transient("Serve does not answer", "ConnectTimeout")
        return ServingView(
            at_s=now_s,
            replicas=self.cluster.seen_replicas(),
            nodes=self.cluster.seen_nodes(),
            targets=tuple(sorted(self.targets.items())),
        )

    def publish(self, message: PlanMessage) -> None:
        """See ports.Serving."""
        if self.faults.active("publish_gone"):
            raise Transient("the board does not answer", "GetTimeoutError")
        self.plan, self._received_s = message, self.timeline.now_s
        self._held.clear()
        for route in message.services:
            if route.service in self.gateways.services:
                self.gateways.route(route)
        self._aim({app: count for app, count in message.targets.items() if app in self.targets})

    def drain(self, instance_id: str, deadline_at_s: float, reason: str) -> None:  # noqa: ARG002
        """See ports.Serving."""
        if self.faults.active("serving_gone"):
            raise Transient("Ray's GCS does not answer", "ConnectTimeout")
        self.cluster.drain(instance_id, deadline_at_s - self.epoch_s)

    def follow_local_rule(self, requests: Mapping[str, float]) -> None:
        """What Serve's policies do when the plan has gone stale; `requests` = queued and running ones by service."""
        age_s = self.timeline.now_s - self._received_s
        if self.plan is None or age_s <= self.plan.stale_after_s:
            return
        aims: dict[str, int] = {}
        for app, target in self.targets.items():
            running = sum(r.state == "ready" for r in self.cluster.of(app))
            share = self._share(app, requests)
            load = Load(running, target, share)
            rule = self.plan.local_rules.get(app, NO_RULE)
            wanted, held = choose(app, self.plan, age_s, rule, load, self._held.get(app), self.timeline.now_s)
            if held is not None:
                self._held[app] = held
            if wanted is not None:
                aims[app] = wanted
        self._aim(aims)

    def _share(self, app: str, requests: Mapping[str, float]) -> float:
        """The requests of a service, spread over its applications by what each was to have."""
        service = self.gateways.apps[app].service
        alike = {name: self.targets[name] for name, each in self.gateways.apps.items() if each.service == service}
        whole = sum(alike.values())
        part = alike[app] / whole if whole else 1.0 / len(alike)
        return requests.get(service, 0.0) * part

    def _by_hand(self, fault: Fault) -> None:
        hit = [app for app, each in self.gateways.apps.items() if hits(fault, (each.service,))]
        self._aim(dict.fromkeys(hit, int(value(fault))))

    def _aim(self, targets: Mapping[str, int]) -> None:
        self.targets.update(targets)
        self.cluster.set_targets({(app, ANYWHERE): count for app, count in targets.items()})
