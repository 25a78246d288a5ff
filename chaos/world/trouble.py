"""What goes wrong with the controller itself: it dies at any step, its journal fails, its policy files change.

May not decide anything; when each happens is the scenario's (`chaos.faults`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from autoscaler.adapters.journal import FileJournal, MemoryJournal
from autoscaler.adapters.policy_folder import digest
from autoscaler.core.events import Event, Record
from autoscaler.ports import Broken, Journal, Policy, Transient
from chaos.scenario import Fault, Scenario
from policies.model import PolicySet

from .faults import Faults, value


class Crashed(BaseException):
    """The controller's process is gone. Nothing of it runs after this."""


@dataclass
class Fragile:
    """ports.Journal over another one. Every record is two steps of a tick, before and after it is written: the calls to
    cloud and cluster lie between records, so a crash at one of them is a crash at any step.

    `synced` is the number of the last record that a power cut leaves.
    """

    kept: Journal
    faults: Faults
    synced: int = 0
    seq: int = 0
    _left: float | None = None  # records until the crash

    def __post_init__(self) -> None:
        self.faults.on("controller_crash", self._arm)

    def _arm(self, fault: Fault) -> None:
        self._left = value(fault)

    def append(self, event: Event, *, durable: bool) -> Record:
        """See ports.Journal. Raises Crashed where a fault says so."""
        if self.faults.active("journal_full"):
            raise Transient("the journal cannot be written: the disk is full", "journal_unwritable")
        self._step()
        record = self.kept.append(event, durable=durable)
        self.seq, self.synced = record.seq, record.seq if durable else self.synced
        self._step()
        return record

    def _step(self) -> None:
        if self._left is not None:
            self._left -= 0.5
            if self._left < 0.0:
                self._left = None
                raise Crashed

    def read(self) -> Iterator[Record]:
        """See ports.Journal."""
        return self.kept.read()

    def roll(self, head: Callable[[], tuple[Event, ...]]) -> tuple[Record, ...]:
        """See ports.Journal."""
        records = self.kept.roll(head)
        if records:
            self.seq = self.synced = records[-1].seq
        return records

    def tear(self) -> None:
        """The power fails: records after the last synced one are lost, of a file the middle of a line is left."""
        lost = self.seq - self.synced
        if lost == 0:
            return
        if isinstance(self.kept, FileJournal):
            self.kept = _torn(self.kept, lost)
        elif isinstance(self.kept, MemoryJournal):
            self.kept.records = self.kept.records[:-lost]
            self.kept._seq -= lost
        self.seq = self.synced


def _torn(journal: FileJournal, lost: int) -> FileJournal:
    path = journal._path
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    first = lines[-lost]
    path.write_bytes(b"".join(lines[:-lost]) + first[: len(first) // 2])
    return FileJournal(journal.folder, segment_bytes=journal.segment_bytes, keep=journal.keep, sync=journal.sync)


@dataclass
class Policies:
    """ports.PolicySource: the scenario's policy, told once, and again whenever a fault changes or breaks its files."""

    scenario: Scenario
    faults: Faults
    _told: object = field(default=None, init=False)

    def poll(self, now_s: float) -> Policy | Broken | None:  # noqa: ARG002
        """See ports.PolicySource."""
        factor = self.faults.factor("policy_change", ())
        state = "bad" if self.faults.active("policy_bad") else factor
        if state == self._told:
            return None
        self._told = state
        if state == "bad":
            return Broken(problems=("policies: cannot be read; make them readable",))
        policy = _widened(self.scenario, factor)
        return Policy(policy=policy, shapes=self.scenario.shapes, digest=digest(policy, self.scenario.shapes))


def _widened(scenario: Scenario, factor: float) -> PolicySet:
    """The policy with every service's maximum times `factor`, its minimum and one at least."""
    if factor == 1.0:
        return scenario.policy_set
    units = []
    for unit in scenario.policies:
        services = tuple(
            entry.model_copy(update={"max_replicas": max(1, entry.min_replicas, int(factor * entry.max_replicas))})
            for entry in unit.services
        )
        units.append(unit.model_copy(update={"services": services}))
    return PolicySet(units=tuple(units))
