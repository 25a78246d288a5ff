"""Which instances leave: drained before they are terminated, and terminated only when empty, late or never joined.

Pure; may not do I/O or read a clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from serve_apps.wire import app_name

from .beliefs import Beliefs, InstanceBelief
from .berths import CLOSING_S, SUNK, Berth
from .coldstart import start_limit_s, stuck, waited_s
from .lifecycle import LEFT_CLUSTER_GRACE_S, STARTING, InstanceState, expired, limit_s
from .model import Drain, ServingView, Terminate
from .orders import drain_of
from .reasons import Reason, ReasonCode, why

DRAIN_S = 120.0  # a surplus instance may take this long to finish what it serves
EMPTY_FOR_S = 3.0  # a node reads as empty for a moment before its replica is listed as stopping


@dataclass(frozen=True, slots=True, kw_only=True)
class Moored:
    """A replica that has a place and is not stopping."""

    app: str
    service: str
    instances: tuple[str, ...]
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """Replicas on instances. `led` names, by instance and application, replicas by their other instances, those that
    are ready first; `ready` counts these. `occupied` are all instances with any replica, stopping ones included.
    """

    replicas: tuple[Moored, ...]
    led: dict[str, dict[str, tuple[tuple[str, ...], ...]]]
    ready: dict[str, dict[str, int]]
    occupied: frozenset[str]

    @classmethod
    def of(cls, serving: ServingView) -> Presence:
        """Those of a view; a replica without a place is nowhere."""
        replicas: list[Moored] = []
        led: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {}
        ready: dict[str, dict[str, int]] = {}
        occupied: set[str] = set()
        for row in sorted(serving.replicas, key=lambda row: row.state != "ready"):
            if not row.instance_id:
                continue
            instances = (row.instance_id, *row.also_on)
            occupied.update(instances)
            if row.state != "draining":
                app = app_name(row.service, row.variant)
                replicas.append(Moored(app=app, service=row.service, instances=instances, ready=row.state == "ready"))
                here = led.setdefault(row.instance_id, {})
                here[app] = (*here.get(app, ()), row.also_on)
                serve = ready.setdefault(row.instance_id, {})
                serve[app] = serve.get(app, 0) + (row.state == "ready")
        return cls(replicas=tuple(replicas), led=led, ready=ready, occupied=frozenset(occupied))

    def by_service(self) -> dict[str, int]:
        """Replicas of each service."""
        return dict(Counter(row.service for row in self.replicas))

    def outside(self, instances: set[str]) -> Counter[str]:
        """Replicas by application that are not wholly on these instances."""
        return Counter(row.app for row in self.replicas if not instances.issuperset(row.instances))

    def ready_inside(self, instances: set[str]) -> Counter[str]:
        """Ready replicas by application that are wholly on these instances."""
        return Counter(row.app for row in self.replicas if row.ready and instances.issuperset(row.instances))

    def empty(self, instance_id: str) -> bool:
        """Whether no replica, not even a stopping one, is on the instance."""
        return instance_id not in self.occupied


def drains(
    beliefs: Beliefs, berths: list[Berth], presence: Presence, settled: frozenset[str], plan_id: str, now_s: float
) -> tuple[Drain, ...]:
    """Instances in the cluster that are being taken back, whose offering ends, or that nobody was given.

    `settled` are the services whose every replica has a place in the cluster.
    """
    given = {berth.instance_id for berth in berths if berth.seats}
    late = stuck(beliefs, now_s)
    followed = _followed(beliefs, berths, presence, settled)
    rows = []
    for key in sorted(beliefs.instances):
        instance = beliefs.instances[key]
        if instance.state is not InstanceState.JOINED:
            continue
        row = _leave(instance, beliefs, key in given, key in followed, late, now_s)
        if row is not None:
            deadline_at_s, reason = row
            action = f"{plan_id}/drain/{key}"
            rows.append(Drain(id=action, instance_id=key, deadline_at_s=deadline_at_s, reasons=(reason,)))
    return tuple(rows)


def _followed(beliefs: Beliefs, berths: list[Berth], presence: Presence, settled: frozenset[str]) -> frozenset[str]:
    """Instances of offerings that end, too late for work (no berths), whose successors all have a place.

    Only a draining node makes Serve start the successor beside what still serves, and then stop that and no other.
    """
    open_ids = {berth.instance_id for berth in berths}
    closing = {
        key
        for key, instance in beliefs.instances.items()
        if key not in open_ids and instance.missing_since_s is None and _ends_at_s(beliefs, instance) is not None
    }
    waited_for = {
        key for row in presence.replicas if row.service not in settled for key in closing.intersection(row.instances)
    }
    return frozenset(closing - waited_for)


def _ends_at_s(beliefs: Beliefs, instance: InstanceBelief) -> float | None:
    offering = beliefs.offers.get(instance.offering)
    return offering.ends_at_s if offering is not None else None


def _leave(
    instance: InstanceBelief,
    beliefs: Beliefs,
    is_given: bool,
    is_followed: bool,
    late: dict[str, tuple[float, float]],
    now_s: float,
) -> tuple[float, Reason] | None:
    offering = beliefs.offers.get(instance.offering)
    if instance.reclaim_at_s is not None:
        return instance.reclaim_at_s, why(ReasonCode.RECLAIM_NOTICE, deadline_at_s=instance.reclaim_at_s)
    order = drain_of(beliefs, instance.instance_id, now_s)
    if order is not None:
        return order.until_s, why(ReasonCode.ORDERED, f"{order.verb} by {order.who}", until_s=order.until_s)
    ends_at_s = _ends_at_s(beliefs, instance)
    if ends_at_s is not None and (is_followed or now_s > ends_at_s - CLOSING_S):
        return ends_at_s, why(ReasonCode.OFFERING_ENDS, instance.offering, ends_at_s=ends_at_s)
    if instance.instance_id in late:
        age_s, limit = late[instance.instance_id]
        return now_s + DRAIN_S, why(ReasonCode.LOAD_EXPIRED, age_s=age_s, limit_s=limit)
    if is_given or instance.missing_since_s is not None or offering is None or offering.market in SUNK:
        return None  # what is paid for whether used or not is kept: giving it back saves nothing
    return now_s + DRAIN_S, why(ReasonCode.SURPLUS, joined_for_s=now_s - instance.since_s)


def terminates(
    beliefs: Beliefs, berths: list[Berth], presence: Presence, plan_id: str, now_s: float
) -> tuple[Terminate, ...]:
    """Instances to give back now."""
    given = {berth.instance_id for berth in berths if berth.seats}
    rows = []
    for key in sorted(beliefs.instances):
        instance = beliefs.instances[key]
        offering = beliefs.offers.get(instance.offering)
        keep = key in given or (offering is not None and offering.market in SUNK)
        reason = _give_back(instance, keep, presence, beliefs, now_s)
        if reason is not None:
            rows.append(Terminate(id=f"{plan_id}/terminate/{key}", instance_id=key, reasons=(reason,)))
    return tuple(rows)


def _give_back(
    instance: InstanceBelief, keep: bool, presence: Presence, beliefs: Beliefs, now_s: float
) -> Reason | None:
    state, age_s = instance.state, now_s - instance.since_s
    if state in STARTING:
        limit = start_limit_s(beliefs, instance)
        return _give_back_starting(instance, keep, waited_s(instance, instance.since_s, limit, now_s), limit)
    if state is InstanceState.DRAINING:
        deadline = instance.drain_deadline_at_s
        if age_s >= EMPTY_FOR_S and presence.empty(instance.instance_id):
            return why(ReasonCode.EMPTY, drained_for_s=age_s)
        if deadline is not None and now_s > deadline:
            return why(ReasonCode.DRAIN_DEADLINE, deadline_at_s=deadline)
        return None
    if state is InstanceState.TERMINATING and expired(state, age_s):
        return why(ReasonCode.STARTING_EXPIRED, "terminating", age_s=age_s, limit_s=limit_s(state))
    missing = instance.missing_since_s
    if state is InstanceState.JOINED and missing is not None and now_s - missing > LEFT_CLUSTER_GRACE_S:
        return why(ReasonCode.LEFT_THE_CLUSTER, gone_for_s=now_s - missing)
    return None


def _give_back_starting(instance: InstanceBelief, keep: bool, age_s: float, limit: float) -> Reason | None:
    if age_s > limit:
        return why(ReasonCode.STARTING_EXPIRED, instance.state.value, age_s=age_s, limit_s=limit)
    if instance.state is InstanceState.REQUESTED or keep:  # not listed yet: there is nothing to name to the cloud
        return None
    return why(ReasonCode.SURPLUS_STARTING, instance.state.value, age_s=age_s)
