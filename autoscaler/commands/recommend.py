"""`qm recommend`: which engine shapes would serve a model's traffic within its limits, ranked, with a block to paste.

May not size anything itself (`autoscaler.sizing`), nor hold the screen's or the page's form (`recommend_view`).
Docs: docs/performance.md.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from autoscaler.catalogue import Catalogue, load_catalogue
from autoscaler.catalogue.model import Precision
from autoscaler.commands.outcome import OK, BadInput, check_apart, check_file, check_json, write_file, write_json
from autoscaler.commands.recommend_view import MeasuredLevel, RecommendReport, page, print_report, report_of
from autoscaler.core.capacity import BURSTS, Mix
from autoscaler.sizing.candidates import TP, Candidate, Rejected, candidates, published
from autoscaler.sizing.fit import prior_law
from autoscaler.sizing.rank import ranked
from autoscaler.sizing.wanted import Recorded, Wanted, input_spread, recorded
from policies.model import Goal, Slo
from policies.problems import suggestion
from serve_apps.timing import Timing

GOALS = get_args(Goal)
MARKETS = ("on_demand", "spot", "block")
MOST_RPS = 1e6
MOST_CV = 20.0
FRACTION = 0.99  # of requests inside the limits, unless said otherwise


@dataclass(frozen=True, kw_only=True)
class Given:
    """The command's options as typed; None where one was not."""

    model: str | None
    goal: str | None
    rps: float | None
    input_tokens: float | None
    output_tokens: float | None
    input_p99: float | None
    prefix_share: float
    arrival_cv: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    fraction: float | None
    instance_types: str | None
    precisions: str | None
    tp: int | None
    region: str
    market: str
    max_usd_per_h: float | None
    measure: str | None
    served_model: str | None
    allow_remote: bool
    from_journal: Path | None
    service: str | None
    policies: Path | None
    top: int
    html: Path | None
    json_file: str | None


def recommend_command(given: Given) -> int:
    """Runs `qm recommend`; returns the exit code. Raises BadInput or Problems for anything that cannot be used."""
    check_json(given.json_file)
    check_apart((), {"--json": given.json_file, "--html": given.html})
    if given.html is not None:
        check_file("--html", given.html)
    catalogue = load_catalogue(given.policies)
    wanted = _wanted(given, catalogue)
    said: tuple[MeasuredLevel, ...] = ()
    if given.measure is not None:
        wanted, said = _measured(given, wanted, catalogue)
    started = time.perf_counter()
    found = list(candidates(wanted, catalogue))
    rows = ranked(_feasible(found, wanted, catalogue), wanted)
    report = report_of(rows, len(found), wanted, catalogue, said, wall_s=time.perf_counter() - started)
    _write(given, report)
    return OK


def _write(given: Given, report: RecommendReport) -> None:
    if given.html is not None:
        write_file("--html", given.html, page(report))
    if given.json_file is not None:
        write_json(given.json_file, report.model_dump_json(indent=2).encode())
    if given.json_file != "-":
        print_report(report, given.top)


# ---- the question ---------------------------------------------------------------------------------------------------
def _wanted(given: Given, catalogue: Catalogue) -> Wanted:
    """The options as one question. Raises BadInput with everything that is wrong with them."""
    seen = _from_journal(given)
    slo = seen.service.slo if seen is not None else Slo(fraction=FRACTION)
    model = given.model or (seen.service.model if seen is not None else "")
    goal = given.goal or (seen.service.goal if seen is not None else "")
    rps = _or(given.rps, seen.rps if seen is not None else None)
    input_tokens = _or(given.input_tokens, seen.input_tokens if seen is not None else None)
    output_tokens = _or(given.output_tokens, seen.output_tokens if seen is not None else None)
    problems = [*_names(given, model, goal, catalogue), *_numbers(given, rps, input_tokens, output_tokens)]
    if problems or rps is None or input_tokens is None or output_tokens is None:
        raise BadInput(*problems)
    cv, p99 = input_spread(input_tokens, given.input_p99)
    wanted = Wanted(
        model=model,
        goal=next(known for known in GOALS if known == goal),
        rps=rps,
        mix=Mix(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            input_cv=cv,
            arrival_cv=_or(given.arrival_cv, seen.arrival_cv if seen is not None else None) or 1.0,
        ),
        input_p99=p99,
        prefix_share=given.prefix_share,
        slo=_slo(given, slo),
        region=given.region,
        market=given.market,
        max_usd_per_h=given.max_usd_per_h if given.max_usd_per_h is not None else math.inf,
        types=_types(given.instance_types, catalogue),
        precisions=_precisions(given.precisions or ("bf16" if given.measure is not None else None)),
        tp=given.tp,
    )
    if wanted.context_p99 > catalogue.models[model].max_position:
        raise BadInput(_too_long(given, wanted, catalogue.models[model].max_position))
    return wanted


