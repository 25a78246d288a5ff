"""The arguments of an engine application: what `args` of a Serve config may say to `llm:build` and `engine_sim:build`.

Pure data: may not import Ray, vLLM, a clock, or anything that does I/O. An unknown or wrong key is one clear error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve_apps.timing import Timing

DEFAULT_MAX_NUM_SEQS = 16
DEFAULT_MAX_MODEL_LEN = 1024


class EngineArgs(BaseModel):
    """One engine replica. `timing`, `load_s`, `time_scale` and `stream_every_s` concern the simulated engine only.

    `time_scale`: seconds of the timing law per real second (2 = twice as fast). `stream_every_s`: the simulated engine
    sends the first and the last token at once and what lies between in pieces of this length, to spare the processor.
    `engine_kwargs` go to vLLM as they are and win over what is derived here. `revision` is read by nobody: Serve
    replaces the replicas of an application whose arguments changed, and this one changes when the policy says so.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    service: str
    variant: str
    model: str
    revision: str = "1"
    tp: Annotated[int, Field(ge=1)] = 1
    precision: str = "bf16"
    timing: Timing | None = None
    max_num_seqs: Annotated[int, Field(ge=1)] | None = None
    max_model_len: Annotated[int, Field(ge=8)] | None = None
    load_s: Annotated[float, Field(ge=0)] = 0.0
    time_scale: Annotated[float, Field(gt=0)] = 1.0
    stream_every_s: Annotated[float, Field(gt=0)] = 0.5
    engine_kwargs: dict[str, Any] = {}

    def shape(self) -> Timing:
        """The timing law with the limits named beside it applied. Raises ValueError when there is no `timing`."""
        if self.timing is None:
            raise ValueError(f"{self.service}: args.timing is missing: the simulated engine needs the constants of one")
        limits = {"max_num_seqs": self.max_num_seqs, "max_model_len": self.max_model_len}
        return replace(self.timing, **{key: value for key, value in limits.items() if value is not None})


def parse(args: dict[str, Any]) -> EngineArgs:
    """`args` of a Serve application, checked. Raises ValueError that names every wrong key."""
    try:
        return EngineArgs.model_validate(args)
    except ValidationError as error:
        problems = "; ".join(f"args.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"engine application {args.get('service', '?')}: {problems}") from None
