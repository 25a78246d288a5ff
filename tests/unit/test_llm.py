"""What the vLLM deployment derives before vLLM is there: environment, engine arguments, and where the model is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from serve_apps import llm, tiny_model
from serve_apps.engine_args import EngineArgs

BIG = EngineArgs(service="ops/chat", variant="h100", model="org/big", tp=4, precision="fp8", max_num_seqs=64)
TINY = EngineArgs(service="ops/chat", variant="cpu", model=tiny_model.TINY_MODEL)


def test_a_gpu_replica_gets_its_shape_and_priority_scheduling() -> None:
    assert llm.engine_kwargs(BIG, on_cpu=False) == {
        "served_model_name": "org/big",
        "scheduling_policy": "priority",
        "tensor_parallel_size": 4,
        "dtype": "auto",
        "quantization": "fp8",
        "max_num_seqs": 64,
    }


def test_the_tiny_model_is_small_in_everything() -> None:
    kwargs = llm.engine_kwargs(TINY, on_cpu=True)
    assert kwargs["kv_cache_memory_bytes"] == 64 * 2**20
    assert (kwargs["max_num_seqs"], kwargs["max_model_len"], kwargs["enforce_eager"]) == (16, 1024, True)
    four = llm.engine_kwargs(TINY.model_copy(update={"max_num_seqs": 4, "precision": "fp8"}), on_cpu=True)
    assert (four["max_num_seqs"], four["dtype"], "quantization" in four) == (4, "bfloat16", False)


def test_engine_kwargs_of_the_config_win() -> None:
    args = BIG.model_copy(update={"engine_kwargs": {"gpu_memory_utilization": 0.8, "dtype": "float16"}})
    kwargs = llm.engine_kwargs(args, on_cpu=False)
    assert (kwargs["gpu_memory_utilization"], kwargs["dtype"]) == (0.8, "float16")


@pytest.mark.parametrize(
    ("args", "on_cpu", "names"),
    [
        (BIG, False, {"VLLM_NO_USAGE_STATS"}),
        (BIG, True, {"VLLM_NO_USAGE_STATS", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"}),
        (TINY, False, {"VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"}),
    ],
)
def test_only_what_is_needed_enters_the_environment(args: EngineArgs, on_cpu: bool, names: set[str]) -> None:
    assert set(llm.environment(args, on_cpu=on_cpu)) == names


def test_a_model_path_that_is_not_there_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"model .*/nothing: no config\.json there; give a folder with a model"):
        llm.locate(str(tmp_path / "nothing"))
    assert llm.locate("org/big") == "org/big"


def test_a_node_without_vllm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    with pytest.raises(RuntimeError, match=r"ops/chat: vLLM cannot be imported .*quartermaster-serve\[vllm\]"):
        llm._start(BIG, {})


def test_building_the_application_needs_no_vllm_and_refuses_wrong_arguments() -> None:
    args: dict[str, Any] = {"service": "ops/chat", "variant": "cpu", "model": tiny_model.TINY_MODEL}
    assert llm.build(args) is not None
    with pytest.raises(ValueError, match=r"ops/chat: args\.max_num_seqs.*args\.modle"):
        llm.build(args | {"max_num_seqs": "many", "modle": "x"})
