"""From a policy and the catalogue to engine shapes: does it fit, how fast is it, how long does it take to start.

Pure; may not do I/O or read a clock. Constants are measured where the catalogue has them, otherwise a roofline estimate
that says so in `Shape.source`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoscaler.core.model import Shape
from policies.model import PolicySet, Service, Variant
from policies.problems import suggestion
from serve_apps.timing import Timing

from .model import Catalogue, Gpu, InstanceType, Measurement, ModelCard, Precision, Roofline

USABLE_MEMORY_FRACTION = 0.9  # vLLM's gpu_memory_utilization
ENGINE_MEMORY_BYTES = 3e9  # a GPU: CUDA context, activations, graphs
MIN_CONTEXT_TOKENS = 2048  # less KV than this serves nobody
MAX_NUM_SEQS = 256  # vLLM's default


@dataclass(frozen=True, slots=True, order=True)
class ShapeProblem:
    """One variant that cannot be. `key` is a path in the service, as in ``variants[h100].tp``."""

    service: str
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.service}: {self.key}: {self.text}"


class CatalogueProblems(ValueError):
    """Variants that no hardware can run, or that the catalogue does not know: `problems` as text, `details` by key."""

    def __init__(self, details: tuple[ShapeProblem, ...]) -> None:
        self.details = details
        self.problems: tuple[str, ...] = tuple(str(detail) for detail in details)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class _Place:
    """A variant with everything the catalogue says of it."""

    variant: Variant
    card: ModelCard
    instance: InstanceType
    gpu: Gpu
    measured: Measurement | None

    @property
    def weight_bytes(self) -> float:
        """Weights held by one node of the replica."""
        return self.card.weight_bytes(self.variant.precision) / self.variant.nodes_per_replica

    @property
    def free_bytes(self) -> float:
        """Memory for KV on one node's GPUs of the replica; negative when the weights do not fit."""
        per_gpu = USABLE_MEMORY_FRACTION * self.gpu.memory_bytes - ENGINE_MEMORY_BYTES
        return per_gpu * self.variant.tp - self.weight_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes a token takes of `free_bytes`: ranks share KV heads but never split one, nodes share layers."""
        copies = self.variant.tp / min(self.variant.tp, self.card.kv_heads or 1)
        return self.card.kv_bytes_per_token * copies / self.variant.nodes_per_replica

    @property
    def missing_bytes(self) -> float:
        """Memory that one node's GPUs lack for the weights and the least KV; negative when they have it."""
        return MIN_CONTEXT_TOKENS * self.kv_bytes_per_token - self.free_bytes

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV one replica holds."""
        if self.measured is not None and self.measured.kv_capacity_tokens is not None:
            return self.measured.kv_capacity_tokens
        return max(0, int(self.free_bytes / self.kv_bytes_per_token))


def shapes(policy: PolicySet, catalogue: Catalogue) -> tuple[Shape, ...]:
    """One Shape for every variant of every service, most important service first. Raises CatalogueProblems with all."""
    found: list[Shape] = []
    problems: list[ShapeProblem] = []
    for key, _, service in policy.services():
        for variant in service.variants:
            wrong = [ShapeProblem(key, where, text) for where, text in _unknown(service, variant, catalogue)]
            if not wrong:
                place = _place(service.model, variant, catalogue)
                wrong = [ShapeProblem(key, where, text) for where, text in _unfit(place)]
                found.append(_shape(key, service.model, place, catalogue))
            problems += wrong
    if problems:
        raise CatalogueProblems(tuple(sorted(set(problems))))
    return tuple(found)


def one_shape(model: str, variant: Variant, catalogue: Catalogue, service: str = "") -> Shape | tuple[str, float]:
    """The shape of a variant whose model and type are known; or (why it cannot run, bytes of memory it lacks)."""
    place = _place(model, variant, catalogue)
    wrong = next((text for _, text in _unfit(place)), None)
    return _shape(service, model, place, catalogue) if wrong is None else (wrong, max(0.0, place.missing_bytes))


def gpu_timing(
    model: str, gpu: str, tp: int, precision: Precision, nodes: int, catalogue: Catalogue
) -> tuple[Timing, str, bool]:
    """(constants, source, measured) of a model on `tp` GPUs of each of `nodes` machines of any size.

    Raises KeyError for a model or GPU that the catalogue does not have. KV capacity is 0 where the weights do not fit.
    """
    instance = next(entry for entry in catalogue.instance_types.values() if entry.gpu == gpu)
    variant = Variant(id="any", instance_type="any", tp=tp, precision=precision, nodes_per_replica=nodes)
    measured = catalogue.measurement(model, gpu, tp, precision)
    place = _Place(variant, catalogue.models[model], instance, catalogue.gpus[gpu], measured)
    return _timing(place, catalogue), _source(place, catalogue), measured is not None


def _place(model: str, variant: Variant, catalogue: Catalogue) -> _Place:
    instance = catalogue.instance_types[variant.instance_type]
    measured = catalogue.measurement(model, instance.gpu, variant.tp, variant.precision)
    return _Place(variant, catalogue.models[model], instance, catalogue.gpus[instance.gpu], measured)


def _unknown(service: Service, variant: Variant, catalogue: Catalogue) -> Iterator[tuple[str, str]]:
    remedy = "correct it, or add it to the catalogue/ folder beside the policies"
    if service.model not in catalogue.models:
        near = suggestion(service.model, catalogue.models)
        yield "model", f"{service.model} is not in the catalogue; {near if near.startswith('did') else remedy}"
    if variant.instance_type not in catalogue.instance_types:
        near = suggestion(variant.instance_type, catalogue.instance_types)
        text = f"{variant.instance_type} is not in the catalogue; {near if near.startswith('did') else remedy}"
        yield f"variants[{variant.id}].instance_type", text


def _unfit(place: _Place) -> Iterator[tuple[str, str]]:
    """Why this variant cannot run, with figures."""
    variant, card, gpus = place.variant, place.card, place.instance.gpus
    key = f"variants[{variant.id}].tp"
    if variant.tp > gpus:
        count = f"{gpus} GPU{'s' * (gpus > 1)}"
        yield key, f"is {variant.tp}, but {variant.instance_type} has {count}; lower it, or take a larger type"
        return
    if card.heads % variant.tp:
        yield key, f"is {variant.tp}, which does not divide the model's {card.heads} attention heads; choose another"
        return
    if place.kv_capacity_tokens < MIN_CONTEXT_TOKENS:
        short_gb = place.missing_bytes / 1e9
        need = (
            f"{place.weight_bytes / 1e9:.1f} GB of {variant.precision} weights with {MIN_CONTEXT_TOKENS} tokens of KV"
        )
        have = f"{variant.tp} GPU{'s' * (variant.tp > 1)} of {variant.instance_type}"
        yield key, f"{need} exceed {have} by {short_gb:.1f} GB; raise tp, lower the precision, or take larger GPUs"


def _shape(service: str, model: str, place: _Place, catalogue: Catalogue) -> Shape:
    return Shape(
        service=service,
        variant=place.variant.id,
        instance_type=place.variant.instance_type,
        gpus=place.variant.tp,
        nodes=place.variant.nodes_per_replica,
        timing=_timing(place, catalogue),
        load_prior_s=_load_s(place, catalogue),
        boot_prior_s=place.instance.boot_s,
        source=_source(place, catalogue),
        model=model,
        uncertainty=_uncertainty(place, catalogue),
        weights_s=_weights_s(place, catalogue),
    )


def _source(place: _Place, catalogue: Catalogue) -> str:
    share = f"+-{_uncertainty(place, catalogue):.0%}"
    if place.measured is None:
        return f"roofline estimate, not measured, {share}"
    return f"{', '.join(place.measured.source)}, {share}"


def _uncertainty(place: _Place, catalogue: Catalogue) -> float:
    return (catalogue.roofline if place.measured is None else place.measured).uncertainty


def _load_s(place: _Place, catalogue: Catalogue) -> float:
    """Seconds from process start to ready: the weights of one node from storage, then the engine's own start."""
    if place.measured is not None and place.measured.load_s is not None:
        return place.measured.load_s
    start = catalogue.start
    init_s = start.engine_init_s + start.engine_init_s_per_layer * place.card.layers
    return _weights_s(place, catalogue) + init_s


