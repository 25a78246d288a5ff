"""The life of an instance: which state may follow which, and how long each may last.

Pure tables and functions; may not do I/O or read a clock. An instance is never believed further along than what the
cloud and the cluster show; `advance` refuses a transition that the table does not hold.

Time-outs: EC2 lifecycle table in docs/capacity.md (requested 60 s a call, pending 5 min, running but not joined 15 min,
terminating 5 min before the call is repeated). Those of a start give way to what was measured (`limit_s`).
"""

from __future__ import annotations

from enum import StrEnum

from .model import CloudInstance, Node


class InstanceState(StrEnum):
    """Where an instance is in its life."""

    REQUESTED = "requested"  # granted, not listed by the cloud yet
    PENDING = "pending"  # listed, not running
    BOOTING = "booting"  # running, not in the cluster
    JOINED = "joined"
    DRAINING = "draining"
    TERMINATING = "terminating"
    GONE = "gone"


_S = InstanceState

TRANSITIONS: dict[InstanceState, frozenset[InstanceState]] = {
    _S.REQUESTED: frozenset({_S.PENDING, _S.BOOTING, _S.JOINED, _S.DRAINING, _S.TERMINATING, _S.GONE}),
    _S.PENDING: frozenset({_S.BOOTING, _S.JOINED, _S.DRAINING, _S.TERMINATING, _S.GONE}),
    _S.BOOTING: frozenset({_S.JOINED, _S.DRAINING, _S.TERMINATING, _S.GONE}),
    _S.JOINED: frozenset({_S.DRAINING, _S.TERMINATING, _S.GONE}),
    _S.DRAINING: frozenset({_S.TERMINATING, _S.GONE}),
    _S.TERMINATING: frozenset({_S.GONE}),
    _S.GONE: frozenset(),
}

TIMEOUT_S: dict[InstanceState, float] = {
    _S.REQUESTED: 300.0,
    _S.PENDING: 300.0,
    _S.BOOTING: 900.0,
    _S.DRAINING: 300.0,
    _S.TERMINATING: 300.0,
}

START_BOOTS = 2.0
START_LIMIT_MAX_S = 3600.0
INTENT_TIMEOUT_S = 60.0  # an unanswered launch call: credited no longer than this
LEFT_CLUSTER_GRACE_S = 60.0  # a joined node that vanished may be a restarting raylet
STARTING = frozenset({_S.REQUESTED, _S.PENDING, _S.BOOTING})


def seen_state(cloud: CloudInstance, node: Node | None) -> InstanceState:
    """The state that the cloud's listing and the cluster's node show between them."""
    if cloud.state == "terminated":
        return _S.GONE
    if cloud.state == "terminating":
        return _S.TERMINATING
    if node is not None and node.alive:
        return _S.DRAINING if node.draining else _S.JOINED
    return _S.PENDING if cloud.state == "pending" else _S.BOOTING


def advance(current: InstanceState, seen: InstanceState) -> InstanceState:
    """`seen` when it may follow `current`, else `current`: a lagging listing never moves an instance backwards."""
    return seen if seen in TRANSITIONS[current] else current


def limit_s(state: InstanceState, boot_s: float = 0.0, strikes: int = 0) -> float:
    """How long an instance may be in `state`. A start may take `START_BOOTS` times the slowest boot of its type
    (`boot_s`), and each start that never came doubles the table's limit up to an hour: one that is too short for a type
    would otherwise never learn so.
    """
    limit = TIMEOUT_S.get(state, float("inf"))
    if state not in STARTING:
        return limit
    return max(START_BOOTS * boot_s, min(limit * 2.0**strikes, START_LIMIT_MAX_S))


def expired(state: InstanceState, age_s: float) -> bool:
    """Whether an instance has been in `state` longer than that state may last, whatever its type."""
    return age_s > limit_s(state)
