"""What was proven, as text: README's table of promises and docs/promises.md, written from the figures of the runs only.

The steps of `make proof` leave their results in the folder that ``$QM_PROOF`` names (`keep`);
``python -m chaos.swarm.promises [FOLDER]`` writes the pages. May not run anything, or read a clock.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PROOF = "QM_PROOF"
HEAD = """# Promises

What the steps of `make proof` found that have run to their end, and of the worlds as many as have. What each word
means, and what is known not to hold: [chaos.md](chaos.md).
"""
BEGIN, END = "<!-- promises:begin -->", "<!-- promises:end -->"
ROOT = Path(__file__).parents[2]
NEEDED_SHARE = 0.05  # of the worlds that must have each kind of fault
BREAKS = 12  # that are named (`mutations`)
Row = tuple[str, str, str, bool]  # what is promised, how it was tried, what came out, whether it holds


def keep(name: str, result: dict[str, Any]) -> None:
    """Leave a step's result for the table, if this is a proof."""
    folder = os.environ.get(PROOF)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """The results that are there, by step."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def rows(found: dict[str, Any]) -> Iterator[Row]:
    """The table's rows, of the steps that have run."""
    for step, words in (
        ("chaos", "an hour, 4 services on 8 pools"),
        ("chaos-long", "six hours, 12 services on 20 pools"),
    ):
        if step in found:
            yield from _worlds(found[step], words)
    if "mutations" in found:
        seen = found["mutations"]
        caught = [name for name, seed in seen.items() if seed is not None]
        last = max((seen[name] for name in caught), default=0)
        text, tried = f"{len(caught)} seen, the last in seed {last}", f"{len(seen)} of {BREAKS} deliberate breaks"
        yield "the checkers see what they are for", tried, text, len(caught) == max(len(seen), BREAKS)
    if "journal" in found:
        kills = found["journal"]["kills"]
        tried = f"kill -9 of a writing process, {kills:,} times over one journal"
        lost = found["journal"]["lost"]
        yield "no launch intent is lost, no journal unreadable", tried, f"{lost} lost", lost == 0
    if "crashes" in found:
        crashed = found["crashes"]
        tried = f"{crashed['steps']} steps of a tick × {crashed['faults']} kinds of trouble"
        yield "a crash changes neither beliefs nor plan", tried, "the same plan within five ticks", True
    if "soak" in found:
        yield _soak(found["soak"])


def _worlds(report: dict[str, Any], words: str) -> Iterator[Row]:
    worlds = f"{report['seeds']:,} random bad days of {words}"
    broken, restless = len(report["violations"]), len(report["not_converged"])
    yield "no promise is broken at any tick", worlds, f"{broken} violations", broken == 0
    settled = report["scores"]["settled_after_s"]
    text = f"{restless} did not; {settled['mean']:.0f} s on average, {settled['worst']:,.0f} s at worst"
    yield "after the last fault all comes to rest", "the same", text, restless == 0
    rare, share = min(report["coverage"].items(), key=lambda row: row[1])
    never = ", ".join(report["never_visited"]) or "none"
    text = f"the rarest ({rare}) in {share:.1%}; changes never seen: {never}"
    met = share >= NEEDED_SHARE and not report["never_visited"]
    tried = f"{len(report['coverage'])} kinds of faults, {len(report['transitions'])} changes of an instance's life"
    yield "every fault and every change is met", tried, text, met


def _soak(soak: dict[str, Any]) -> Row:
    rss, tick = soak["rss_mib"], soak["tick_ms"]
    text = f"{rss[0]:.0f} → {rss[1]:.0f} MiB, a tick {tick[0]:.1f} → {tick[1]:.1f} ms, "
    text += f"a journal of {soak['journal_mib']:.1f} MiB at most"
    tried = f"{soak['days']} simulated days in one process, {soak['ticks']:,} ticks, {soak['records']:,} records"
    return "nothing grows", tried, text, not soak["problems"]


def table(lines: Iterable[Row]) -> str:
    """The rows as Markdown."""
    head = "| what must hold | how it was tried | what came out | holds |\n|---|---|---|---|\n"
    return head + "".join(
        f"| {what} | {how} | {out} | {'yes' if holds else '**no**'} |\n" for what, how, out, holds in lines
    )


def page(found: dict[str, Any]) -> str:
    """docs/promises.md."""
    parts = [HEAD, table(rows(found))]
    for step, words in (("chaos", "days of an hour"), ("chaos-long", "days of six hours")):
        if step in found:
            report = found[step]
            parts.append(f"## {report['seeds']:,} {words}\n\n{report['cpu_s']:,.0f} s of a core.\n")
            parts.append(
                "| score | mean | worst | in seeds |\n|---|---|---|---|\n" + "".join(_scores(report["scores"]))
            )
            parts.append(_shares("fault", report["coverage"]))
            parts.append(_shares("change of an instance's life", report["transitions"]))
    if "mutations" in found:
        seen = found["mutations"].items()
        lines = (f"| {name.replace('_', ' ')} | {'never' if seed is None else seed} |\n" for name, seed in seen)
        parts.append("## Deliberate breaks\n\n| break | first seed that sees it |\n|---|---|\n" + "".join(lines))
    return "\n".join(parts)


def _scores(scores: dict[str, Any]) -> Iterator[str]:
    for name, score in scores.items():
        seeds = ", ".join(map(str, score["seeds"]))
        yield f"| {name.replace('_', ' ')} | {score['mean']:,.3f} | {score['worst']:,.3f} | {seeds} |\n"


def _shares(word: str, shares: dict[str, float]) -> str:
    lines = (f"| {name} | {share:.1%} |\n" for name, share in sorted(shares.items(), key=lambda row: row[1]))
    return f"| {word} | of all worlds |\n|---|---|\n" + "".join(lines)


def publish(found: dict[str, Any], folder: Path) -> None:
    """Write docs/promises.md and the part of README between the markers."""
    (folder / "docs" / "promises.md").write_text(page(found), encoding="utf-8")
    readme = folder / "README.md"
    inside = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    text = f"{BEGIN}\n{table(rows(found))}{END}"
    readme.write_text(inside.sub(lambda _: text, readme.read_text(encoding="utf-8"), count=1), encoding="utf-8")


def main() -> int:
    """Writes the pages; 1 when a promise does not hold, 2 when there is nothing to write of."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get(PROOF, "build/proof"))
    found = read(folder)
    if not found:
        print(f"{folder}: holds no results of a proof; run make proof first", file=sys.stderr)
        return 2
    publish(found, ROOT)
    print(table(rows(found)), end="")
    return 0 if all(holds for *_, holds in rows(found)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
