"""Every engine shape that could serve a question, with what it carries and costs. Pure; may not do I/O or read a clock.

A candidate is (instance type, TP, precision, nodes): TP in powers of two within an instance, several nodes only where
whole instances with EFA form a replica. What it carries is `core.capacity`'s answer, with the same margin for uncertain
constants that the controller plans with. A shared prefix is prefilled once and takes its KV like any other context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoscaler.catalogue import Catalogue, one_shape, sync_share
from autoscaler.catalogue.model import WEIGHT_BYTES, Precision
from autoscaler.core.beliefs import EMPTY
from autoscaler.core.calibrate import timing_for
from autoscaler.core.capacity import KV_FILL, Capacity, capacity_at
from autoscaler.core.coldstart import boot_s, load_s
from autoscaler.core.model import Shape
from autoscaler.core.reasons import ReasonCode
from policies.model import Variant
from serve_apps.timing import Timing, decode_step_s, prefill_s

from .wanted import Wanted

TP = (1, 2, 4, 8, 16)
NODES = (2, 4)
NATIVE_FP4 = "gpt-oss"  # models whose published weights are MXFP4
PREFILL_BINDS = 0.5  # of an engine's time in prefills
NETWORK_BINDS = 0.5  # of a step in exchanges between GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One shape, sized. `ttft_s` and `tpot_s` are means at the planned load, `alone` those of one request alone.

    `floor` is (limit, what is met at best, what was asked) where the limits cannot be met.
    """

    variant: Variant
    shape: Shape
    published_weights: bool
    market: str
    price_usd_per_h: float
    capacity_rps: float
    batch: int
    replicas: int
    instances: int
    usd_per_h: float
    usd_per_1m_tokens: float
    utilisation: float
    binds: str
    kv_headroom: float
    cold_start_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    floor: tuple[str, float, float] | None
    alone: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A shape that cannot be, why, and the bytes of memory it lacks (0 where memory is not what is missing)."""

    variant: Variant
    why: str
    missing_bytes: float


def variants(wanted: Wanted, catalogue: Catalogue) -> list[Variant]:
    """Every variant of the wanted types, in the catalogue's order; all precisions and TP degrees unless named."""
    chosen = wanted.precisions or tuple(kind for kind in WEIGHT_BYTES if kind != "fp16")
    heads = catalogue.models[wanted.model].heads
    found = []
    for name in wanted.types:
        instance = catalogue.instance_types[name]
        degrees = [tp for tp in TP if tp <= instance.gpus and heads % tp == 0 and wanted.tp in (None, tp)]
        for tp in degrees:
            nodes = (1, *NODES) if tp == instance.gpus > 1 and instance.efa_interfaces else (1,)
            found += [_variant(name, tp, kind, count) for kind in chosen for count in nodes]
    return found


def _variant(instance_type: str, tp: int, precision: Precision, nodes: int) -> Variant:
    name = f"{instance_type.replace('.', '-')}-tp{tp}-{precision}" + (f"-n{nodes}" if nodes > 1 else "")
    return Variant(id=name, instance_type=instance_type, tp=tp, precision=precision, nodes_per_replica=nodes)


def candidates(wanted: Wanted, catalogue: Catalogue) -> Iterator[Candidate | Rejected]:
    """Every variant, sized or rejected."""
    for variant in variants(wanted, catalogue):
        shape = one_shape(wanted.model, variant, catalogue)
        if not isinstance(shape, Shape):
            yield Rejected(variant, *shape)
            continue
        if wanted.law is not None:
            limits = {"max_num_seqs": wanted.law.max_num_seqs, "kv_capacity_tokens": shape.timing.kv_capacity_tokens}
            shape = replace(
                shape, timing=replace(wanted.law, **limits), uncertainty=0.0, source="measured at the endpoint"
            )
        if wanted.context_p99 > shape.timing.max_model_len:
            short = wanted.context_p99 - shape.timing.max_model_len
            yield Rejected(variant, f"its context ends {short:,.0f} tokens before the longest prompt in a hundred", 0.0)
            continue
        price = price_usd_per_h(variant.instance_type, wanted, catalogue)
        if price is None:
            yield Rejected(variant, f"has no price in {wanted.region}", 0.0)
            continue
        yield _sized(variant, shape, price, wanted, catalogue)


def price_usd_per_h(instance_type: str, wanted: Wanted, catalogue: Catalogue) -> tuple[str, float] | None:
    """(market, price): the wanted market's, else the next that has the type there: on-demand, block, spot."""
    for market in dict.fromkeys((wanted.market, "on_demand", "block", "spot")):
        price = catalogue.price(instance_type, wanted.region, market)
        if price is not None:
            return market, price.usd_per_h
        pools, full = (
            catalogue.spot_pools.get(instance_type),
            catalogue.price(instance_type, wanted.region, "on_demand"),
        )
        pool = pools.regions.get(wanted.region) if pools is not None else None
        if market == "spot" and pool is not None and pool.saving is not None and full is not None:
            return market, full.usd_per_h * (1.0 - pool.saving)
    return None


