"""The gateway on real Ray Serve: OpenAI's own client and vLLM's own load tool, replicas that die under a request,
callers who leave, routes that change, and an overflow endpoint behind HTTP of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from openai import APIError, NotFoundError, OpenAI, RateLimitError
from ray import serve

from serve_apps.board import get_board
from serve_apps.tiny_model import ensure
from serve_apps.wire import (
    GATEWAY_APP,
    GATEWAY_DEPLOYMENT,
    LLM_DEPLOYMENT,
    OverflowRoute,
    PlanMessage,
    Routes,
    ServiceRoute,
    VariantRoute,
    encode,
)
from tests.gateway_fakes import FakeEngines, Rig, routed, variant
from tests.live.serve_cluster import ServeCluster, free_port, serve_cluster, wait_until

APP = "support.chat.tiny"
STEP_S = 0.05


class TinyLlm:
    """An engine that repeats its prompt word by word. ``die AFTER FILE`` ends the process after that many words, unless
    FILE says that it was done before; ``hold FILE`` goes on until it is cancelled, and says so in FILE; ``known …`` is
    found in the prefix cache, and answered with the replica's name."""

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if "prompt_token_ids" in request:
            request = {"prompt": "word " * request["max_tokens"]}
        words = (request.get("prompt") or request["messages"][-1]["content"]).split()
        if words[0] == "known":
            name = serve.get_replica_context().replica_id.unique_id
            yield {"text": name, "output_tokens": 1, "input_tokens": 2, "cached_tokens": 1, "finish_reason": "stop"}
            return
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


def route(*, ready: int, max_queued: int = 10, slots: int = 8, **more: Any) -> ServiceRoute:
    tiny = VariantRoute(
        app=APP,
        target_replicas=2,
        ready_replicas=ready,
        max_concurrency_per_replica=slots,
        capacity_rps_per_replica=5.0,
    )
    return ServiceRoute(
        service="support/chat",
        priority=1,
        variants=(tiny,),
        max_queued=max_queued,
        queue_timeout_s=30.0,
        retry_after_s=2.0,
        **more,
    )


def config(port: int, *services: ServiceRoute) -> dict[str, Any]:
    routes = Routes(services=(route(ready=0), *services)).model_dump(mode="json")
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": GATEWAY_APP,
                "route_prefix": "/",
                "import_path": "serve_apps.gateway:build",
                "deployments": [{"name": GATEWAY_DEPLOYMENT, "user_config": routes}],
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
    from ray.serve.config import RequestRouterConfig

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
            request_router_config=RequestRouterConfig(request_router_class="serve_apps.affinity:PrefixRouter"),
        )
        serve.run(engine.bind(), name=APP, route_prefix=None)
        wait_until(lambda: _open(port), 180, "the gateway answers")
        url = f"http://127.0.0.1:{port}"
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield Door(url, client)
    finally:
        ray.shutdown()


def publish(seq: int, *services: ServiceRoute) -> None:
    """A plan on the board."""
    import ray

    message = PlanMessage(
        run_id="r", seq=seq, published_at_s=0, stale_after_s=60, targets={}, local_rules={}, services=services
    )
    ray.get(get_board(create=True).publish.remote(encode(message)))


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
    wait_until(mark.exists, 30, "the engine is told to stop")
    wait_until(lambda: door.metric("running") == 0, 30, "the slot is free")


def test_prompts_that_engines_know_go_to_the_replica_that_knows_them(door: Door) -> None:
    """Two replicas, twelve openings, three rounds: each opening has one home; by chance it would not be the same."""
    for _ in range(5):  # until hits are more than a mere fraction of all that was asked so far
        door.ask("known first")

    def homes() -> list[str]:
        return [door.ask(f"known {n}") for n in range(12)]

    # The tests above killed replicas: a home stays where it is only from when the last of them is back and known here.
    wait_until(lambda: len(set(homes())) == 2, 60, "both replicas answer")
    rounds = [homes() for _ in range(3)]
    assert rounds[0] == rounds[1] == rounds[2]
    assert len(set(rounds[0])) == 2


def test_new_routes_reach_the_running_gateway_and_an_open_stream_goes_on(
    cluster: ServeCluster, door: Door, tmp_path: Path
) -> None:
    """Serve hands the changed `user_config` to the replica; as arguments it would have started another one."""
    stream = iter(
        door.openai.completions.create(model="chat", prompt=f"hold {tmp_path / 'x'} " + "on " * 40, stream=True)
    )
    assert next(stream).choices[0].text == "hold "
    arrivals = door.metric("arrivals_total")
    more = route(ready=0).model_copy(update={"service": "support/more"})
    cluster.deploy(config(int(door.url.rpartition(":")[2]), more))
    wait_until(lambda: len(door.openai.models.list().data) == 2, 90, "the new route is in force")
    assert door.metric("arrivals_total") == arrivals, "the same process counts on"
    assert door.metric("running") == 1
    assert door.ask("a b") == "a b "
    stream.close()  # type: ignore[attr-defined]


