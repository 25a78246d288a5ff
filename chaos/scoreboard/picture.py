"""Attainment against cost, one panel a scenario: as a small SVG of our own, and as a plotly page.

Pure; may not run anything or read a file. Both axes are logarithmic, so that "half the misses" and "half the cost" are
equally far everywhere. Lower left is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .figures import Point, Row, Scoreboard
from .jobs import OURS, STATIC

LEAST_MISS = 1e-4  # fewer misses than this are drawn there
WIDTH, HEIGHT, ACROSS, MARGIN = 300, 220, 3, 46
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888", "#ee8866", "#44bb99", "#999933")
INK = {OURS: "#000000", STATIC: "#bbbbbb", "oracle-demand": "#555555", "oracle-supply": "#555555"}

Pair = tuple[float, float]  # cost, misses


def svg(board: Scoreboard) -> str:
    """The picture: small dots are knobs of a sweep, large ones rows, ours is black and joined."""
    names = list(dict.fromkeys(row.scenario for row in board.rows))
    colours = _colours(board)
    rows = math.ceil(len(names) / ACROSS)
    height = rows * HEIGHT + 20 * math.ceil(len(colours) / 6) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {ACROSS * WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for index, name in enumerate(names):
        x, y = index % ACROSS * WIDTH, index // ACROSS * HEIGHT
        parts += [f'<g transform="translate({x},{y})">', *_panel(board, name, colours), "</g>"]
    for index, (who, colour) in enumerate(colours.items()):
        x, y = 20 + index % 6 * 145, rows * HEIGHT + 14 + index // 6 * 20
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/><text x="{x + 8}" y="{y + 4}">{escape(who)}</text>'
        )
    return "\n".join((*parts, "</svg>", ""))


def page(board: Scoreboard) -> str:
    """A page with the same panels, to be pointed at; needs no network."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    names = list(dict.fromkeys(row.scenario for row in board.rows))
    figure: Figure = make_subplots(rows=math.ceil(len(names) / ACROSS), cols=ACROSS, subplot_titles=names)
    shown: set[str] = set()
    for index, name in enumerate(names):
        place = {"row": index // ACROSS + 1, "col": index % ACROSS + 1}
        for who, colour in _colours(board).items():
            for points, size in ((_sweep(board, name, who), 5), (_rows(board, name, who), 11)):
                if points:
                    texts = [f"{who}, knob {each.knob if each.knob is not None else 'as it comes'}" for each in points]
                    pairs = [_pair(each) for each in points]
                    figure.add_trace(
                        Scatter(
                            x=[cost for cost, _ in pairs],
                            y=[missed for _, missed in pairs],
                            text=texts,
                            name=who,
                            legendgroup=who,
                            showlegend=who not in shown,
                            mode="lines+markers" if who == OURS and size == 5 else "markers",
                            marker={"color": colour, "size": size},
                        ),
                        **place,
                    )
                    shown.add(who)
    figure.update_xaxes(type="log", title_text="USD")
    figure.update_yaxes(type="log", title_text="misses of the top priority")
    figure.update_layout(height=320 * math.ceil(len(names) / ACROSS), title_text="Lower left is better")
    return str(figure.to_html(include_plotlyjs=True))


def _panel(board: Scoreboard, name: str, colours: dict[str, str]) -> list[str]:
    points: list[Point | Row] = [*(each for each in board.sweeps if each.scenario == name)]
    points += [row for row in board.rows if row.scenario == name]
    pairs = [_pair(each) for each in points]
    x_axis = _Axis([cost for cost, _ in pairs], MARGIN, WIDTH - 12)
    y_axis = _Axis([missed for _, missed in pairs], HEIGHT - 34, 24)
    parts = [f'<text x="{MARGIN}" y="14" font-weight="bold">{escape(name)}</text>']
    parts += [
        f'<path d="M{MARGIN} 20V{HEIGHT - 30}H{WIDTH - 8}" fill="none" stroke="#999"/>',
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">USD</text>',
        f'<text x="4" y="{HEIGHT - 6}">misses ↑</text>',
    ]
    for value in (min(cost for cost, _ in pairs), max(cost for cost, _ in pairs)):
        parts.append(f'<text x="{x_axis(value):.0f}" y="{HEIGHT - 18}" text-anchor="middle">{value:,.0f}</text>')
    for value in (min(missed for _, missed in pairs), max(missed for _, missed in pairs)):
        parts.append(f'<text x="{MARGIN - 4}" y="{y_axis(value) + 4:.0f}" text-anchor="end">{value:.2%}</text>')
    for who, colour in colours.items():
        parts += [_dot(knob, colour, 2.0, x_axis, y_axis) for knob in _sweep(board, name, who)]
        parts += [_dot(row, colour, 5.0, x_axis, y_axis) for row in _rows(board, name, who)]
    curve = sorted(_pair(each) for each in _sweep(board, name, OURS))
    if curve:
        line = " ".join(f"{x_axis(cost):.1f},{y_axis(missed):.1f}" for cost, missed in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{INK[OURS]}"/>')
    return parts


class _Axis:
    """A logarithmic scale from the least to the largest value onto two positions."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self._low, high = math.log(max(min(values), 1e-9)), math.log(max(max(values), 1e-9))
        self._first, self._per = first, (last - first) / max(high - self._low, 1e-9)

    def __call__(self, value: float) -> float:
        return self._first + (math.log(max(value, 1e-9)) - self._low) * self._per


def _dot(each: Point | Row, colour: str, radius: float, x_axis: _Axis, y_axis: _Axis) -> str:
    cost, missed = _pair(each)
    text = escape(f"{each.controller} {each.knob if each.knob is not None else ''}: {1 - missed:.2%}, {cost:,.2f} USD")
    place = f'cx="{x_axis(cost):.1f}" cy="{y_axis(missed):.1f}"'
    return f'<circle {place} r="{radius}" fill="{colour}" fill-opacity="0.8"><title>{text}</title></circle>'


def _pair(each: Point | Row) -> Pair:
    if isinstance(each, Row):
        return max(each.cost_usd.mean, 1e-9), max(1.0 - each.attainment_top.mean, LEAST_MISS)
    return max(each.cost_usd, 1e-9), max(1.0 - each.attainment_top, LEAST_MISS)


def _sweep(board: Scoreboard, name: str, who: str) -> list[Point]:
    return [each for each in board.sweeps if (each.scenario, each.controller) == (name, who)]


def _rows(board: Scoreboard, name: str, who: str) -> list[Row]:
    return [each for each in board.rows if (each.scenario, each.controller) == (name, who)]


def _colours(board: Scoreboard) -> dict[str, str]:
    """A colour for every controller, ours first."""
    names = sorted({row.controller for row in board.rows} | {each.controller for each in board.sweeps})
    others = [name for name in names if name not in INK]
    found = {name: INK[name] for name in INK if name in names}
    return found | {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(others)}
