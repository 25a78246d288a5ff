"""Which instances leave: drained before they are terminated, and terminated only when empty, late or never joined.

Pure; may not do I/O or read a clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from serve_apps.wire import app_name

from .beliefs import Beliefs, InstanceBelief
from .lifecycle import LEFT_CLUSTER_GRACE_S, STARTING, InstanceState, expired
from .model import Drain, ServingView, Terminate
from .place import CLOSING_S, Berth
from .reasons import Reason, ReasonCode, why

DRAIN_S = 120.0  # a surplus instance may take this long to finish what it serves
EMPTY_FOR_S = 3.0  # a node reads as empty for a moment before its replica is listed as stopping


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """Replicas on instances, by instance and application; `ready` ones are counted in both, stopping ones apart."""

    by_instance: dict[str, Counter[str]]
    ready: dict[str, Counter[str]]
    stopping: Counter[str]
    service_of: dict[str, str]

    @classmethod
    def of(cls, serving: ServingView) -> Presence:
        """Counts of a view; a replica without a place is nowhere."""
        by_instance: dict[str, Counter[str]] = {}
        ready: dict[str, Counter[str]] = {}
        stopping: Counter[str] = Counter()
        service_of: dict[str, str] = {}
        for replica in serving.replicas:
            app = app_name(replica.service, replica.variant)
            service_of[app] = replica.service
            if replica.instance_id and replica.state == "draining":
                stopping[replica.instance_id] += 1
            elif replica.instance_id:
                by_instance.setdefault(replica.instance_id, Counter())[app] += 1
            if replica.state == "ready":
                ready.setdefault(replica.instance_id, Counter())[app] += 1
        return cls(by_instance=by_instance, ready=ready, stopping=stopping, service_of=service_of)

    def by_service(self) -> dict[str, int]:
        """Replicas of each service that have a place and are not stopping."""
        totals: Counter[str] = Counter()
        for counts in self.by_instance.values():
            for app, n in counts.items():
                totals[self.service_of[app]] += n
        return dict(totals)

    def outside(self, instances: set[str]) -> Counter[str]:
        """Replicas by application on instances other than these."""
        totals: Counter[str] = Counter()
        for instance_id, counts in self.by_instance.items():
            if instance_id not in instances:
                totals.update(counts)
        return totals

    def ready_inside(self, instances: set[str]) -> Counter[str]:
        """Ready replicas by application on these instances."""
        totals: Counter[str] = Counter()
        for instance_id, counts in self.ready.items():
            if instance_id in instances:
                totals.update(counts)
        return totals

    def empty(self, instance_id: str) -> bool:
        """Whether no replica, not even a stopping one, is on the instance."""
        return not self.by_instance.get(instance_id) and not self.stopping[instance_id]


def drains(beliefs: Beliefs, berths: list[Berth], plan_id: str, now_s: float) -> tuple[Drain, ...]:
    """Instances in the cluster that are being taken back, whose offering ends, or that nobody was given."""
    given = {berth.instance_id for berth in berths if any(berth.given.values())}
    rows = []
    for key in sorted(beliefs.instances):
        instance = beliefs.instances[key]
        if instance.state is not InstanceState.JOINED:
            continue
        row = _leave(instance, beliefs, key in given, now_s)
        if row is not None:
            deadline_at_s, reason = row
            action = f"{plan_id}/drain/{key}"
            rows.append(Drain(id=action, instance_id=key, deadline_at_s=deadline_at_s, reasons=(reason,)))
    return tuple(rows)


def _leave(instance: InstanceBelief, beliefs: Beliefs, is_given: bool, now_s: float) -> tuple[float, Reason] | None:
    offering = beliefs.offers.get(instance.offering)
    if instance.reclaim_at_s is not None:
        return instance.reclaim_at_s, why(ReasonCode.RECLAIM_NOTICE, deadline_at_s=instance.reclaim_at_s)
    if offering is not None and offering.ends_at_s is not None and now_s > offering.ends_at_s - CLOSING_S:
        return offering.ends_at_s, why(ReasonCode.OFFERING_ENDS, offering.offering, ends_at_s=offering.ends_at_s)
    if is_given or instance.missing_since_s is not None or offering is None:
        return None
    return now_s + DRAIN_S, why(ReasonCode.SURPLUS, joined_for_s=now_s - instance.since_s)


def terminates(
    beliefs: Beliefs, berths: list[Berth], presence: Presence, plan_id: str, now_s: float
) -> tuple[Terminate, ...]:
    """Instances to give back now."""
    given = {berth.instance_id for berth in berths if any(berth.given.values())}
    rows = []
    for key in sorted(beliefs.instances):
        reason = _give_back(beliefs.instances[key], key in given, presence, now_s)
        if reason is not None:
            rows.append(Terminate(id=f"{plan_id}/terminate/{key}", instance_id=key, reasons=(reason,)))
    return tuple(rows)


def _give_back(instance: InstanceBelief, is_given: bool, presence: Presence, now_s: float) -> Reason | None:
    state, age_s = instance.state, now_s - instance.since_s
    if state in STARTING:
        return _give_back_starting(instance, is_given, age_s)
    if state is InstanceState.DRAINING:
        deadline = instance.drain_deadline_at_s
        if age_s >= EMPTY_FOR_S and presence.empty(instance.instance_id):
            return why(ReasonCode.EMPTY, drained_for_s=age_s)
        if deadline is not None and now_s > deadline:
            return why(ReasonCode.DRAIN_DEADLINE, deadline_at_s=deadline)
        return None
    if state is InstanceState.TERMINATING and expired(state, age_s):
        return why(ReasonCode.STARTING_EXPIRED, "terminating", age_s=age_s)
    missing = instance.missing_since_s
    if state is InstanceState.JOINED and missing is not None and now_s - missing > LEFT_CLUSTER_GRACE_S:
        return why(ReasonCode.LEFT_THE_CLUSTER, gone_for_s=now_s - missing)
    return None


def _give_back_starting(instance: InstanceBelief, is_given: bool, age_s: float) -> Reason | None:
    if expired(instance.state, age_s):
        return why(ReasonCode.STARTING_EXPIRED, instance.state.value, age_s=age_s)
    if instance.state is InstanceState.REQUESTED or is_given:  # not listed yet: there is nothing to name to the cloud
        return None
    return why(ReasonCode.SURPLUS_STARTING, instance.state.value, age_s=age_s)