def _too_long(given: Given, wanted: Wanted, longest: int) -> str:
    said = f"--input-p99 {wanted.input_p99:,.0f}: with"
    if given.input_p99 is None:
        said = (
            f"--input-tokens {wanted.mix.input_tokens:,.0f}: one prompt in a hundred then has "
            f"{wanted.input_p99:,.0f} (unless --input-p99 says otherwise), which with"
        )
    return (
        f"{said} {wanted.mix.output_tokens:,.0f} output tokens exceeds {wanted.model}'s context of {longest:,} "
        f"tokens by {wanted.context_p99 - longest:,.0f}; shorten prompts, or take a model with a longer context"
    )


def _or(typed: float | None, seen: float | None) -> float | None:
    return typed if typed is not None else seen


def _from_journal(given: Given) -> Recorded | None:
    if given.from_journal is None:
        return None
    from autoscaler.adapters.journal import read_all

    found = recorded(read_all(given.from_journal), given.service)
    if isinstance(found, str):
        raise BadInput(f"--from-journal {given.from_journal}: {found}")
    return found


def _slo(given: Given, below: Slo) -> Slo:
    """The limits as typed over the policy's."""
    typed = {"ttft_s": given.ttft_s, "tpot_s": given.tpot_s, "e2e_s": given.e2e_s, "fraction": given.fraction}
    return below.model_copy(update={name: value for name, value in typed.items() if value is not None})


def _names(given: Given, model: str, goal: str, catalogue: Catalogue) -> Iterable[str]:
    if not model:
        yield "--model: is missing; name a model of the catalogue"
    elif model not in catalogue.models:
        near = suggestion(model, catalogue.models)
        yield f"--model {model}: is not in the catalogue; {near}, or add it to the catalogue/ folder of --policies"
    if goal not in GOALS:
        yield f"--goal {goal}: is none; choose one of {', '.join(GOALS)}"
    if given.market not in MARKETS:
        yield f"--market {given.market}: is none with a price; choose one of {', '.join(MARKETS)}"
    regions = sorted({price.region for price in catalogue.prices})
    if given.region not in regions:
        yield f"--region {given.region}: has no prices in the catalogue; {suggestion(given.region, regions)}"
    if given.service is not None and given.from_journal is None:
        yield "--service: is of a journal; give --from-journal too, or leave it out"
    if given.allow_remote and given.measure is None:
        yield "--allow-remote: is of --measure; give it too, or leave it out"


def _numbers(given: Given, rps: float | None, input_tokens: float | None, output_tokens: float | None) -> Iterable[str]:
    hint = "zero traffic needs no replica (min_replicas or scale_to_zero in the policy); "
    if rps is None:
        yield "--rps: is missing; give a number above 0, or --from-journal"
    elif not 0.0 < rps <= MOST_RPS:
        yield f"--rps {rps:g}: {hint if rps == 0.0 else ''}give a number above 0 and up to {MOST_RPS:,.0f}"
    for option, tokens in (("--input-tokens", input_tokens), ("--output-tokens", output_tokens)):
        if tokens is None:
            yield f"{option}: is missing; give a number from 1, or --from-journal"
        elif not 1.0 <= tokens < math.inf:
            yield f"{option} {tokens:g}: give a finite number, 1 or more"
    limits = (
        ("--ttft-s", given.ttft_s),
        ("--tpot-s", given.tpot_s),
        ("--e2e-s", given.e2e_s),
        ("--max-usd-per-h", given.max_usd_per_h),
    )
    for option, value in limits:
        if value is not None and not 0.0 < value < math.inf:
            yield f"{option} {value:g}: give a finite number above 0"
    if given.fraction is not None and not 0.0 < given.fraction < 1.0:
        yield f"--fraction {given.fraction:g}: give a fraction between 0 and 1, as .99"
    if not 0.0 <= given.prefix_share < 1.0:
        yield f"--prefix-share {given.prefix_share:g}: give the shared part of prompts, from 0 to below 1"
    if given.arrival_cv is not None and not 1.0 <= given.arrival_cv <= MOST_CV:
        yield f"--arrival-cv {given.arrival_cv:g}: give the gaps' variation, from 1 (Poisson) to {MOST_CV:g}"
    if given.input_p99 is not None and not (input_tokens or 0.0) <= given.input_p99 < math.inf:
        yield f"--input-p99 {given.input_p99:g}: is below the mean of the prompts; give the 99th percentile"
    if given.tp is not None and given.tp not in TP:
        yield f"--tp {given.tp}: is none; choose one of {', '.join(map(str, TP))}"
    if given.top < 1:
        yield f"--top {given.top}: give at least 1"


