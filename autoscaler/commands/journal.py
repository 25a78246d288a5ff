"""`qm replay` and `qm explain`: what a journal says of decisions. Reads files and prints; may not write a journal."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Column, Table

from autoscaler.adapters.journals import Place, read_journal
from autoscaler.commands.outcome import OK, VIOLATED, BadInput, check_json, write_json
from autoscaler.explain import Explanation, Rung, explain
from autoscaler.replay import DIFFERENCES_SHOWN, Replay, replay
from autoscaler.software import versions

COLUMNS = ("offering", "$/h", "answer", "refused before")
_REPLAY: TypeAdapter[Replay] = TypeAdapter(Replay)
_EXPLANATION: TypeAdapter[Explanation] = TypeAdapter(Explanation)


def replay_command(journal: Place, json_file: str | None) -> int:
    """Decide every plan of `journal` again; 1 when any came out otherwise."""
    check_json(json_file)
    found = replay(read_journal(journal), versions())
    if json_file:
        write_json(json_file, _REPLAY.dump_json(found))
    if json_file != "-":
        _print_replay(found)
    return VIOLATED if found.differences else OK


def _print_replay(found: Replay) -> None:
    console = screen()
    how = (
        "byte for byte"
        if found.exact
        else "to 1e-6, because the journal was written by other software or another processor"
    )
    console.print(
        f"{found.records} records, {found.runs} runs, {found.plans} plans decided again and compared {how}: "
        f"{found.identical} identical, {len(found.differences)} different; {found.check_failures} refused by the check"
    )
    if found.differences:
        first = found.differences[0]
        console.print(f"first difference: record {first.seq}, plan {first.plan_id} (journalled → decided again)")
        for change in first.changes[:DIFFERENCES_SHOWN]:
            console.print(f"  {change}", markup=False)
        if len(first.changes) > DIFFERENCES_SHOWN:
            console.print(f"  and {len(first.changes) - DIFFERENCES_SHOWN} more")


def explain_command(journal: Place, service: str | None, at: str | None, json_file: str | None) -> int:
    """Tell the newest launch's story."""
    check_json(json_file)
    at_s = parse_instant(at) if at is not None else None
    found = explain(read_journal(journal), service, at_s)
    if found is None:
        of = f" of {service}" if service else ""
        before = f" at or before {at}" if at else ""
        raise BadInput(f"{journal}: holds no launch{of}{before}; give another --service or --at")
    if json_file:
        write_json(json_file, _EXPLANATION.dump_json(found))
    if json_file != "-":
        _print_explanation(screen(), found)
    return OK


def parse_instant(text: str, option: str = "--at") -> float:
    """UTC seconds from seconds or ISO 8601. Raises BadInput, for what is not finite too."""
    wrong = BadInput(f"{option} {text}: not a time; give UTC seconds or 2026-01-31T12:00:00Z")
    try:
        at_s = float(text)
    except ValueError:
        pass
    else:
        if math.isfinite(at_s):
            return at_s
        raise wrong
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise wrong from None
    return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()


def clock_words(at_s: float) -> str:
    """An instant as people read it."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def screen() -> Console:
    """Standard output; long lines are the terminal's to wrap."""
    return Console(highlight=False, soft_wrap=True)


def _print_explanation(console: Console, found: Explanation) -> None:
    console.print(
        f"[bold]{found.service}[/] variant {found.variant}: {found.granted} of {found.count} instances granted, "
        f"plan {found.plan_id}, {clock_words(found.at_s)}"
    )
    console.print("\nWhy it was needed")
    for line in found.demand:
        console.print(f"  {line}", markup=False)
    console.print("\nWhy in this order")
    for line in found.reasons:
        console.print(f"  {line}", markup=False)
    table = Table(*(Column(name, overflow="fold") for name in COLUMNS), box=None, pad_edge=False)
    for rung in found.rungs:
        table.add_row(*_rung_cells(rung))
    console.print()
    console.print(table)
    console.print("\nWhat would change it")
    for line in found.remedies or ("a cheaper offering, or less demand",):
        console.print(f"  {line}", markup=False)


def _rung_cells(rung: Rung) -> tuple[str, ...]:
    price = f"{rung.price_usd_per_h:.2f}" if rung.price_usd_per_h is not None else "?"
    before = f"{rung.refusals_in_row} in a row" if rung.refusals_in_row else ""
    return rung.offering, price, _answer(rung), before


def _answer(rung: Rung) -> str:
    match rung.outcome:
        case "granted":
            return f"granted {rung.granted} of {rung.asked}"
        case "refused":
            return rung.code
        case "cooling down":
            return f"left out, rests until {clock_words(rung.cool_until_s)[11:19]}"
        case _:
            return f"{rung.outcome} {rung.code}".strip()
