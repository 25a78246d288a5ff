"""`qm status`: where things stand, by the newest records of a journal. May not write a journal or ask the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from autoscaler.adapters.journals import Place, holder, read_journal
from autoscaler.commands.journal import clock_words, screen
from autoscaler.commands.outcome import OK, check_json, write_json
from autoscaler.core.beliefs import EMPTY, Beliefs
from autoscaler.core.events import CheckFailed, Configured, Event, Observed, Planned, PolicyRefused, Record
from autoscaler.core.learn import learn
from autoscaler.core.lifecycle import STARTING, InstanceState
from autoscaler.core.model import Missing, Observation, Plan
from autoscaler.core.orders import in_force
from autoscaler.explain import order_words, words


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """One service as the newest plan and observation have it."""

    service: str
    demand_rps: float
    ready: int
    target: int
    wanted: int
    short: int
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The newest state that a journal holds. `instances` by state; `cooling` has the instant each rest ends."""

    at_s: float
    run_id: str
    policy_digest: str
    policy_problems: tuple[str, ...]
    blind: tuple[str, ...]
    check_violations: tuple[str, ...]
    services: tuple[ServiceStatus, ...]
    instances: dict[str, int]
    cooling: dict[str, float]
    orders: tuple[str, ...] = ()  # of operators, in force
    writer: str = ""  # who holds the journal


@dataclass(slots=True)
class _Newest:
    """The newest of each kind of record that beliefs do not keep."""

    beliefs: Beliefs = EMPTY
    seen: Observation | None = None
    policy_problems: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()

    def take(self, event: Event) -> None:
        match event:
            case Observed():
                self.seen = event.observation
            case PolicyRefused():
                self.policy_problems = event.problems
            case Configured():
                self.policy_problems = ()
            case CheckFailed():
                self.violations = event.violations
            case Planned():
                self.violations = ()
            case _:
                pass
        self.beliefs = learn(self.beliefs, event)


def status(records: Iterable[Record]) -> Status:
    """Fold records to their newest state."""
    newest = _Newest()
    for record in records:
        newest.take(record.event)
    beliefs = newest.beliefs
    states = (row.state for row in beliefs.instances.values() if row.state is not InstanceState.GONE)
    return Status(
        at_s=beliefs.at_s,
        run_id=beliefs.run_id,
        policy_digest=beliefs.digest,
        policy_problems=newest.policy_problems,
        blind=_blind(newest.seen),
        check_violations=newest.violations,
        services=_services(beliefs.last_plan, newest.seen),
        instances=dict(Counter("starting" if state in STARTING else state.value for state in states)),
        cooling={name: b.cool_until_s for name, b in beliefs.offerings.items() if b.cool_until_s > beliefs.at_s},
        orders=tuple(order_words(order) for order in in_force(beliefs, beliefs.at_s)),
    )


def _blind(seen: Observation | None) -> tuple[str, ...]:
    ports = (("metrics", seen.loads), ("serving", seen.serving), ("cloud", seen.cloud)) if seen is not None else ()
    return tuple(f"{port}: {view.why}" for port, view in ports if isinstance(view, Missing))


def _services(plan: Plan | None, seen: Observation | None) -> tuple[ServiceStatus, ...]:
    if plan is None:
        return ()
    views = () if seen is None or isinstance(seen.serving, Missing) else seen.serving.replicas
    ready = Counter(replica.service for replica in views if replica.state == "ready")
    short = {row.service: row for row in plan.shortfalls}
    return tuple(
        ServiceStatus(
            service=demand.service,
            demand_rps=demand.arrival_rps,
            ready=ready[demand.service],
            target=sum(row.replicas for row in plan.targets if row.service == demand.service),
            wanted=sum(row.wanted for row in plan.targets if row.service == demand.service),
            short=short[demand.service].replicas if demand.service in short else 0,
            why=tuple(words(r) for r in (short[demand.service].reasons if demand.service in short else demand.reasons)),
        )
        for demand in plan.demands
    )


def status_command(journal: Place, json_file: str | None) -> int:
    """Print where things stand."""
    check_json(json_file)
    found = replace(status(read_journal(journal)), writer=holder(journal))
    if json_file:
        write_json(json_file, TypeAdapter(Status).dump_json(found))
    if json_file != "-":
        _print(screen(), found)
    return OK


def _print(console: Console, found: Status) -> None:
    console.print(f"run {found.run_id}, {clock_words(found.at_s)}, policy {found.policy_digest or 'none yet'}")
    console.print(f"journal written by {found.writer}", markup=False)
    for head, lines in (
        ("policy refused, the last good one stays", found.policy_problems),
        ("not seen", found.blind),
        ("plan refused by its check", found.check_violations),
        ("ordered", found.orders),
    ):
        for line in lines:
            console.print(f"[bold]{head}:[/] ", end="")
            console.print(line, markup=False)
    table = Table("service", "demand req/s", "ready", "target", "wanted", "short", "why", box=None, pad_edge=False)
    for row in found.services:
        counts = (str(n) for n in (row.ready, row.target, row.wanted, row.short))
        table.add_row(row.service, f"{row.demand_rps:.2f}", *counts, row.why[-1] if row.why else "")
    console.print(table)
    instances = ", ".join(f"{count} {state}" for state, count in sorted(found.instances.items())) or "none"
    console.print(f"instances: {instances}")
    for offering, until_s in sorted(found.cooling.items()):
        console.print(f"resting until {clock_words(until_s)}: {offering}", markup=False)