def _types(text: str | None, catalogue: Catalogue) -> tuple[str, ...]:
    """The instance types that a list of types, families and GPUs means; all by default."""
    if text is None:
        return tuple(catalogue.instance_types)
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = {name: (name, entry.family, entry.gpu) for name, entry in catalogue.instance_types.items()}
    everything = sorted({word for words in known.values() for word in words})
    unknown = [word for word in words if word not in everything]
    if unknown or not words:
        word = unknown[0] if unknown else text
        families = sorted({entry.family for entry in catalogue.instance_types.values()} | set(catalogue.gpus))
        near = suggestion(word, everything)
        hint = near if near.startswith("did") else f"known families and GPUs: {', '.join(families)}"
        raise BadInput(f"--instance-types {word}: is no instance type, family or GPU of the catalogue; {hint}")
    return tuple(name for name, also in known.items() if set(also) & set(words))


def _precisions(text: str | None) -> tuple[Precision, ...]:
    known = get_args(Precision)
    words = [] if text is None else [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise BadInput(f"--precisions {word}: is none; {suggestion(word, known)}")
    return tuple(kind for kind in known if kind in words)


# ---- the answer -----------------------------------------------------------------------------------------------------
def _feasible(found: Sequence[Candidate | Rejected], wanted: Wanted, catalogue: Catalogue) -> list[Candidate]:
    """The candidates that serve it at the price. Raises BadInput with the nearest thing to an answer when none does."""
    fit = [row for row in found if isinstance(row, Candidate)]
    if not fit:
        raise BadInput(_fits_nowhere([row for row in found if isinstance(row, Rejected)], wanted, catalogue))
    able = [row for row in fit if row.floor is None]
    if not able:
        raise BadInput(_unreachable(fit, wanted))
    paid = [row for row in able if row.usd_per_h <= wanted.max_usd_per_h]
    if not paid:
        cheapest = min(able, key=lambda row: (row.usd_per_h, row.variant.id))
        raise BadInput(
            f"--max-usd-per-h {wanted.max_usd_per_h:g}: the cheapest that serves it is {cheapest.replicas} × "
            f"{cheapest.variant.id} at {cheapest.usd_per_h:.2f} $/h; raise the limit, or lower the rate"
        )
    return paid


def _fits_nowhere(rejected: Sequence[Rejected], wanted: Wanted, catalogue: Catalogue) -> str:
    """By how much the model is too big for the nearest shape, and the smallest that would hold it."""
    short = [row for row in rejected if row.missing_bytes > 0.0]
    if not short:
        first = rejected[0] if rejected else None
        why = f"{first.variant.id}: {first.why}" if first is not None else "no TP divides its attention heads there"
        return f"--instance-types: none can serve {wanted.model}; {why}"
    near = min(short, key=lambda row: (_unpublished(row, wanted, catalogue), row.missing_bytes, row.variant.id))
    gb = near.missing_bytes / 1e9
    said = f"--model {wanted.model}: fits on none of these shapes; {near.variant.id} lacks {gb:.1f} GB a node"
    everywhere = replace(wanted, types=tuple(catalogue.instance_types), law=None)
    holders = [row for row in candidates(everywhere, catalogue) if isinstance(row, Candidate)]
    if not holders:
        return f"{said}, and no shape of the catalogue is larger; take a smaller model or more nodes"
    small = min(
        holders,
        key=lambda row: (not row.published_weights, _memory(row, catalogue), row.price_usd_per_h, row.variant.id),
    )
    return f"{said}; the smallest shape that holds it is {small.variant.id}"


def _unpublished(row: Rejected, wanted: Wanted, catalogue: Catalogue) -> bool:
    return not published(wanted.model, row.variant.precision, catalogue)


def _memory(row: Candidate, catalogue: Catalogue) -> float:
    variant = row.variant
    gpu = catalogue.gpus[catalogue.instance_types[variant.instance_type].gpu]
    return gpu.memory_bytes * variant.tp * variant.nodes_per_replica


def _unreachable(fit: Sequence[Candidate], wanted: Wanted) -> str:
    """Which limit no hardware meets: with the floor of one request alone, or what part of requests meets all limits."""
    output = wanted.mix.output_tokens
    whole = {row.variant.id: row.alone[0] + (output - 1.0) * row.alone[1] for row in fit}
    limits = (
        ("--ttft-s", wanted.slo.ttft_s, {row.variant.id: row.alone[0] for row in fit}),
        ("--tpot-s", wanted.slo.tpot_s, {row.variant.id: row.alone[1] for row in fit}),
        ("--e2e-s", wanted.slo.e2e_s, whole),
        ("deadline_s of the policy", wanted.slo.deadline_s, whole),
    )
    for option, limit, floors in limits:
        floor, name = min((floor, name) for name, floor in floors.items())
        if limit is not None and floor > limit:
            return (
                f"{option} {limit:g}: is unreachable; the physical floor is {floor:.4g} s, on {name} with one "
                f"request alone; raise the limit above it"
            )
    rows = [(row.floor[1], row.floor[0], row.variant.id) for row in fit if row.floor is not None]
    met, what, name = max(rows, key=lambda row: (row[0] * (row[1] in ("fraction", BURSTS)), row[2]))
    why = "they come in bursts" if what == BURSTS else "their lengths spread"
    return (
        f"--fraction {wanted.slo.fraction:g}: is unreachable; at best {met:.3f} of requests meet the limits ({name}), "
        f"because {why}; lower it, or loosen the limits"
    )


# ---- measuring ------------------------------------------------------------------------------------------------------
def _measured(given: Given, wanted: Wanted, catalogue: Catalogue) -> tuple[Wanted, tuple[MeasuredLevel, ...]]:
    """The question with the law that the endpoint shows, and the measurement."""
    from autoscaler.commands.measure import check_url, measure, served_model

    assert given.measure is not None
    check_url(given.measure, allow_remote=given.allow_remote)
    prior = _prior(wanted, catalogue)
    name = given.served_model or served_model(given.measure, wanted.model)
    sys.stderr.write(
        f"measuring {name} at {given.measure}: up to 8 requests at a time, four minutes at most; "
        "nobody may add a replica meanwhile\n"
    )
    found = measure(given.measure, name, wanted.mix.input_tokens, wanted.mix.output_tokens, prior_law(prior))
    slots = found.law.timing.max_num_seqs
    if slots < prior.max_num_seqs:
        sys.stderr.write(f"it runs {slots} requests at a time, and more wait (--max-num-seqs of vLLM); so sized\n")
    levels = tuple(
        MeasuredLevel(
            **asdict(level), predicted_ttft_s=said[0], predicted_tpot_s=said[1], predicted_unseen_tpot_s=unseen[1]
        )
        for level, said, unseen in zip(found.levels, found.said, found.unseen, strict=True)
    )
    timing = found.law.timing
    # The capacity model knows no way to the engine: counted to the prefill it errs on the safe side.
    timing = replace(timing, prefill_fixed_s=timing.prefill_fixed_s + found.law.way_s)
    return replace(wanted, law=timing), levels


def _prior(wanted: Wanted, catalogue: Catalogue) -> Timing:
    """The law to begin with. Raises BadInput unless every shape considered is the engine that is measured."""
    found = [row for row in candidates(wanted, catalogue) if isinstance(row, Candidate)]
    engines = {row.shape.timing for row in found}
    if not found:
        return Timing(a_s=0.02, b_s_per_seq=0.0001, c_s_per_ktoken=0.0001, prefill_tps=5000.0)
    if len(engines) > 1:
        raise BadInput(
            f"--measure: measures one engine, but {len(engines)} different ones are considered; name the type it is "
            f"on with --instance-types, its --tp and its --precisions (bf16 by default)"
        )
    return found[0].shape.timing
