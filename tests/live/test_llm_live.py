"""Real vLLM on the CPU behind Serve: one replica answers prompts and chats in deltas and forgets who leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.serve_cluster import ServeCluster, serve_cluster, wait_until

APP = "ops.chat.cpu"
MISSING = "ops.missing.cpu"
LIMITS = {"max_num_seqs": 4, "max_model_len": 1024}


def application(name: str, model: str) -> dict[str, Any]:
    return {
        "name": name,
        "route_prefix": None,
        "import_path": "serve_apps.llm:build",
        "args": {"service": "/".join(name.split(".")[:2]), "variant": "cpu", "model": model} | LIMITS,
        "deployments": [{"name": "LLM", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}],
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[ServeCluster]:
    import ray

    os.environ["QM_CACHE"] = str(cache)
    with serve_cluster() as running:
        os.environ.pop("QM_CACHE")
        ray.init(running.address, log_to_driver=False, configure_logging=False)
        apps = [application(APP, "quartermaster/tiny-llama"), application(MISSING, "/no/such/model")]
        running.deploy({"proxy_location": "Disabled", "applications": apps})
        wait_until(lambda: running.replicas(APP) == 1, 285, "the engine has loaded")
        yield running
        ray.shutdown()


@pytest.fixture(scope="module")
def handle(cluster: ServeCluster) -> Iterator[Any]:
    from ray import serve

    one = serve.get_app_handle(APP).options(stream=True, method_name="generate")
    yield one
    one.shutdown()


def ask(handle: Any, **request: Any) -> list[dict[str, Any]]:
    return list(handle.remote({"temperature": 0.0, "ignore_eos": True} | request))


def series(cluster: ServeCluster, name: str) -> float | None:
    """The sum of one exported series, or None when it is not there."""
    text = httpx.get(f"http://127.0.0.1:{cluster.metrics_port}/metrics", timeout=20).raise_for_status().text
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{")]
    return sum(values) if values else None


def test_a_prompt_is_answered_in_deltas_that_count(handle: Any) -> None:
    pieces = ask(handle, prompt="The value of an expression", max_tokens=40, min_tokens=40)
    assert len(pieces) > 2, "the answer is streamed"
    assert [one["finish_reason"] for one in pieces] == [None] * (len(pieces) - 1) + ["length"]
    counts = [one["output_tokens"] for one in pieces]
    assert counts == sorted(set(counts))
    assert counts[-1] == 40
    assert 3 <= pieces[0]["input_tokens"] <= 12
    again = ask(handle, prompt="The value of an expression", max_tokens=40, min_tokens=40)
    assert "".join(one["text"] for one in pieces) == "".join(one["text"] for one in again) != ""


def test_messages_go_through_the_chat_template(handle: Any) -> None:
    chat = ask(handle, messages=[{"role": "user", "content": "hello"}], max_tokens=5)
    bare = ask(handle, prompt="user: hello\nassistant:", max_tokens=5)
    assert chat[-1]["input_tokens"] == bare[-1]["input_tokens"]
    assert "".join(one["text"] for one in chat) == "".join(one["text"] for one in bare)


def test_a_prompt_that_is_too_long_is_a_value_error_with_the_limit(handle: Any) -> None:
    with pytest.raises(ValueError, match="this engine holds 1024, answer included"):
        ask(handle, prompt="word " * 1200, max_tokens=5)


def test_a_caller_who_leaves_stops_the_engine(cluster: ServeCluster, handle: Any) -> None:
    leaving = [handle.remote({"prompt": "a b c", "max_tokens": 1000, "min_tokens": 1000}) for _ in range(4)]
    for one in leaving:
        next(one)
        one.cancel()
    assert ask(handle, prompt="a b c", max_tokens=20)[-1]["output_tokens"] == 20
    wait_until(lambda: series(cluster, "ray_vllm_num_requests_running") == 0.0, 30, "nothing runs any more")
    finished = series(cluster, "ray_vllm_generation_tokens_total")
    assert finished is not None
    assert finished < 4 * 1000, "the engine did not go on for callers who had left"


def test_the_series_that_the_simulated_engine_promises_are_vllms(cluster: ServeCluster) -> None:
    from serve_apps.law_metrics import COUNTERS, PREFIX
    from serve_apps.sim_metrics import HISTOGRAMS

    names = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"]
    names += ["generation_tokens_total", "request_success_total", "prefix_cache_queries_total"]
    names += [f"{name}_count" for name in HISTOGRAMS]
    wait_until(
        lambda: all(series(cluster, f"ray_vllm_{name}") is not None for name in names), 30, "vLLM exports them all"
    )
    law = {name: f"ray_{PREFIX}{name}_total" for name in COUNTERS}
    wait_until(lambda: all(series(cluster, name) is not None for name in law.values()), 30, "and what the law is in")
    steps, tokens = series(cluster, law["steps"]), series(cluster, law["step_tokens"])
    assert steps is not None and tokens is not None  # noqa: PT018
    assert 0.0 < steps <= tokens


def test_a_missing_model_fails_its_own_application_and_says_why(cluster: ServeCluster) -> None:
    def said() -> str:
        app = cluster.applications()[MISSING]
        return str(app["message"]) + str(app["deployments"].get("LLM", {}).get("message", ""))

    wait_until(lambda: "no config.json there" in said(), 180, "the remedy reaches Serve's status")
    assert cluster.applications()[APP]["status"] == "RUNNING"


def test_the_model_was_made_in_the_cache(cluster: ServeCluster, cache: Path) -> None:
    assert (cache / "tiny-llama-1" / "model.safetensors").is_file()