def _weights_s(place: _Place, catalogue: Catalogue) -> float:
    """Seconds that the weights of one node take from network storage; 0 where the whole load was measured."""
    if place.measured is not None and place.measured.load_s is not None:
        return 0.0
    return place.weight_bytes / catalogue.start.weights_bytes_per_s


def _timing(place: _Place, catalogue: Catalogue) -> Timing:
    measured, card, kv_tokens = place.measured, place.card, place.kv_capacity_tokens
    constants = _roofline(place, catalogue) if measured is None else measured
    context = measured.max_model_len if measured is not None else None
    return Timing(
        a_s=constants.a_s,
        b_s_per_seq=constants.b_s_per_seq,
        c_s_per_ktoken=constants.c_s_per_ktoken,
        prefill_tps=constants.prefill_tps,
        prefill_fixed_s=constants.prefill_fixed_s,
        moe_w_s=constants.moe_w_s,
        moe_active_fraction=card.experts_per_token / card.experts,
        max_num_seqs=(measured.max_num_seqs if measured is not None else None) or MAX_NUM_SEQS,
        kv_capacity_tokens=kv_tokens,
        max_model_len=context
        or min(card.max_position, kv_tokens),  # vLLM does not start when one full context does not fit
    )


def sync_share(model: str, variant: Variant, step_s: float, catalogue: Catalogue) -> float:
    """The share of a decode step of `step_s` that a variant's GPUs spend exchanging, by the roofline's estimate."""
    return min(1.0, _exchange_s(catalogue.models[model], variant.tp, catalogue.roofline) / step_s)


