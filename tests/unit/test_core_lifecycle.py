"""Transition tables: nothing moves backwards, everything ends."""

from __future__ import annotations

import pytest

from autoscaler.core.lifecycle import STARTING, TIMEOUT_S, TRANSITIONS, InstanceState, advance, expired, seen_state
from autoscaler.core.model import CloudInstance, CloudState, Node

S = InstanceState


def test_every_state_can_reach_gone_and_none_is_left_again() -> None:
    for state in S:
        assert state is S.GONE or S.GONE in TRANSITIONS[state]
        assert state not in TRANSITIONS[state]
        for following in TRANSITIONS[state]:
            assert state not in TRANSITIONS[following], "no cycle of two"


def test_a_lagging_listing_does_not_move_an_instance_back() -> None:
    assert advance(S.DRAINING, S.JOINED) is S.DRAINING
    assert advance(S.TERMINATING, S.BOOTING) is S.TERMINATING
    assert advance(S.JOINED, S.DRAINING) is S.DRAINING


@pytest.mark.parametrize(
    ("cloud", "alive", "draining", "seen"),
    [
        ("pending", None, False, S.PENDING),
        ("running", None, False, S.BOOTING),
        ("running", True, False, S.JOINED),
        ("running", True, True, S.DRAINING),
        ("running", False, False, S.BOOTING),
        ("terminating", True, False, S.TERMINATING),
        ("terminated", True, False, S.GONE),
    ],
)
def test_what_cloud_and_cluster_show(cloud: CloudState, alive: bool | None, draining: bool, seen: S) -> None:
    row = CloudInstance(instance_id="i", offering="o", token="t", state=cloud, launched_at_s=0.0)
    node = None if alive is None else Node(node_id="n", instance_id="i", alive=alive, draining=draining)
    assert seen_state(row, node) is seen


def test_each_waiting_state_has_a_limit() -> None:
    for state in STARTING:
        assert not expired(state, TIMEOUT_S[state])
        assert expired(state, TIMEOUT_S[state] + 1.0)
    assert not expired(S.JOINED, 1e12)
