"""Serve's controller with our policy in it: it follows the plan, survives without one, and apps fail alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from serve_apps.board import get_board
from serve_apps.wire import LocalRule, PlanMessage, encode
from tests.live.serve_cluster import ServeCluster, serve_cluster, wait_until

GOOD, OTHER, BROKEN, MALFORMED = "ops.good.sim", "ops.other.sim", "ops.broken.sim", "ops.malformed.sim"
STALE_AFTER_S = 2.0
RULE = LocalRule(target_ongoing_per_replica=4, min_replicas=1, max_replicas=3, downscale_hold_s=3.0)
TIMING = {"a_s": 0.02, "b_s_per_seq": 0.001, "c_s_per_ktoken": 0.0, "prefill_tps": 10_000.0, "max_num_seqs": 8}


def application(name: str, local_rule: dict[str, Any]) -> dict[str, Any]:
    service = "/".join(name.split(".")[:2])
    return {
        "name": name,
        "route_prefix": None,
        "import_path": "serve_apps.engine_sim:build",
        "args": {"service": service, "variant": "sim", "model": "m", "timing": TIMING},
        "autoscaling_policy": {
            "policy_function": "serve_apps.serve_policy:PlanPolicy",
            "policy_kwargs": {"app": name, "local_rule": local_rule},
        },
        "deployments": [
            {
                "name": "LLM",
                "ray_actor_options": {"num_cpus": 0},
                "graceful_shutdown_timeout_s": 2,
                "autoscaling_config": {
                    "min_replicas": 0,
                    "initial_replicas": 1,
                    "max_replicas": 8,
                    "look_back_period_s": 1,
                    "upscale_delay_s": 0,
                    "downscale_delay_s": 0,
                    "downscale_to_zero_delay_s": 0,
                },
            }
        ],
    }


class Publisher:
    """Publishes a plan several times a second until told to stop, as the controller does."""

    def __init__(self) -> None:
        self._board = get_board(create=True)
        self._stop = threading.Event()
        self._targets: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, targets: dict[str, int]) -> None:
        self._targets = targets
        if not self._thread.is_alive():
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        import ray

        seq = 0
        while not self._stop.wait(0.2):
            seq += 1
            message = PlanMessage(
                run_id="test",
                seq=seq,
                published_at_s=0.0,
                stale_after_s=STALE_AFTER_S,
                targets=self._targets,
                local_rules=dict.fromkeys(self._targets, RULE),
                services=(),
            )
            ray.get(self._board.publish.remote(encode(message)), timeout=10)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServeCluster]:
    # Our handles count what waits; Serve reads the period of their reports as it is imported (10 s by default).
    os.environ["RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.5"
    import ray

    with serve_cluster() as running:
        os.environ.pop("RAY_ADDRESS", None)
        ray.init(running.address, namespace="test", log_to_driver=False, configure_logging=False)
        running.deploy(
            {
                "proxy_location": "Disabled",
                "applications": [
                    application(GOOD, RULE.model_dump()),
                    application(OTHER, RULE.model_dump()),
                    application(BROKEN, RULE.model_dump() | {"target_ongoing_per_replica": 0}),
                    application(MALFORMED, {"nonsense": True}),
                ],
            }
        )
        for app in (GOOD, OTHER, BROKEN, MALFORMED):
            wait_until(lambda app=app: running.replicas(app) == 1, 240, f"{app} has its first replica")  # type: ignore[misc]
        yield running
        for app in (GOOD, OTHER, BROKEN):
            handle(app).shutdown()  # its thread would go on talking to a cluster that is gone
        ray.shutdown()


@pytest.fixture
def publisher(cluster: ServeCluster) -> Iterator[Publisher]:
    one = Publisher()
    yield one
    one.stop()


def ask(app: str, count: int, tokens: int) -> list[Any]:
    """Start requests and leave them running; a list of response generators."""
    return [handle(app).remote({"prompt": "hello there", "max_tokens": tokens}) for _ in range(count)]


@cache
def handle(app: str) -> Any:
    """The application's streaming handle."""
    from ray import serve

    return serve.get_app_handle(app).options(stream=True, method_name="generate")


def finish(answers: list[Any]) -> int:
    """Read every answer to its end; tokens in all."""
    return sum(list(answer)[-1]["output_tokens"] for answer in answers)


def test_targets_follow_the_plan_within_two_seconds(cluster: ServeCluster, publisher: Publisher) -> None:
    publisher.start({GOOD: 1, OTHER: 1})
    wait_until(lambda: cluster.target(GOOD) == 1, 60, "the first plan is followed")
    publisher.start({GOOD: 3, OTHER: 2})
    wait_until(lambda: (cluster.target(GOOD), cluster.target(OTHER)) == (3, 2), 2, "targets 3 and 2")
    wait_until(lambda: (cluster.replicas(GOOD), cluster.replicas(OTHER)) == (3, 2), 150, "replicas 3 and 2")
    publisher.start({GOOD: 0, OTHER: 1})
    wait_until(lambda: (cluster.target(GOOD), cluster.target(OTHER)) == (0, 1), 2, "targets 0 and 1")


def test_zero_is_kept_under_load_and_several_start_from_zero(cluster: ServeCluster, publisher: Publisher) -> None:
    publisher.start({GOOD: 0, OTHER: 1})
    wait_until(lambda: cluster.target(GOOD) == 0 and cluster.replicas(GOOD) == 0, 120, "nothing runs")
    answers = ask(GOOD, 3, 5)
    with pytest.raises(AssertionError):
        wait_until(lambda: cluster.target(GOOD) != 0, 4, "Serve overrules the plan")
    publisher.start({GOOD: 3, OTHER: 1})
    wait_until(lambda: cluster.target(GOOD) == 3, 2, "three at once, not one")
    assert finish(answers) == 15


def test_without_a_plan_the_local_rule_scales_up_under_load_and_down_again(
    cluster: ServeCluster, publisher: Publisher
) -> None:
    publisher.start({GOOD: 1, OTHER: 1})
    wait_until(lambda: cluster.target(OTHER) == 1 and cluster.replicas(OTHER) == 1, 150, "one replica by plan")
    answers = ask(OTHER, 10, 700)
    with pytest.raises(AssertionError):
        wait_until(lambda: cluster.target(OTHER) != 1, 2, "the load moves an app whose plan is fresh")
    publisher.stop()
    wait_until(lambda: cluster.target(OTHER) == 3, STALE_AFTER_S + 60, "the local rule answers the load")
    assert finish(answers) == 7000
    wait_until(lambda: cluster.target(OTHER) == 1, 60, "after the hold it goes down")


def test_a_policy_that_fails_inside_harms_no_other_application(cluster: ServeCluster, publisher: Publisher) -> None:
    publisher.start({})
    wait_until(
        lambda: cluster.applications()[GOOD]["status"] == "RUNNING", 60, "a plan that names nobody changes nothing"
    )
    publisher.stop()
    wait_until(lambda: cluster.target(GOOD) == 1, STALE_AFTER_S + 60, "the local rule holds the other app's minimum")
    answers = ask(GOOD, 10, 700) + ask(BROKEN, 1, 5)
    wait_until(lambda: cluster.target(GOOD) == 3, 60, "an app beside two broken policies is still scaled")
    assert cluster.target(BROKEN) == cluster.target(MALFORMED) == 1
    assert finish(answers) == 7005
