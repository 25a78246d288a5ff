"""What a person sees of a run: a live panel, or plain lines where there is no terminal, and a summary.

Shows, and may not decide or measure. Writes to one rich console.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from chaos.facts import Facts
from chaos.report import Report, ServiceReport

PLAIN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at a run: `done_s` of `whole_s` seconds of load, requests, ready replicas, instances held."""

    phase: str
    done_s: float
    whole_s: float
    sent: int
    answered: int
    shed: int
    failed: int
    in_flight: int
    ready: Counter[str]
    instances: Counter[str]
    pss_bytes: int

    def line(self) -> str:
        """The snapshot in one line."""
        ready = " ".join(f"{name.split('/')[-1]} {count}" for name, count in sorted(self.ready.items())) or "none"
        held = " ".join(f"{name}×{count}" for name, count in sorted(self.instances.items())) or "none"
        return (
            f"{self.phase:<8} {self.done_s:4.0f}/{self.whole_s:.0f} s  sent {self.sent} answered {self.answered} "
            f"open {self.in_flight} shed {self.shed} failed {self.failed}  ready {sum(self.ready.values())} ({ready})  "
            f"instances {sum(self.instances.values())} ({held})  {self.pss_bytes / 2**30:.1f} GiB"
        )


@dataclass
class Status:
    """A context manager. `say` tells an event at once; `show` the state, without a terminal only now and then."""

    console: Console
    _live: Live | None = None
    _progress: Progress = field(
        default_factory=lambda: Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    )
    _start_s: float = field(default_factory=time.monotonic)
    _plain_at_s: float = -PLAIN_EVERY_S

    def __enter__(self) -> Status:
        if self.console.is_terminal:
            self._progress.add_task("starting", total=None)
            self._live = Live(self._progress, console=self.console, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One event, with the seconds since the start."""
        since_s = time.monotonic() - self._start_s
        self.console.print(f"[dim]{since_s:6.1f} s[/dim]  {escape(text)}", highlight=False, soft_wrap=True)

    def show(self, seen: Snapshot) -> None:
        """The state now."""
        if self._live is not None:
            task = self._progress.task_ids[0]
            self._progress.update(task, description=seen.phase, completed=seen.done_s, total=seen.whole_s)
            self._live.update(Group(self._progress, _panel(seen)))
        elif time.monotonic() >= self._plain_at_s + PLAIN_EVERY_S:
            self._plain_at_s = time.monotonic()
            self.say(seen.line())


def _panel(seen: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "requests",
        f"sent {seen.sent}  answered {seen.answered}  open {seen.in_flight}  shed {seen.shed}  failed {seen.failed}",
    )
    table.add_row("ready", "  ".join(f"{name} {count}" for name, count in sorted(seen.ready.items())) or "none yet")
    table.add_row("instances", "  ".join(f"{name} ×{n}" for name, n in sorted(seen.instances.items())) or "none yet")
    table.add_row("memory", f"{seen.pss_bytes / 2**30:.1f} GiB (PSS of everything)")
    return table


# ---- summary --------------------------------------------------------------------------------------------------------
def summary(console: Console, report: Report, facts: Facts, notes: Sequence[str], kept: str = "") -> None:
    """The end of a run as tables: services, pools, then everything else in lines. `kept`: what was left on purpose."""
    console.print()
    console.print(_services(report))
    console.print(_pools(facts))
    for line in (*_lines(report, kept), *notes):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _services(report: Report) -> Table:
    table = Table(title="Services", title_justify="left")
    for name in (
        "service",
        "requests",
        "SLO met",
        "wanted",
        "TTFT p50/p95/p99 s",
        "TPOT p50/p95 s",
        "shed",
        "failed",
        "cold",
    ):
        table.add_column(name, justify="left" if name == "service" else "right")
    for key, seen in report.services.items():
        table.add_row(key, *_cells(seen))
    return table


def _cells(seen: ServiceReport) -> tuple[str, ...]:
    ttft, tpot = seen.ttft_s, seen.tpot_s
    met = "–" if seen.slo_attainment is None else f"{seen.slo_attainment:.1%}"
    times = (_slashed(ttft.p50, ttft.p95, ttft.p99), _slashed(tpot.p50, tpot.p95, digits=3))
    counts = (seen.shed, seen.failed, seen.cold_start_misses)
    return (str(seen.requests), met, f"{seen.fraction:.0%}", *times, *(str(count) for count in counts))


def _slashed(*values: float | None, digits: int = 2) -> str:
    return " / ".join("–" if value is None else f"{value:.{digits}f}" for value in values)


def _pools(facts: Facts) -> Table:
    table = Table(title="Pools", title_justify="left")
    for name in ("pool", "$/h", "launched", "refused", "held s", "cost $"):
        table.add_column(name, justify="left" if name == "pool" else "right")
    for pool in sorted({row.pool for row in facts.offerings.values()}):
        price = min(row.price_usd_per_h for row in facts.offerings.values() if row.pool == pool)
        held = [seen for seen in facts.instances.values() if seen.offering.pool == pool]
        table.add_row(
            pool,
            f"{price:.4f}",
            str(facts.granted_by_pool[pool]),
            str(facts.refused_by_pool[pool]),
            f"{sum(seen.until_s - seen.from_s for seen in held):.0f}",
            f"{sum(seen.cost_usd for seen in held):.4f}",
        )
    return table


def _lines(report: Report, kept: str) -> list[str]:
    launches, live = report.launches, report.live
    refused = ", ".join(f"{count} {name}" for name, count in launches.refused.items()) or "none"
    lines = [
        f"cost ${report.cost_usd:.4f} at catalogue prices ({_money(report.cost_usd_by.unit)})",
        f"launch calls {launches.attempted}: {launches.granted} granted; refused: {refused}",
    ]
    if live is not None:
        lines += [
            f"at most {live.max_ready_replicas} ready at once, on {live.nodes_used} nodes of {live.pools_used} pools",
            f"refusals answered from another pool in the same tick: {live.refused_then_granted_same_tick}",
        ]
        lines += [_reclaim(seen.deadline_at_s, seen.empty_at_s) for seen in live.reclaims]
        gone = f"left over: {live.leaked_instances} instances, {live.leaked_processes} processes"
        lines.append(f"kept: {kept}" if kept else gone)
    return lines + [f"VIOLATION {seen.kind}: {seen.detail}" for seen in report.violations]


def _reclaim(deadline_at_s: float, empty_at_s: float | None) -> str:
    if empty_at_s is None:
        return "reclaimed instance: never seen empty"
    early_s = deadline_at_s - empty_at_s
    return f"reclaimed instance: empty {abs(early_s):.0f} s {'before' if early_s >= 0 else 'AFTER'} its deadline"


def _money(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} ${usd:.4f}" for name, usd in parts.items())