def test_vllms_load_tool_replays_a_mooncake_trace_unchanged(door: Door, tmp_path: Path) -> None:
    """The trace's format: one JSON object a line, milliseconds, and blocks of 512 prompt tokens by hash."""
    trace = tmp_path / "trace.jsonl"
    rows: list[dict[str, Any]] = [
        {"timestamp": 60 * n, "input_length": 40 + n, "output_length": 2 + n % 4, "hash_ids": [n % 3]}
        for n in range(20)
    ]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tool = "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    tool += "p = argparse.ArgumentParser(); add_cli_args(p); main(p.parse_args())"
    command = [sys.executable, "-c", tool, "--backend=openai", f"--base-url={door.url}", "--endpoint=/v1/completions"]
    command += [
        "--model=chat",
        f"--tokenizer={ensure(tmp_path)}",
        "--dataset-name=timed_trace",
        f"--dataset-path={trace}",
    ]
    command += ["--timed-trace-chunk-hash-size=512", "--timed-trace-sec-multiplier=0.001", "--num-prompts=20"]
    command += ["--save-result", f"--result-dir={tmp_path}", "--result-filename=result.json", "--disable-tqdm"]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=os.environ | quiet, check=True, capture_output=True, timeout=240)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (20, 0)
    assert result["total_output_tokens"] == sum(row["output_length"] for row in rows)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A second gateway of ours, on HTTP of its own, as an OpenAI-compatible endpoint that others run; its base URL."""
    far = Rig(FakeEngines(far=1), routed("far/model", variant("far", slots=100)))
    server = uvicorn.Server(uvicorn.Config(far.app, host="127.0.0.1", port=free_port(), log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, 60, "the endpoint listens")
    yield f"http://127.0.0.1:{server.config.port}/v1"
    server.should_exit = True
    thread.join(10)


def test_overflow_takes_what_would_be_late_and_is_left_when_capacity_comes(
    door: Door, elsewhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One slot, answers of .2 s and limits that leave .1 s to wait; then sixteen slots."""
    overflow = OverflowRoute(url=elsewhere, model="far/model", rpm=600, usd_per_1m_tokens=2.0)
    more: dict[str, Any] = {
        "overflow": overflow,
        "slack_s": 0.1,
        "next_capacity_s": 60.0,
        "sacrifice": ("queue", "overflow", "shed"),
    }

    def burst() -> tuple[int, float]:
        """Twelve callers at once: answers of the endpoint's, and the slowest of all in seconds."""
        began_s = time.monotonic()
        with ThreadPoolExecutor(12) as pool:
            texts = list(pool.map(lambda _: door.ask("a b c d"), range(12)))
        assert set(texts) <= {"a b c d ", "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 "}
        return sum(text.startswith("w0") for text in texts), time.monotonic() - began_s

    publish(11, route(ready=1, slots=1, **more))
    wait_until(lambda: door.health()["plan"] == "fresh", 60, "the plan is taken")
    burst()  # the first to be late has the endpoint probed
    spilled, spilled_s = burst()
    publish(12, route(ready=2, slots=8, **more))
    wait_until(lambda: burst()[0] == 0, 60, "the endpoint is left alone again")
    own, own_s = burst()
    usd = door.metric("overflow_tokens_total") * overflow.usd_per_1m_tokens / 1e6
    with capsys.disabled():
        print(f"\noverflow: {spilled} of 12 in {spilled_s:.2f} s, then {own} of 12 in {own_s:.2f} s, ${usd:.6f}")
    assert spilled >= 9
    assert own == 0
    assert door.metric("overflowed_total") >= spilled
    assert usd > 0


def test_plans_on_the_board_open_and_close_the_service(door: Door) -> None:
    import ray

    publish(1, route(ready=0, max_queued=0))
    wait_until(lambda: door.health()["plan"] == "fresh" and not _served(door), 60, "the plan is taken")
    with pytest.raises(RateLimitError) as caught:
        door.ask("a b")
    assert caught.value.response.headers["retry-after"] in ("2", "1")
    publish(2, route(ready=2))
    wait_until(lambda: door.metric("queued") == 0 and _served(door), 60, "the next plan opens the service")
    reports = ray.get(get_board(create=True).reports.remote())
    assert len(reports) == 1


def _served(door: Door) -> bool:
    try:
        return door.ask("a b") == "a b "
    except RateLimitError:
        return False
