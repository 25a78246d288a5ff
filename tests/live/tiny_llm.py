"""The smallest Serve application that looks like an engine of ours: one deployment of the agreed name on one GPU."""

from __future__ import annotations

from typing import Any

from ray import serve

from serve_apps.wire import LLM_DEPLOYMENT


@serve.deployment(name=LLM_DEPLOYMENT, ray_actor_options={"num_cpus": 0, "num_gpus": 1}, graceful_shutdown_timeout_s=1)
class TinyLlm:
    """Answers with what it was asked, and exports one of vLLM's gauges under vLLM's labels."""

    def __init__(self) -> None:
        from ray.util.metrics import Gauge

        running = Gauge("vllm_num_requests_running", description="vllm:num_requests_running", tag_keys=("ReplicaId",))
        running.set(3.0, tags={"ReplicaId": serve.get_replica_context().replica_id.unique_id})

    async def generate(self, request: dict[str, object]) -> dict[str, object]:
        return request


deployment: Any = TinyLlm
app = deployment.bind()
