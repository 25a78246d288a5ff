"""The catalogue's format: instance types, models and performance constants, each with its source. May not do I/O.

Facts with a date, and constants with an uncertainty; nothing here is a decision. Frozen and strict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Precision = Literal["bf16", "fp16", "fp8", "int8", "int4", "fp4"]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]

# int4 carries a 16-bit scale for every 32 weights, fp4 (MXFP4) an 8-bit one.
WEIGHT_BYTES: dict[Precision, float] = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5625,
    "fp4": 0.53125,
}


class Entry(BaseModel):
    """Unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Source(Entry):
    """Where figures come from, when they were read, and under which licence."""

    what: str
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    licence: str


class Sourced(Entry):
    """An entry that names its sources."""

    source: Annotated[tuple[str, ...], Field(min_length=1)]


class Gpu(Sourced):
    """One GPU: memory, that memory's bandwidth (GB/s), dense BF16 rate (TFLOP/s), and whether it multiplies in FP8."""

    memory_mib: Count
    bandwidth_gb_per_s: Positive
    bf16_tflops: Positive
    fp8: bool = False

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes."""
        return self.memory_mib * 2.0**20


class InstanceType(Sourced):
    """One EC2 type. Prices are us-east-1's at the date of the source; None where none was published."""

    family: str
    gpu: str
    gpus: Count
    vcpus: Count
    memory_gib: Count
    network_gbps: Positive
    efa_interfaces: Annotated[int, Field(ge=0)] = 0
    local_nvme_gb: NonNegative
    on_demand_usd_per_h: Positive | None = None
    spot_usd_per_h: Positive | None = None
    block_usd_per_h: Positive | None = None
    boot_s: Positive


class Price(Sourced):
    """What an hour of an instance type costs in a region's market from the day `since` on."""

    instance_type: str
    region: str
    market: Literal["on_demand", "spot", "block"]
    since: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    usd_per_h: Positive


class SpotPool(Entry):
    """Spot of a type in a region. `interrupted` is the Spot Advisor's class a month: 0 under 5 %, 1 to 10, 2 to 15,
    3 to 20, 4 more; of `zones`, `zones_without_spot` have no pool or sell at the on-demand price. None: not published.
    """

    interrupted: Annotated[int, Field(ge=0, le=4)] | None = None
    saving: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    zones: Count | None = None
    zones_without_spot: Annotated[int, Field(ge=0)] | None = None


class SpotPools(Sourced):
    """Spot of a type, by region."""

    regions: dict[str, SpotPool]


class ModelCard(Sourced):
    """Architecture of a model. `kv_heads` is None for latent attention (one compressed KV, held by every TP rank)."""

    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count | None
    head_dim: Count
    experts: Count = 1
    experts_per_token: Count = 1
    max_position: Count
    params_b: Positive
    active_params_b: Positive
    kv_bytes_per_token: Count
    full_attention_layers: Count | None = None
    sliding_window_tokens: Count | None = None
    weights_gb: dict[Precision, Positive]

    def weight_bytes(self, precision: Precision) -> float:
        """Bytes of the weights; a precision without a published size is taken from the parameter count."""
        stated = self.weights_gb.get(precision)
        return stated * 1e9 if stated is not None else self.params_b * 1e9 * WEIGHT_BYTES[precision]


class Measurement(Sourced):
    """Timing constants of one engine shape (`serve_apps.timing`). `gpu: any` holds on every GPU.

    `load_s` and the engine's limits are given only where they do not follow from the model and the GPU.
    """

    model: str
    gpu: str
    tp: Count = 1
    precision: Precision = "bf16"
    a_s: NonNegative
    b_s_per_seq: NonNegative
    c_s_per_ktoken: NonNegative
    prefill_tps: Positive
    prefill_fixed_s: NonNegative = 0.0
    moe_w_s: NonNegative = 0.0
    max_num_seqs: Count | None = None
    max_model_len: Count | None = None
    kv_capacity_tokens: Count | None = None
    load_s: Positive | None = None
    uncertainty: NonNegative

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What the constants hold for."""
        return self.model, self.gpu, self.tp, self.precision


class Roofline(Sourced):
    """Fractions of the hardware's rates that the estimate for unmeasured shapes assumes."""

    decode_bandwidth_fraction: Positive
    kv_bandwidth_fraction: Positive
    prefill_tensor_fraction: Positive
    tp_step_s_per_layer: NonNegative
    moe_prefill_tensor_fraction: Positive
    fp8_prefill_gain: Positive
    moe_step_s_per_layer_and_rank: NonNegative
    uncertainty: NonNegative


class Start(Sourced):
    """What an engine's start takes: weights over a source of this bandwidth, then initialisation."""

    weights_bytes_per_s: Positive
    engine_init_s: NonNegative
    engine_init_s_per_layer: NonNegative


class Catalogue(Entry):
    """All files as one."""

    sources: dict[str, Source]
    gpus: dict[str, Gpu]
    instance_types: dict[str, InstanceType]
    models: dict[str, ModelCard]
    measurements: tuple[Measurement, ...]
    roofline: Roofline
    start: Start
    prices: tuple[Price, ...] = ()
    spot_pools: dict[str, SpotPools] = {}

    def measurement(self, model: str, gpu: str, tp: int, precision: Precision) -> Measurement | None:
        """The constants measured for this shape, on this GPU or on any; of several the last (an override) counts."""
        keys = ((model, gpu, tp, precision), (model, "any", tp, precision))
        return next((found for found in reversed(self.measurements) if found.key in keys), None)

    def price(self, instance_type: str, region: str, market: str, on: str = "9999-12-31") -> Price | None:
        """The newest price known on the day `on` (ISO date); of one day's, the last that was added (an override)."""
        found = None
        for row in self.prices:
            if (row.instance_type, row.region, row.market) == (instance_type, region, market) and row.since <= on:
                found = row if found is None or row.since >= found.since else found
        return found

    def entries(self) -> Iterator[tuple[tuple[str | int, ...], Sourced]]:
        """Every entry that names sources, with its path."""
        for name in ("gpus", "instance_types", "models"):
            yield from (((name, key), entry) for key, entry in getattr(self, name).items())
        yield from ((("spot_pools", key), entry) for key, entry in self.spot_pools.items())
        yield from ((("measurements", index), entry) for index, entry in enumerate(self.measurements))
        yield from ((("prices", index), entry) for index, entry in enumerate(self.prices))
        yield from ((("roofline",), self.roofline), (("start",), self.start))