def _exchange_s(card: ModelCard, ranks: int, roof: Roofline) -> float:
    """Seconds a step that GPUs take to exchange: all-reduces between ranks, tokens between experts."""
    moe = card.experts > 1
    return card.layers * (roof.tp_step_s_per_layer * (ranks > 1) + roof.moe_step_s_per_layer_and_rank * ranks * moe)


def _roofline(place: _Place, catalogue: Catalogue) -> Timing:
    """The estimate: active weights and KV at a fraction of the bandwidth, prefill at a fraction of the tensor rate.

    Nodes of a replica hold a part of the layers each, and a token passes all of them one after another: reading the
    weights takes as long as on one node. But each node works on its own part of the batch meanwhile, so what grows with
    the batch, and prefills, is divided by all of them.
    """
    roof, card, tp = catalogue.roofline, place.card, place.variant.tp
    ranks = tp * place.variant.nodes_per_replica
    bandwidth = place.gpu.bandwidth_gb_per_s * 1e9
    stage = tp * bandwidth * roof.decode_bandwidth_fraction
    weights = card.weight_bytes(place.variant.precision)
    active = weights * card.active_params_b / card.params_b
    moe = card.experts > 1
    fraction = roof.moe_prefill_tensor_fraction if moe else roof.prefill_tensor_fraction
    if place.variant.precision == "fp8" and place.gpu.fp8 and not moe:  # the other fraction was seen in FP8
        fraction *= roof.fp8_prefill_gain
    token_s = 2.0 * card.active_params_b * 1e9 / (ranks * place.gpu.bf16_tflops * 1e12 * fraction)
    return Timing(
        a_s=active / stage + _exchange_s(card, tp, roof),
        b_s_per_seq=token_s / 4.0,  # a decode step's arithmetic mostly hides behind its reads
        c_s_per_ktoken=1000.0 * card.kv_bytes_per_token / (ranks * bandwidth * roof.kv_bandwidth_fraction),
        prefill_tps=1.0 / token_s,
        moe_w_s=(weights - active) / stage,
    )
