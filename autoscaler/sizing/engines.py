"""The law of every engine in a table: fitted where rows were measured, else from the catalogue, else a roofline.

Pure; may not do I/O or read a clock. Names in tables are matched to the catalogue's without vendor, case, and the words
that name a release ("meta-llama/Llama-3.1-70B" is Meta-Llama-3.1-70B); `h100_sxm` is h100.

A roofline for an engine without any measured row is corrected by what the table measured of its nearest relatives: the
median ratio of fitted to estimated constants over engines of the same model, else over engines of the same kind
(dense, mixture of experts). Its source says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from autoscaler.catalogue import Catalogue, gpu_timing
from autoscaler.catalogue.model import WEIGHT_BYTES, Precision
from policies.problems import suggestion
from serve_apps.timing import Timing

from .closed_loop import Law
from .fit import fit, prior_law, with_constants
from .table import EngineKey, Row, by_engine

CONSTANTS = ("a_s", "b_s_per_seq", "c_s_per_ktoken", "moe_w_s", "prefill_tps")
FP8_SCALES = ("fp8_block", "fp8_static", "fp8_tensor")
NOISE = re.compile(r"meta-|-instruct|-chat|-hf|-v0\.\d|[^a-z0-9.]")
GPU_ENDINGS = re.compile(r"[_-](sxm|pcie|nvl|80gb|141gb)$")
IGNORANCE = 3.0  # times as wide a prior where the catalogue knows neither model nor GPU
MOST_RANKS, MOST_NODES = 64, 16
SMALLEST_KV_TOKENS = 16_384  # of an engine that was measured although its weights do not fit by the catalogue


@dataclass(frozen=True, slots=True)
class Known:
    """An engine's law, where it comes from, and whether that is the roofline."""

    law: Law
    source: str
    roofline: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """A key's model, GPU and precision as the catalogue has them; None for what it does not have."""

    model: str | None
    gpu: str | None
    precision: Precision | None


def names(key: EngineKey, catalogue: Catalogue) -> Names:
    """The catalogue's names for a key's."""
    models = {_bare(name): name for name in reversed(list(catalogue.models))}
    models |= {name: name for name in catalogue.models}
    gpu = GPU_ENDINGS.sub("", key.system.lower())
    gpu = {"a100": "a100-80gb", "rtx6000": "rtx-pro-6000"}.get(gpu, gpu)
    precision = key.precision.lower()
    precision = (
        "fp8"
        if precision in FP8_SCALES
        else {"mxfp4": "fp4", "nvfp4": "fp4", "w4a16_mxfp4": "fp4"}.get(precision, precision)
    )
    return Names(
        models.get(key.model) or models.get(_bare(key.model)),
        gpu if any(entry.gpu == gpu for entry in catalogue.instance_types.values()) else None,
        next((known for known in WEIGHT_BYTES if known == precision), None),
    )


def _bare(model: str) -> str:
    return NOISE.sub("", model.rpartition("/")[2].lower())


def unknown(key: EngineKey, catalogue: Catalogue) -> list[tuple[str, str]]:
    """(column, what is wrong) for each name that the catalogue does not have."""
    found = names(key, catalogue)
    remedy = "measure some rows of it, or add it to the catalogue/ folder beside the policies"
    problems = []
    if found.model is None:
        near = suggestion(key.model, catalogue.models)
        hint = near if near.startswith("did") else remedy
        problems.append(("model", f"{key.model} is not in the catalogue; {hint}"))
    if found.gpu is None:
        near = suggestion(key.system, catalogue.gpus)
        problems.append(("system", f"{key.system} is no GPU of the catalogue; {near}"))
    if found.precision is None:
        problems.append(
            ("precision", f"{key.precision} is none that is known; {suggestion(key.precision, WEIGHT_BYTES)}")
        )
    return problems


def prior(key: EngineKey, catalogue: Catalogue) -> Known | None:
    """What the catalogue says of an engine; None when it lacks its model, GPU or precision."""
    found = names(key, catalogue)
    if found.model is None or found.gpu is None or found.precision is None:
        return None
    ranks, nodes = min(max(key.tp, key.moe_tp * key.moe_ep), MOST_RANKS), min(key.pp, MOST_NODES)
    timing, source, measured = gpu_timing(found.model, found.gpu, ranks, found.precision, nodes, catalogue)
    timing = replace(timing, kv_capacity_tokens=max(timing.kv_capacity_tokens, SMALLEST_KV_TOKENS))
    return Known(prior_law(timing), source if measured else f"roofline: {source}", roofline=not measured)


def laws(keys: Iterable[EngineKey], rows: Sequence[Row], catalogue: Catalogue) -> dict[EngineKey, Known]:
    """The law of every key: fitted to those of `rows` that are its own and measured, else what is known of it.

    A key that is neither measured nor in the catalogue is left out.
    """
    measured = by_engine(row for row in rows if row.measured)
    priors = {key: prior(key, catalogue) for key in sorted({*keys, *measured})}
    fitted = {key: _fitted(own, priors[key]) for key, own in sorted(measured.items())}
    found: dict[EngineKey, Known] = dict(fitted)
    for key in sorted(set(keys) - set(fitted)):
        known = priors[key]
        if known is not None:
            found[key] = _corrected(key, known, fitted, priors) if known.roofline else known
    return found


def _fitted(rows: Sequence[Row], known: Known | None) -> Known:
    points = [row.point for row in rows]
    law = fit(points, known.law) if known is not None else fit(points, _ignorant(rows), doubt=IGNORANCE)
    return Known(law, f"fitted to {len(rows)} measured rows")


def _ignorant(rows: Sequence[Row]) -> Law:
    """A prior for an engine that the catalogue knows nothing of: of the right size by its own fastest row."""
    step = min((row.point.tpot_s for row in rows if row.point.tpot_s is not None), default=0.02)
    speeds = [row.mix[0] / row.point.ttft_s for row in rows if row.point.ttft_s is not None]
    timing = Timing(
        a_s=0.8 * step,
        b_s_per_seq=0.005 * step,
        c_s_per_ktoken=0.003 * step,
        prefill_tps=max(speeds, default=10_000.0),
    )
    return prior_law(timing)


def _corrected(
    key: EngineKey, known: Known, fitted: Mapping[EngineKey, Known], priors: Mapping[EngineKey, Known | None]
) -> Known:
    """The roofline times the median ratio of fitted to estimated constants over the nearest measured engines."""
    moe = known.law.timing.moe_w_s > 0.0
    pairs = [(other, found.law, below.law) for other, found in fitted.items() if (below := priors[other]) is not None]
    kind = [pair for pair in pairs if (pair[2].timing.moe_w_s > 0.0) == moe]
    same = [pair for pair in kind if pair[0].model == key.model]
    near = same or kind
    if not near:
        return known
    ratios = {
        name: median(getattr(law.timing, name) / getattr(below.timing, name) for _, law, below in near)
        for name in CONSTANTS
        if name != "moe_w_s" or moe
    }
    timing = with_constants(known.law.timing, {n: getattr(known.law.timing, n) * ratio for n, ratio in ratios.items()})
    whose = "other engines of the model" if same else "engines of other models"
    return Known(replace(known.law, timing=timing), f"{known.source}, corrected by {len(near)} {whose}", roofline=True)
