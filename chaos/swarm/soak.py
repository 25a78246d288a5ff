"""Months in one process: does memory, the journal or the time of a tick grow? Every day is another bad day.

``python -m chaos.swarm.soak [DAYS] [TICK_S]``, 72 days of ticks of 120 s by default. The controller is the loop,
unchanged, over a journal on disk with small segments; crashes and power cuts make it begin anew from there. Reads the
clock and the size of its own process.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from autoscaler.adapters.journal import FileJournal
from chaos.scenario import scenario_of
from chaos.world.runs import few_collections
from chaos.world.world import World

from .draw import Size, drawn
from .promises import keep
from .run import Watched

DAY_S = 86_400.0
SEGMENT_BYTES, SEGMENTS = 2**20, 6
GROWTH = 1.1  # of the last quarter's median over that of the second, when caches and histories are full
TICK_GROWTH = 1.25
SETTLED_DAYS = 8  # the least that says anything of growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """One day: memory and journal at its end, CPU seconds of a tick on average."""

    day: int
    rss_mib: float
    journal_mib: float
    tick_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What became of them. `problems` is empty when all stayed flat."""

    days: int
    ticks: int
    records: int
    rss_mib: tuple[float, float]  # medians of the second and the last quarter
    tick_ms: tuple[float, float]
    journal_mib: float  # at most
    problems: tuple[str, ...]


def bad_days(days: int, tick_s: float) -> dict[str, Any]:
    """The first seed's world, each day with the faults of a seed of its own as far as they have a target there."""
    made = drawn(0, Size(4, 8, 24.0)) | {"duration_s": days * DAY_S, "tick_s": tick_s}
    names = {row["service"] for row in made["demand"]} | {"*"}
    names |= {row[key] for row in made["supply"] for key in ("id", "zone", "instance_type", "market")}
    rows = [fault | {"at_s": fault["at_s"] + n * DAY_S} for n in range(days) for fault in drawn(n)["faults"]]
    for row in made["supply"]:
        row.pop("end_s", None)  # a block that is over would leave fewer pools for most of the time
    return made | {"faults": [row for row in rows if row["target"] in names]}


def soak(days: int, tick_s: float, folder: Path) -> tuple[Soak, list[Day]]:
    """Run them all, one line a day on standard error."""
    world = World(scenario_of(bad_days(days, tick_s)), 0)
    journal = FileJournal(folder, segment_bytes=SEGMENT_BYTES, keep=SEGMENTS, sync=False)
    loop, rows, step = Watched(world, journal), list[Day](), 0
    process = psutil.Process()
    with few_collections():
        for day in range(days):
            spent_s, before = 0.0, step
            while step * tick_s < (day + 1) * DAY_S:
                world.run_until(step * tick_s)
                world.metrics.sample()
                began_s = time.process_time()
                loop.tick()
                spent_s += time.process_time() - began_s
                world.scores.tick()
                step += 1
            size = sum(path.stat().st_size for path in folder.iterdir())
            rss = process.memory_info().rss
            rows.append(
                Day(day=day, rss_mib=rss / 2**20, journal_mib=size / 2**20, tick_ms=1e3 * spent_s / (step - before))
            )
            print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
    records = loop._journal.seq
    loop.close()
    return judged(rows, step, records), rows


def judged(rows: list[Day], ticks: int, records: int) -> Soak:
    """Whether anything grew."""
    quarter = max(1, len(rows) // 4)
    early, late = rows[quarter : 2 * quarter] or rows, rows[-quarter:]
    rss = median(row.rss_mib for row in early), median(row.rss_mib for row in late)
    tick = median(row.tick_ms for row in early), median(row.tick_ms for row in late)
    journal = max(row.journal_mib for row in rows)
    problems = []
    if len(rows) >= SETTLED_DAYS and rss[1] > GROWTH * rss[0]:
        problems.append(f"memory grew from {rss[0]:.0f} to {rss[1]:.0f} MiB")
    if len(rows) >= SETTLED_DAYS and tick[1] > TICK_GROWTH * tick[0]:
        problems.append(f"a tick took {tick[0]:.1f} ms, then {tick[1]:.1f} ms")
    if journal > 2.0 * SEGMENTS * SEGMENT_BYTES / 2**20:
        problems.append(f"the journal took {journal:.0f} MiB, {SEGMENTS} segments of 1 MiB are kept")
    return Soak(
        days=len(rows),
        ticks=ticks,
        records=records,
        rss_mib=rss,
        tick_ms=tick,
        journal_mib=journal,
        problems=tuple(problems),
    )


def main() -> int:
    """Runs and prints; 1 when something grew."""
    given = [*sys.argv[1:], *("72", "120")[len(sys.argv) - 1 :]]
    with TemporaryDirectory() as folder:
        found, _ = soak(int(given[0]), float(given[1]), Path(folder))
    keep("soak", asdict(found))
    print(json.dumps(asdict(found), indent=1))
    return 1 if found.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
