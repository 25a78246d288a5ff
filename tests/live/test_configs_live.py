"""The shipped Serve configs work as they are: `serve run` on a bare machine, `serve deploy` on a running head."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import yaml

from tests.live.serve_cluster import SERVE, ServeCluster, free_port, serve_cluster, wait_until

CONFIGS = Path(__file__).resolve().parents[2] / "serve_apps" / "configs"
ASK = {"model": "demo/chat", "max_tokens": 12, "messages": [{"role": "user", "content": "hello there"}]}


def on_free_port(config: Path, tmp_path: Path) -> tuple[Path, str]:
    """The config with another HTTP port, since the machine's 8000 may be taken; the file and the gateway's URL."""
    port = free_port()
    text = config.read_text()
    assert "port: 8000" in text
    changed = tmp_path / config.name
    changed.write_text(text.replace("port: 8000", f"port: {port}"))
    return changed, f"http://127.0.0.1:{port}"


def answers(url: str) -> bool:
    try:
        return httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=60).is_success
    except httpx.TransportError:
        return False


def check_answer(url: str) -> None:
    body = httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=60).raise_for_status().json()
    assert body["usage"]["completion_tokens"] == 12
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["message"]["content"].split()) == 12


def test_serve_run_answers_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with serve_cluster() as cluster:
        config, url = on_free_port(CONFIGS / "quickstart-sim.yaml", tmp_path)
        command = [str(SERVE), "run", "--address", cluster.address, str(config)]
        run = subprocess.Popen(
            command, env=cluster.env, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, preexec_fn=_heed_ctrl_c
        )
        try:
            wait_until(lambda: answers(url), 240, "serve run answers a chat request")
            check_answer(url)
            run.send_signal(signal.SIGINT)
            run.wait(180)
        finally:
            if run.poll() is None:
                psutil.Process(run.pid).kill()


def test_serve_deploy_answers_and_scales_by_the_local_rule(tmp_path: Path) -> None:
    with serve_cluster() as cluster:
        config, url = on_free_port(CONFIGS / "quickstart-sim.yaml", tmp_path)
        command = [str(SERVE), "deploy", "-a", cluster.dashboard_url, str(config)]
        subprocess.run(command, env=cluster.env, check=True, timeout=300, capture_output=True)
        wait_until(lambda: answers(url), 240, "serve deploy answers a chat request")
        check_answer(url)
        under_load(cluster, url)


def under_load(cluster: ServeCluster, url: str) -> None:
    """Twenty long answers at once are more than one replica's share."""
    import asyncio

    async def ask(client: httpx.AsyncClient) -> int:
        answer = await client.post(
            f"{url}/v1/completions", json={"model": "demo/chat", "max_tokens": 500, "prompt": "hi"}
        )
        return int(answer.raise_for_status().json()["usage"]["completion_tokens"])

    async def ask_many() -> list[int]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=40)) as client:
            asked = [asyncio.create_task(ask(client)) for _ in range(20)]
            await asyncio.to_thread(
                wait_until, lambda: cluster.target("demo.chat.sim") == 3, 60, "three replicas wanted"
            )
            return await asyncio.gather(*asked)

    assert asyncio.run(ask_many()) == [500] * 20


def test_both_configs_ask_for_neither_gpus_nor_labels_nor_a_controller() -> None:
    for path in sorted(CONFIGS.glob("*.yaml")):
        text = path.read_text()
        for app in yaml.safe_load(text)["applications"]:
            for deployment in app.get("deployments", []):
                assert set(deployment.get("ray_actor_options", {})) <= {"num_cpus"}
        assert "label_selector" not in text


def _heed_ctrl_c() -> None:
    """Whoever is started in the background by a shell inherits that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
