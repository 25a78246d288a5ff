"""The vLLM engine as a Serve deployment: one AsyncLLM per replica, asked through `generate`.

vLLM is imported in the replica's constructor only, so that building the application costs nothing and needs no vLLM.
The model "quartermaster/tiny-llama" is made locally; anything else is a Hugging Face id or a path. May not know of
plans, policies or the gateway.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

from serve_apps.engine_args import DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_NUM_SEQS, EngineArgs, parse
from serve_apps.law_metrics import vllm_logger
from serve_apps.pipe import Outbox
from serve_apps.tiny_model import TINY_MODEL, ensure
from serve_apps.wire import LLM_DEPLOYMENT

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "seed"),
    *("presence_penalty", "frequency_penalty", "ignore_eos", "stop"),
)
# Several replicas share a machine's cores in the demo: one thread each, none of them pinned.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
TINY_KV_CACHE_BYTES = 64 * 2**20
# On a CPU a piece of text per token costs more to carry than to make.
CPU_STREAM_INTERVAL = 5


class LLM:
    """The deployment class. Raises RuntimeError, naming model and remedy, when the engine cannot start."""

    def __init__(self, args: dict[str, Any]) -> None:
        self._args = parse(args)
        on_cpu = runs_on_cpu()
        os.environ.update(environment(self._args, on_cpu=on_cpu))
        self._engine = _start(self._args, engine_kwargs(self._args, on_cpu=on_cpu))
        self._max_model_len: int = self._engine.model_config.max_model_len
        self._outbox = Outbox()

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer one request in pieces ``{"text", "output_tokens" so far, "input_tokens", "cached_tokens",
        "finish_reason"}``.

        `request`: "prompt", "prompt_token_ids" or "messages", the sampling fields of SAMPLING, "priority" (lower
        first), "request_id" and "reply_to" (see `pipe`).
        Leaving the iterator early aborts the request in the engine. Raises ValueError for a prompt that is too long.
        """
        async with aclosing(self._outbox.deliver(request, self._answer(request))) as pieces:
            async for piece in pieces:
                yield piece

    async def _answer(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        tokens = self._tokens(request)
        wanted = {name: request[name] for name in SAMPLING if request.get(name) is not None}
        wanted["max_tokens"] = min(wanted.get("max_tokens") or self._max_model_len, self._max_model_len - len(tokens))
        outputs = self._engine.generate(
            {"prompt_token_ids": tokens},
            SamplingParams(output_kind=RequestOutputKind.DELTA, **wanted),
            str(request.get("request_id") or uuid4().hex),
            priority=int(request.get("priority") or 0),
        )
        made = 0
        try:
            async for output in outputs:
                delta = output.outputs[0]
                made += len(delta.token_ids)
                yield {
                    "text": delta.text,
                    "output_tokens": made,
                    "input_tokens": len(tokens),
                    "cached_tokens": output.num_cached_tokens or 0,
                    "finish_reason": delta.finish_reason,
                }
        finally:
            await outputs.aclose()

    async def check_health(self) -> None:
        """Raises when the engine has died; Serve then replaces the replica."""
        await self._engine.check_health()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()

    def _tokens(self, request: dict[str, Any]) -> list[int]:
        tokenizer = self._engine.get_tokenizer()
        if request.get("prompt_token_ids") is not None:
            tokens = request["prompt_token_ids"]
        elif request.get("messages"):
            text = tokenizer.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=True)
            tokens = tokenizer.encode(text, add_special_tokens=False)  # the template has written them
        elif request.get("prompt") is not None:
            tokens = tokenizer.encode(request["prompt"])
        else:
            raise ValueError('the request holds no "prompt", "prompt_token_ids" or "messages"')
        if not 0 < len(tokens) < self._max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and this engine holds {self._max_model_len}, answer included"
            )
        return list(tokens)


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build, known without importing torch."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def environment(args: EngineArgs, *, on_cpu: bool) -> dict[str, str]:
    """Variables that must stand before vLLM is imported."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        variables |= CPU_ENVIRONMENT
    if args.model == TINY_MODEL:
        variables |= {"HF_HUB_OFFLINE": "1"}
    return variables


def engine_kwargs(args: EngineArgs, *, on_cpu: bool) -> dict[str, Any]:
    """AsyncEngineArgs for this replica, without the model's place. `args.engine_kwargs` win."""
    kwargs: dict[str, Any] = {
        "served_model_name": args.model,
        "scheduling_policy": "priority",
        "tensor_parallel_size": args.tp,
        "dtype": DTYPES.get(args.precision, "auto"),
    }
    if args.precision == "fp8":
        kwargs["quantization"] = "fp8"
    if args.max_num_seqs is not None:
        kwargs["max_num_seqs"] = args.max_num_seqs
    if args.max_model_len is not None:
        kwargs["max_model_len"] = args.max_model_len
    if on_cpu:
        kwargs |= {"enforce_eager": True, "stream_interval": CPU_STREAM_INTERVAL}
    if args.model == TINY_MODEL:
        kwargs = {"max_num_seqs": DEFAULT_MAX_NUM_SEQS, "max_model_len": DEFAULT_MAX_MODEL_LEN} | kwargs
        kwargs |= {"kv_cache_memory_bytes": TINY_KV_CACHE_BYTES, "dtype": "bfloat16"}
        kwargs.pop("quantization", None)  # nothing of it is worth compressing
    return kwargs | args.engine_kwargs


def locate(model: str) -> str:
    """Where vLLM finds the model. Raises RuntimeError for a path that is not there."""
    if model == TINY_MODEL:
        return str(ensure())
    if model.startswith(("/", "./", "../", "~")):
        folder = Path(model).expanduser()
        if not (folder / "config.json").is_file():
            raise RuntimeError(f"model {model}: no config.json there; give a folder with a model, or a Hugging Face id")
        return str(folder)
    return model


def _start(args: EngineArgs, kwargs: dict[str, Any]) -> Any:
    place = locate(args.model)
    from ray import serve

    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger
    except ImportError as error:
        raise RuntimeError(
            f"{args.service}: vLLM cannot be imported ({error}); install quartermaster-serve[vllm] on GPU nodes, "
            "quartermaster-serve[vllm-cpu] for the demo on one machine"
        ) from error
    loggers = [RayPrometheusStatLogger, vllm_logger(serve.get_replica_context().replica_id.unique_id)]
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=place, **kwargs), stat_loggers=loggers)
    except Exception as error:
        raise RuntimeError(
            f"{args.service}: vLLM cannot serve model {args.model}: {error}. Check the model's name, that this node "
            "can download it or has it cached, and that it fits the GPUs"
        ) from error


def build(args: dict[str, Any]) -> Any:
    """The Serve application of one engine variant. Raises ValueError that names every wrong argument."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    seqs = parse(args).max_num_seqs or DEFAULT_MAX_NUM_SEQS
    return serve.deployment(
        LLM,
        name=LLM_DEPLOYMENT,
        max_ongoing_requests=2 * seqs,
        request_router_config=RequestRouterConfig(request_router_class="serve_apps.affinity:PrefixRouter"),
    ).bind(args)
