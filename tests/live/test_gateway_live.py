"""The gateway on real Ray Serve: OpenAI's own client, replicas that die under a request, callers who leave."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, NotFoundError, OpenAI, RateLimitError

from serve_apps.board import get_board
from serve_apps.wire import (
    GATEWAY_APP,
    GATEWAY_DEPLOYMENT,
    LLM_DEPLOYMENT,
    PlanMessage,
    Routes,
    ServiceRoute,
    VariantRoute,
    encode,
)
from tests.live.serve_cluster import ServeCluster, free_port, serve_cluster, wait_until

APP = "support.chat.tiny"
STEP_S = 0.05


class TinyLlm:
    """An engine that repeats its prompt word by word. ``die AFTER FILE`` ends the process after that many words, unless
    FILE says that it was done before; ``hold FILE`` goes on until it is cancelled, and says so in FILE."""

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        words = (request.get("prompt") or request["messages"][-1]["content"]).split()
        if words[0] == "invalid":
            raise ValueError("this prompt is longer than the context")
        try:
            for n, word in enumerate(words):
                if words[0] == "die" and n == int(words[1]) and not Path(words[2]).exists():
                    Path(words[2]).touch()
                    os._exit(1)
                last = "stop" if n + 1 == len(words) else None
                yield {"text": f"{word} ", "output_tokens": n + 1, "input_tokens": len(words), "finish_reason": last}
                await asyncio.sleep(STEP_S)
                while words[0] == "hold":
                    await asyncio.sleep(STEP_S)
        except asyncio.CancelledError:
            if words[0] == "hold":
                Path(words[1]).touch()
            raise


@dataclass(frozen=True)
class Door:
    """The gateway's address, and what is known of it from outside."""

    url: str
    openai: OpenAI

    def health(self) -> dict[str, Any]:
        state: dict[str, Any] = httpx.get(f"{self.url}/healthz").raise_for_status().json()
        return state

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").raise_for_status().text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"qm_gateway_{name}{{"))

    def ask(self, prompt: str) -> str:
        answer = self.openai.completions.create(model="support/chat", prompt=prompt)
        return answer.choices[0].text


def route(*, ready: int, max_queued: int = 10) -> ServiceRoute:
    tiny = VariantRoute(
        app=APP, target_replicas=2, ready_replicas=ready, max_concurrency_per_replica=8, capacity_rps_per_replica=5.0
    )
    return ServiceRoute(
        service="support/chat",
        priority=1,
        variants=(tiny,),
        max_queued=max_queued,
        queue_timeout_s=30.0,
        retry_after_s=2.0,
    )


def config(port: int) -> dict[str, Any]:
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": GATEWAY_APP,
                "route_prefix": "/",
                "import_path": "serve_apps.gateway:build",
                "deployments": [
                    {
                        "name": GATEWAY_DEPLOYMENT,
                        "user_config": Routes(services=(route(ready=0),)).model_dump(mode="json"),
                    }
                ],
            }
        ],
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServeCluster]:
    with serve_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def door(cluster: ServeCluster) -> Iterator[Door]:
    import ray
    from ray import serve

    port = free_port()
    cluster.deploy(config(port))
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["*"]))
        engine = serve.deployment(
            TinyLlm,
            name=LLM_DEPLOYMENT,
            num_replicas=2,
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=1,
        )
        serve.run(engine.bind(), name=APP, route_prefix=None)
        wait_until(lambda: _open(port), 180, "the gateway answers")
        url = f"http://127.0.0.1:{port}"
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield Door(url, client)
    finally:
        ray.shutdown()


def _open(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz").is_success
    except httpx.HTTPError:
        return False


def test_openais_client_streams_and_counts(door: Door) -> None:
    stream = door.openai.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "to be or not"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert [c.choices[0].delta.content for c in chunks[:-1]] == ["", "to ", "be ", "or ", "not ", None]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (4, 4)
    assert [model.id for model in door.openai.models.list()] == ["support/chat"]
    assert door.health()["plan"] == "none"


def test_errors_reach_openais_client_as_its_own(door: Door) -> None:
    with pytest.raises(NotFoundError, match="The model 'nope' does not exist"):
        door.openai.completions.create(model="nope", prompt="a")
    with pytest.raises(APIError, match="this prompt is longer than the context") as caught:
        door.ask("invalid")
    assert caught.value.type == "invalid_request_error"


def test_a_replica_killed_before_the_first_token_is_not_noticed(door: Door, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    assert door.ask(f"die 0 {mark}") == f"die 0 {mark} "
    assert mark.exists()
    assert door.metric("failed_total") == 0


def test_a_replica_killed_in_mid_answer_is_an_error_event(door: Door, tmp_path: Path) -> None:
    stream = door.openai.completions.create(model="chat", prompt=f"die 2 {tmp_path / 'died'}", stream=True)
    seen: list[str] = []
    with pytest.raises(APIError, match="The engine failed"):
        seen.extend(chunk.choices[0].text for chunk in stream)
    assert seen == ["die ", "2 "]
    assert door.metric("failed_total") == 1


def test_a_caller_who_leaves_stops_the_engine(door: Door, tmp_path: Path) -> None:
    mark = tmp_path / "cancelled"
    stream = door.openai.completions.create(model="chat", prompt=f"hold {mark}", stream=True)
    assert next(iter(stream)).choices[0].text == "hold "
    assert door.metric("running") == 1
    stream.close()
    wait_until(mark.exists, 5, "the engine is told to stop")
    wait_until(lambda: door.metric("running") == 0, 5, "the slot is free")


def test_plans_on_the_board_open_and_close_the_service(door: Door) -> None:
    import ray

    board = get_board(create=True)

    def publish(seq: int, *services: ServiceRoute) -> None:
        message = PlanMessage(
            run_id="r", seq=seq, published_at_s=0, stale_after_s=60, targets={}, local_rules={}, services=services
        )
        ray.get(board.publish.remote(encode(message)))

    publish(1, route(ready=0, max_queued=0))
    wait_until(lambda: door.health()["plan"] == "fresh", 10, "the plan is taken")
    with pytest.raises(RateLimitError) as caught:
        door.ask("a b")
    assert caught.value.response.headers["retry-after"] == "2"
    publish(2, route(ready=2))
    wait_until(lambda: door.metric("queued") == 0 and _served(door), 10, "the next plan opens the service")
    reports = ray.get(board.reports.remote())
    assert len(reports) == 1


def _served(door: Door) -> bool:
    try:
        return door.ask("a b") == "a b "
    except RateLimitError:
        return False
