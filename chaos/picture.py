"""A run as one self-contained page: demand, forecast, supply, service levels, cost, refusals, plan changes on one axis.

Pure: from samples and a report to HTML text. May not read a file or a clock. Long runs are shown in at most BUCKETS
steps: means of what is measured, sums of what is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from chaos.report import Report

if TYPE_CHECKING:
    from chaos.demand import Floats
    from chaos.scenario import Scenario
    from chaos.world import OfferingSample, Sample, ServiceSample

BUCKETS = 1200
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
PANELS = (
    "Demand and forecast (requests/s)",
    "Replicas",
    "Instances by rung",
    "Requests within every limit (%)",
    "Cost (USD)",
    "Refused launch calls and changes of plan",
)
HEIGHT_PX = 1500


def page(scenario: Scenario, report: Report, samples: Sequence[Sample]) -> str:
    """The page's HTML, with plotly inside: it opens without a network."""
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=len(PANELS), cols=1, shared_xaxes=True, vertical_spacing=0.03, subplot_titles=PANELS,
        specs=[[{"secondary_y": number == 4}] for number in range(len(PANELS))],
    )  # fmt: skip
    if samples:
        _draw(figure, _Run(scenario, samples))
    figure.update_layout(
        height=HEIGHT_PX,
        title_text=escape(_title(report)),
        template="plotly_white",
        hovermode="x unified",
        legend={"groupclick": "togglegroup"},
    )
    figure.update_xaxes(range=[_utc(scenario.start_at_s), _utc(scenario.start_at_s + scenario.duration_s)])
    return str(figure.to_html(include_plotlyjs=True, full_html=True, div_id="run", config={"displaylogo": False}))


def _title(report: Report) -> str:
    top = [service for service in report.services.values() if service.slo_attainment is not None]
    met = ", ".join(f"{100 * service.slo_attainment:.2f} %" for service in top if service.slo_attainment is not None)
    return f"{report.scenario}, {report.controller}, seed {report.seed}: {met} within SLO, {report.cost_usd:,.2f} USD"


