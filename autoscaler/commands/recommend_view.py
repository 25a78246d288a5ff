"""What `qm recommend` says: its JSON, its table, its page, and the block to paste. May not size or rank anything."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from autoscaler.catalogue import Catalogue
from autoscaler.sizing.candidates import Candidate
from autoscaler.sizing.rank import block, front, scarcity
from autoscaler.sizing.wanted import Wanted

COLUMNS = (
    *("", "shape", "replicas", "$/h", "$/1M tokens", "used", "binds", "KV left", "cold start", "TTFT ms", "TPOT ms"),
    *("scarce", "constants"),
)
WIDTH = 170


class Ranked(BaseModel):
    """One shape. Prices of whole instances; tokens are input and output together; times are means at the planned load.

    `utilisation` is load over planned capacity, `kv_headroom` what is left of the KV cache when one request at the
    99th percentile of contexts joins the mean batch, `scarce` from 0 to 1, null where nothing was published.
    """

    variant: str
    instance_type: str
    gpu: str
    tp: int
    precision: str
    nodes_per_replica: int
    market: str
    replicas: int
    instances: int
    usd_per_h: float
    usd_per_1m_tokens: float
    capacity_rps: float
    utilisation: float
    binds: str
    kv_headroom: float
    cold_start_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    scarcity: str
    scarce: float | None
    pareto: bool
    published_weights: bool
    source: str


class MeasuredLevel(BaseModel):
    """What clients saw at one concurrency, what the fitted law says of it, and what one fitted without it says."""

    concurrency: int
    requests: int
    failed: int
    input_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float
    predicted_ttft_s: float
    predicted_tpot_s: float
    predicted_unseen_tpot_s: float


class RecommendReport(BaseModel):
    """What `qm recommend --json` writes. `ranked` is best first for the goal; `variants` is the block to paste."""

    model: str
    goal: str
    rps: float
    arrival_cv: float
    region: str
    shapes_considered: int
    feasible: int
    wall_s: float
    measured: tuple[MeasuredLevel, ...]
    ranked: tuple[Ranked, ...]
    variants: str


def report_of(
    rows: Sequence[Candidate],
    considered: int,
    wanted: Wanted,
    catalogue: Catalogue,
    measured: tuple[MeasuredLevel, ...],
    *,
    wall_s: float,
) -> RecommendReport:
    """The rows, best first, as they are shown."""
    best = front(rows, wanted)
    return RecommendReport(
        model=wanted.model,
        goal=wanted.goal,
        rps=wanted.rps,
        arrival_cv=wanted.mix.arrival_cv,
        region=wanted.region,
        shapes_considered=considered,
        feasible=len(rows),
        wall_s=wall_s,
        measured=measured,
        ranked=tuple(_ranked(row, row.variant.id in best, wanted, catalogue) for row in rows),
        variants=block(rows),
    )


def _ranked(row: Candidate, pareto: bool, wanted: Wanted, catalogue: Catalogue) -> Ranked:
    variant = row.variant
    words, scarce = scarcity(variant.instance_type, wanted.region, catalogue)
    return Ranked(
        variant=variant.id,
        instance_type=variant.instance_type,
        gpu=catalogue.instance_types[variant.instance_type].gpu,
        tp=variant.tp,
        precision=variant.precision,
        nodes_per_replica=variant.nodes_per_replica,
        market=row.market,
        replicas=row.replicas,
        instances=row.instances,
        usd_per_h=row.usd_per_h,
        usd_per_1m_tokens=row.usd_per_1m_tokens,
        capacity_rps=row.capacity_rps,
        utilisation=row.utilisation,
        binds=row.binds,
        kv_headroom=row.kv_headroom,
        cold_start_s=row.cold_start_s,
        ttft_s=row.ttft_s,
        tpot_s=row.tpot_s,
        e2e_s=row.e2e_s,
        scarcity=words,
        scarce=scarce,
        pareto=pareto,
        published_weights=row.published_weights,
        source=row.shape.source,
    )


def print_report(report: RecommendReport, top: int) -> None:
    """The best `top` rows and the front of cost against latency, then the block to paste, last."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)  # a row that is cut says nothing
    for level in report.measured:
        console.print(_level_words(level), markup=False)
    console.print(
        f"{report.shapes_considered} shapes considered, {report.feasible} serve {report.rps:g} requests/s of "
        f"{report.model} within the limits; best first for {report.goal}, * on the front of cost against latency",
        markup=False,
    )
    table = Table(*COLUMNS, box=None, padding=(0, 1))
    for column in table.columns:
        column.no_wrap = True
    shown = [*report.ranked[:top], *(row for row in report.ranked[top:] if row.pareto)]
    for row in shown:
        table.add_row(*_cells(row))
    console.print(table)
    if any(row.source.startswith("roofline") for row in shown):
        console.print("roofline: estimated from the GPU's data sheet, never measured; see qm recommend --measure")
    console.print(report.variants, markup=False)


def _level_words(level: MeasuredLevel) -> str:
    failed = f", {level.failed} failed" if level.failed else ""
    seen = f"{level.input_tokens:.0f} + {level.output_tokens:.0f} tokens, TTFT {level.ttft_s * 1e3:.1f} ms"
    errors = (said / level.tpot_s - 1.0 for said in (level.predicted_tpot_s, level.predicted_unseen_tpot_s))
    law, unseen = (f"{error:+.1%}" for error in errors)
    return (
        f"{level.concurrency} at a time: {level.requests} requests{failed}, {seen}, TPOT {level.tpot_s * 1e3:.2f} ms; "
        f"the law says {law}, without this level {unseen}"
    )


def _cells(row: Ranked) -> tuple[str, ...]:
    return (
        "*" if row.pareto else "",
        row.variant + ("" if row.published_weights else " (quantise yourself)"),
        f"{row.replicas} on {row.instances}",
        f"{row.usd_per_h:.2f}" + ("" if row.market == "on_demand" else f" {row.market}"),
        f"{row.usd_per_1m_tokens:.3g}",
        f"{row.utilisation:.0%}",
        row.binds,
        f"{row.kv_headroom:.0%}",
        f"{row.cold_start_s:.0f} s",
        f"{row.ttft_s * 1e3:.0f}",
        f"{row.tpot_s * 1e3:.1f}",
        "?" if row.scarce is None else f"{row.scarce:.2g}",
        "roofline" if row.source.startswith("roofline") else row.source,
    )


def page(report: RecommendReport) -> str:
    """Cost against the time of a request, one dot a shape, the front as a line; a whole HTML page."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for gpu in sorted({row.gpu for row in report.ranked}):
        rows = [row for row in report.ranked if row.gpu == gpu]
        figure.add_scatter(
            x=[row.usd_per_h for row in rows],
            y=[row.e2e_s for row in rows],
            text=[f"{row.variant}, {row.replicas} replicas, binds: {row.binds}, {row.source}" for row in rows],
            mode="markers",
            name=gpu,
        )
    best = sorted((row for row in report.ranked if row.pareto), key=lambda row: row.usd_per_h)
    figure.add_scatter(
        x=[row.usd_per_h for row in best],
        y=[row.e2e_s for row in best],
        text=[row.variant for row in best],
        mode="lines",
        name="front",
        line={"color": "black", "dash": "dot"},
    )
    figure.update_layout(
        title=f"{report.model}, {report.rps:g} requests/s: price against the mean time of a request",
        xaxis={"title": "$/h", "type": "log"},
        yaxis={"title": "seconds from request to last token", "type": "log"},
        template="plotly_white",
    )
    whole: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return whole
