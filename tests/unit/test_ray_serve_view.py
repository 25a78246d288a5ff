"""Serve's REST answer becomes the view: states, places, targets, and nothing that is not ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from autoscaler.adapters.ray_serve import CONTROLLER_AWAY_S, ControllerWatch, serving_view
from autoscaler.core.model import Node, Replica
from autoscaler.ports import Transient

NODES = (Node(node_id="n1", instance_id="i-1", alive=True, draining=False),)


def replica(state: str, node_id: str | None, **extra: Any) -> dict[str, Any]:
    return {"replica_id": "r1", "state": state, "node_id": node_id, "start_time_s": 50.0, **extra}


def details(*replicas: Mapping[str, Any], app: str = "support.chat.small", deployment: str = "LLM") -> dict[str, Any]:
    deployments = {deployment: {"target_num_replicas": 4, "replicas": list(replicas)}}
    return {"controller_info": {"node_id": "h"}, "applications": {app: {"deployments": deployments}}}


@pytest.mark.parametrize(
    ("state", "node_id", "expected"),
    [
        ("STARTING", None, ("pending", "")),
        ("STARTING", "n1", ("loading", "i-1")),
        ("UPDATING", "n1", ("loading", "i-1")),
        ("RECOVERING", "n1", ("loading", "i-1")),
        ("RUNNING", "n1", ("ready", "i-1")),
        ("STOPPING", "n1", ("draining", "i-1")),
        ("STOPPING", None, ("draining", "")),
        ("PENDING_MIGRATION", "n1", ("ready", "i-1")),
        ("RUNNING", "a-node-that-is-not-ours", ("ready", "")),
    ],
)
def test_a_replica_has_a_state_and_a_place(state: str, node_id: str | None, expected: tuple[str, str]) -> None:
    view = serving_view(99.0, details(replica(state, node_id)), NODES)
    (seen,) = view.replicas
    assert (seen.state, seen.instance_id) == expected
    assert (seen.service, seen.variant, seen.replica_id, seen.since_s) == ("support/chat", "small", "r1", 50.0)
    assert (view.at_s, view.nodes, view.targets) == (99.0, NODES, (("support.chat.small", 4),))


def test_a_node_forgotten_already_is_known_by_its_instance_id() -> None:
    (seen,) = serving_view(0.0, details(replica("STOPPING", "gone", node_instance_id="i-9")), NODES).replicas
    assert isinstance(seen, Replica)
    assert seen.instance_id == "i-9"


def test_a_stopped_replica_is_gone() -> None:
    assert serving_view(0.0, details(replica("STOPPED", "n1")), NODES).replicas == ()


@pytest.mark.parametrize(("app", "deployment"), [("qm-gateway", "LLM"), ("support.chat.small", "Other")])
def test_what_is_not_ours_is_left_out(app: str, deployment: str) -> None:
    view = serving_view(0.0, details(replica("RUNNING", "n1"), app=app, deployment=deployment), NODES)
    assert (view.replicas, view.targets) == ((), ())


def test_an_empty_answer_while_the_controller_restarts_is_not_believed() -> None:
    watch = ControllerWatch()
    empty: dict[str, Any] = {"controller_info": {}, "applications": {}}
    watch.believe(empty, 0.0)  # Serve has not been started yet: nothing is served, and that is true
    watch.believe(details(), 10.0)
    with pytest.raises(Transient, match="controller is away"):
        watch.believe(empty, 10.0 + CONTROLLER_AWAY_S - 1)
    watch.believe(empty, 10.0 + CONTROLLER_AWAY_S)  # shut down for good