def _utc(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


class _Run:
    """The samples as columns, in buckets of equal numbers of ticks."""

    def __init__(self, scenario: Scenario, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.size = -(-len(samples) // BUCKETS)
        self.tick_s = scenario.tick_s
        starts = range(0, len(samples), self.size)
        self.at = [_utc(scenario.start_at_s + samples[index].at_s) for index in starts]
        self.start_at_s = scenario.start_at_s
        self.services = [service.service for service in samples[0].services]
        self.offerings = [offering.offering for offering in samples[0].offerings]

    def mean(self, of: Callable[[Sample], float | None]) -> Floats:
        """Mean over each bucket of what is known, NaN where nothing is."""
        values = self._padded([np.nan if (value := of(sample)) is None else value for sample in self.samples])
        known = ~np.isnan(values)
        counts = known.sum(axis=1)
        sums = np.where(known, values, 0.0).sum(axis=1)
        means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return means

    def total(self, of: Callable[[Sample], float]) -> Floats:
        """Sum over each bucket."""
        totals: Floats = np.nansum(self._padded([of(sample) for sample in self.samples]), axis=1)
        return totals

    def _padded(self, values: Sequence[float]) -> Floats:
        column = np.full(-(-len(values) // self.size) * self.size, np.nan)
        column[: len(values)] = values
        return column.reshape(-1, self.size)

    def service(self, name: str) -> Callable[[Sample], ServiceSample]:
        """How to find one service in a sample."""
        index = self.services.index(name)
        return lambda sample: sample.services[index]

    def offering(self, name: str) -> Callable[[Sample], OfferingSample | None]:
        """How to find one offering in a sample."""
        return lambda sample: next((row for row in sample.offerings if row.offering == name), None)


def _draw(figure: Any, run: _Run) -> None:
    for number, name in enumerate(run.services):
        colour = COLOURS[number % len(COLOURS)]
        _demand(figure, run, name, colour)
        _replicas(figure, run, name, colour)
        _level(figure, run, name, colour)
    for number, name in enumerate(run.offerings):
        _rung(figure, run, name, COLOURS[number % len(COLOURS)])
    _cost(figure, run)
    _events(figure, run)


def _line(run: _Run, values: Floats, name: str, colour: str, **more: Any) -> dict[str, Any]:
    line = {"color": colour, **more.pop("line", {})}
    return {"type": "scatter", "x": run.at, "y": np.round(values, 4).tolist(), "name": name, "line": line,
            "mode": "lines", **more}  # fmt: skip


def _demand(figure: Any, run: _Run, name: str, colour: str) -> None:
    of = run.service(name)
    arrived = run.mean(lambda sample: of(sample).arrived / run.tick_s)
    figure.add_trace(_line(run, arrived, name, colour, legendgroup=name), row=1, col=1)
    levels = sorted({level for sample in run.samples for level, _ in of(sample).forecast})
    if not levels:
        return
    ahead_s = np.nan_to_num(run.mean(lambda sample: of(sample).lead_s if of(sample).forecast else None))
    when = [_utc(at.timestamp() + lead_s) for at, lead_s in zip(run.at, ahead_s, strict=True)]
    for position, level in enumerate(levels):
        values = run.mean(lambda sample, level=level: dict(of(sample).forecast).get(level))  # type: ignore[misc]
        fan = {"fill": "tonexty", "fillcolor": _faint(colour)} if position else {}
        label = f"{name}: forecast {level:g}"
        trace = _line(run, values, label, colour, legendgroup=name, showlegend=False, line={"width": 0.5}, **fan)
        figure.add_trace(trace | {"x": when}, row=1, col=1)


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def _replicas(figure: Any, run: _Run, name: str, colour: str) -> None:
    of = run.service(name)
    rows: tuple[tuple[str, Floats, dict[str, Any]], ...] = (
        ("ready", run.mean(lambda sample: of(sample).ready), {}),
        ("target", run.mean(lambda sample: of(sample).target), {"dash": "dot"}),
        ("coming", run.mean(lambda sample: of(sample).coming), {"dash": "dash", "width": 1}),
    )
    for label, values, style in rows:
        trace = _line(run, values, f"{name}: {label}", colour, legendgroup=name, showlegend=False, line=style)
        figure.add_trace(trace, row=2, col=1)


def _level(figure: Any, run: _Run, name: str, colour: str) -> None:
    of = run.service(name)
    met = run.mean(lambda sample: of(sample).attainment) * 100
    figure.add_trace(_line(run, met, name, colour, legendgroup=name, showlegend=False), row=4, col=1)


def _rung(figure: Any, run: _Run, name: str, colour: str) -> None:
    """Instances of one offering, stacked on the others; what its pool could hold is in the hover text."""
    of = run.offering(name)
    held = run.mean(lambda sample: row.ready + row.starting + row.draining if (row := of(sample)) else 0.0)
    size = run.mean(lambda sample: row.size if (row := of(sample)) else 0.0)
    market = next((row.market for sample in run.samples if (row := of(sample))), "")
    trace = _line(run, held, f"{name} ({market})", colour, stackgroup="rungs", line={"width": 0.5}, legendgroup=name)
    trace |= {"customdata": size.tolist(), "hovertemplate": "%{y:.1f} of %{customdata:.1f}"}
    figure.add_trace(trace, row=3, col=1)


def _cost(figure: Any, run: _Run) -> None:
    spent = run.mean(lambda sample: sample.cost_usd)
    hours = run.size * run.tick_s / 3600.0
    rate = np.diff(spent, prepend=0.0) / hours
    figure.add_trace(_line(run, spent, "cost so far", COLOURS[0], legendgroup="cost"), row=5, col=1)
    trace = _line(run, rate, "USD per hour", COLOURS[4], legendgroup="cost", line={"width": 1})
    figure.add_trace(trace, row=5, col=1, secondary_y=True)


def _events(figure: Any, run: _Run) -> None:
    refused = np.diff([sample.refused for sample in run.samples], prepend=0)
    targets = np.array([[service.target for service in sample.services] for sample in run.samples])
    changed = np.any(np.diff(targets, axis=0, prepend=targets[:1]) != 0, axis=1)
    rows = (("refused", refused, COLOURS[1]), ("plan changes", changed, COLOURS[0]))
    for name, counts, colour in rows:
        by_at = dict(zip((sample.at_s for sample in run.samples), counts.tolist(), strict=True))
        values = run.total(lambda sample, by_at=by_at: float(by_at[sample.at_s]))  # type: ignore[misc]
        bars = {"type": "bar", "x": run.at, "y": values.tolist(), "name": name, "marker": {"color": colour}}
        figure.add_trace(bars, row=6, col=1)
