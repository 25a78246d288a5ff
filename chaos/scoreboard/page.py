"""The scoreboard as text: README's table and the whole one. Written from the figures only, so that they agree.

Pure, except `publish`, which writes the files; may not run anything or read a clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .figures import Interval, Row, Scoreboard
from .jobs import OURS, STATIC
from .picture import svg

NAME = "scoreboard"
BEGIN, END = "<!-- scoreboard:begin -->", "<!-- scoreboard:end -->"
HEAD = ("scenario", "controller", "knob", "attainment (95 %)", "$ (95 %)", "÷ LB1", "refused/grant",
        "direction changes", "inversion s", "cold-start misses")  # fmt: skip
OWN = (OURS, "oracle-demand", "oracle-supply", STATIC)


def publish(board: Scoreboard, folder: Path) -> None:
    """Write docs/scoreboard.json, .md and .svg, and README's table."""
    readme = folder / "README.md"
    text = with_table(readme.read_text(encoding="utf-8"), board)
    docs = folder / "docs"
    docs.mkdir(exist_ok=True)
    (docs / f"{NAME}.json").write_text(board.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (docs / f"{NAME}.md").write_text(details(board), encoding="utf-8")
    (docs / f"{NAME}.svg").write_text(svg(board), encoding="utf-8")
    readme.write_text(text, encoding="utf-8")


def with_table(readme: str, board: Scoreboard) -> str:
    """README's text with the table between its markers; without markers it becomes the last section."""
    if BEGIN not in readme:
        readme = f"{readme.rstrip()}\n\n## Beside other autoscalers\n\n{BEGIN}\n{END}\n"
    inside = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return inside.sub(lambda _: f"{BEGIN}\n{summary(board)}{END}", readme, count=1)


def summary(board: Scoreboard) -> str:
    """One line a scenario: ours, the best peer, the bound."""
    lines = _head(("scenario", "wanted", "ours", "$", "÷ LB1", "best peer", "its knob", "attains", "$", "dominated by"))
    for name in dict.fromkeys(row.scenario for row in board.rows):
        rows = [row for row in board.rows if row.scenario == name]
        ours = next((row for row in rows if row.controller == OURS and row.knob is None), None)
        if ours is None:
            continue
        peers = [row for row in rows if row.controller not in OWN]
        best = min(peers, key=lambda one: (-one.attainment_top.mean, one.cost_usd.mean), default=None)
        beaten = sorted({one.controller for one in board.dominated_by if one.scenario == name})
        lines.append(_line((*_own(ours), *_peer(best), ", ".join(beaten) or "none")))
    return "\n".join((*lines, "", f"{_how(board)} Every row, with intervals: [the scoreboard](docs/{NAME}.md).", ""))


def details(board: Scoreboard) -> str:
    """Every row, and the claims against the best peer of each scenario."""
    lines = ["# Scoreboard", "", _how(board), "", f"![attainment and cost]({NAME}.svg)", ""]
    lines += [*_head(HEAD), *(_line(_whole(row)) for row in board.rows), "", "## Against the best peer", ""]
    lines += _head(("scenario", "peer", "as good, cheaper by", "our knob", "as dear, fewer misses", "our knob"))
    for claim in board.claims:
        cheaper, fewer = _interval(claim.cheaper, "{:.0%}"), _interval(claim.fewer_misses, "{:.1f} ×")
        cells = (claim.scenario, claim.peer, cheaper, _knob(claim.cheaper_knob), fewer, _knob(claim.fewer_knob))
        lines.append(_line(cells))
    return "\n".join((*lines, ""))


def _how(board: Scoreboard) -> str:
    """How to read it."""
    return (
        f"Mean over {len(board.seeds)} seeds. Attainment: requests of the highest priority within every limit ÷ those"
        " offered. A peer's knob is its best of seven multipliers of its default (÷ 4 … × 4) in hindsight: the cheapest"
        f" within the objective, else the one that attains most, chosen on {len(board.sweep_seeds)} other seeds."
        " LB1 is a proven lower bound on cost at the controller's own attainment."
        " A peer dominates when it attains at least as much at 0.98 of the cost or less."
    ) + (f" {board.older} runs were made by an earlier version of the code." if board.older else "")


def _own(row: Row) -> tuple[str, ...]:
    bound = "–" if row.regret_lb1 is None else f"{1 + row.regret_lb1:.2f}"
    return (row.scenario, f"{row.fraction:.1%}", f"{row.attainment_top.mean:.2%}", f"{row.cost_usd.mean:,.2f}", bound)


def _peer(row: Row | None) -> tuple[str, ...]:
    if row is None:
        return ("–", "–", "–", "–")
    return (row.controller, _knob(row.knob), f"{row.attainment_top.mean:.2%}", f"{row.cost_usd.mean:,.2f}")


def _whole(row: Row) -> tuple[str, ...]:
    return (
        row.scenario,
        row.controller,
        _knob(row.knob),
        _interval(row.attainment_top, "{:.2%}"),
        _interval(row.cost_usd, "{:,.2f}"),
        "–" if row.regret_lb1 is None else f"{1 + row.regret_lb1:.2f}",
        "–" if row.refused_per_grant is None else f"{row.refused_per_grant:.2f}",
        f"{row.direction_changes:.1f}",
        f"{row.priority_inversion_s:.0f}",
        f"{row.cold_start_misses:.0f}",
    )


def _interval(value: Interval | None, form: str) -> str:
    if value is None:
        return "–"
    return f"{form.format(value.mean)} ({form.format(value.low)} … {form.format(value.high)})"


def _knob(knob: float | None) -> str:
    return "–" if knob is None else f"{knob:.4g}"


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), _line(["---"] * len(names))]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