def _sized(variant: Variant, shape: Shape, price: tuple[str, float], wanted: Wanted, catalogue: Catalogue) -> Candidate:
    timing = timing_for(EMPTY, shape)
    timing = replace(timing, prefill_tps=timing.prefill_tps / (1.0 - wanted.prefix_share))
    found = capacity_at(timing, wanted.mix, wanted.slo, wanted.goal, wanted.rps)
    replicas = max(1, math.ceil(wanted.rps / found.rps))
    gpus = catalogue.instance_types[variant.instance_type].gpus
    on_one = gpus // variant.tp if variant.nodes_per_replica == 1 else 1
    instances = math.ceil(replicas / on_one) * variant.nodes_per_replica
    usd_per_h = instances * price[1]
    each_rps = wanted.rps / replicas
    batch = _mean_batch(timing, wanted, each_rps)
    ttft_s, tpot_s = _means(timing, wanted, each_rps, batch)
    mix = wanted.mix
    sync = sync_share(wanted.model, variant, timing.a_s + timing.b_s_per_seq * batch, catalogue)
    return Candidate(
        variant=variant,
        shape=shape,
        published_weights=published(wanted.model, variant.precision, catalogue),
        market=price[0],
        price_usd_per_h=price[1],
        capacity_rps=found.rps,
        batch=found.batch,
        replicas=replicas,
        instances=instances,
        usd_per_h=usd_per_h,
        usd_per_1m_tokens=usd_per_h / (wanted.rps * (mix.input_tokens + mix.output_tokens) * 3600.0) * 1e6,
        utilisation=wanted.rps / (replicas * found.rps),
        binds=_binds(timing, wanted, found, sync),
        kv_headroom=1.0 - (batch * _resident(wanted) + wanted.context_p99) / timing.kv_capacity_tokens,
        cold_start_s=boot_s(EMPTY, shape) + load_s(EMPTY, shape),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=ttft_s + (mix.output_tokens - 1.0) * tpot_s,
        floor=_floor(found),
        alone=_means(timing, wanted, 0.0, 1.0),
    )


def published(model: str, precision: Precision, catalogue: Catalogue) -> bool:
    """Whether somebody publishes the model's weights in this precision."""
    native = ("fp4",) if NATIVE_FP4 in model else ()
    return precision in (*catalogue.models[model].weights_gb, *native)


def _resident(wanted: Wanted) -> float:
    return wanted.mix.input_tokens + wanted.mix.output_tokens * (1.0 + wanted.mix.output_cv**2) / 2.0


def _mean_batch(timing: Timing, wanted: Wanted, rps: float) -> float:
    """The batch at which requests leave at the rate they come (bisection; the rate grows with the batch)."""
    low, high, prefill = 0.0, float(timing.max_num_seqs), prefill_s(timing, wanted.mix.input_tokens)
    for _ in range(24):
        middle = (low + high) / 2.0
        step = decode_step_s(timing, middle, middle * _resident(wanted))
        leaves = middle / (wanted.mix.output_tokens * step + middle * prefill)
        low, high = (middle, high) if leaves < rps else (low, middle)
    return high


def _means(timing: Timing, wanted: Wanted, rps: float, batch: float) -> tuple[float, float]:
    """Mean (TTFT, TPOT): prefills take their share of the time, and the first token waits for those before it."""
    prefill = prefill_s(timing, wanted.mix.input_tokens)
    busy = min(0.99, rps * prefill)
    step = decode_step_s(timing, max(1.0, batch), batch * _resident(wanted)) / (1.0 - busy)
    queue = busy * prefill * (1.0 + wanted.mix.input_cv**2) / (2.0 * (1.0 - busy))  # M/G/1, Pollaczek–Khinchine
    return prefill + step + queue, step


def _binds(timing: Timing, wanted: Wanted, found: Capacity, sync: float) -> str:
    """What would have to grow for a replica to carry more."""
    room = KV_FILL * timing.kv_capacity_tokens / _resident(wanted)
    if room < timing.max_num_seqs and found.batch >= int(room):
        return "kv"
    if found.rps * prefill_s(timing, wanted.mix.input_tokens) > PREFILL_BINDS:
        return "prefill"
    return "network" if sync > NETWORK_BINDS else "decode"


def _floor(found: Capacity) -> tuple[str, float, float] | None:
    """(limit, floor, what was asked) of the first limit that one request alone would miss."""
    for reason in found.reasons:
        if reason.code is ReasonCode.UNREACHABLE_SLO:
            numbers = dict(reason.numbers)
            return (
                reason.subject,
                numbers.get("floor_s", numbers.get("floor", 0.0)),
                numbers.get("limit_s", numbers.get("limit", 0.0)),
            )
    return None
