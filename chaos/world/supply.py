"""The world's pools and instances: who gets one, how long it takes, who loses it. May not know Serve or a controller.

An offering holds so many instances in all as its steps say at the time (`chaos.pools`), times the capacity faults; a
drop gives the newest a reclaim notice. A Capacity Block gives notice 40 minutes before its end and takes its instances
30 minutes before, as AWS does. A launch gets what quota and pool have left, at least one, or AWS's word for no.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoscaler.core.learn import family
from autoscaler.core.model import CloudInstance, CloudState
from chaos.pools import available
from chaos.scenario import Dist, Fault, Scenario, Supply

from .faults import Faults, hits
from .tally import RESERVED, Bill, Tally
from .timeline import Timeline, stream

BLOCK_NOTICE_S = 2400.0
BLOCK_ENDS_EARLY_S = 1800.0
SHUTDOWN_S = 20.0  # from the end of an instance to its being gone; it keeps its place in pool and quota until then
FORGET_S = 60.0  # a gone instance is still listed for so long
RUNS_AFTER = 0.25  # of the way to its node's joining, an instance is running; at most RUNS_AFTER_MAX_S
RUNS_AFTER_MAX_S = 60.0
SLOW_NODE = 1.5
ICE = "InsufficientInstanceCapacity"
UNLIMITED = 1_000_000
GIVEN_BACK = "Client.UserInitiatedShutdown: terminated by request"
RECLAIMED = "Server.SpotInstanceTermination: reclaimed after its notice"
KILLED = "Server.InternalError: the instance is gone without notice"
BLOCK_OVER = "Server.CapacityBlockEnd: the block ends in 30 minutes"


class Refusal(Exception):
    """A definite no, in AWS's word; with `status` 500 and above nobody knows."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(slots=True, eq=False)
class Machine:
    """One instance and its whole life, known beforehand where nothing intervenes. Instants of scenario time."""

    instance: str
    row: Row
    token: str
    launched_at_s: float
    runs_at_s: float
    joins_at_s: float
    slow: float
    noticed_at_s: float = math.inf
    reclaim_at_s: float = math.inf
    stopped_at_s: float = math.inf
    gone_at_s: float = math.inf
    why: str = ""
    listed: tuple[tuple[CloudState, float | None], CloudInstance] | None = None  # as the cloud last showed it

    def state(self, at_s: float) -> CloudState:
        """What the cloud says of it at `at_s`."""
        if at_s >= self.gone_at_s:
            return "terminated"
        if at_s >= self.stopped_at_s:
            return "terminating"
        return "running" if at_s >= self.runs_at_s else "pending"

    @property
    def stays(self) -> bool:
        """Whether nobody has begun to take it away."""
        return self.noticed_at_s == math.inf and self.stopped_at_s == math.inf


@dataclass(slots=True, eq=False)
class Row:
    """One offering. `base` is what its steps say now; `machines` are those not gone, oldest first."""

    supply: Supply
    gpus: int
    families: frozenset[str]
    list_price: float
    boot: Dist
    steps_at_s: list[float]
    steps: list[int]
    names: frozenset[str]
    base: int = 0
    machines: list[Machine] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The offering's name."""
        return self.supply.id

    def open(self, at_s: float) -> bool:
        """Whether the offering exists at `at_s`."""
        end_s = self.supply.end_s
        return self.supply.start_s <= at_s and (end_s is None or at_s < end_s)


def _unheard(_: Machine) -> None:
    """Nobody listens."""


@dataclass
class Pools:
    """Every offering and instance. `joined` and `lost` are called as it happens to an instance.

    With `generous`, no market but reservations is ever short or reclaimed, and an instance costs what the cheapest
    offering of its type costs then ("perfect supply").
    """

    scenario: Scenario
    seed: int
    timeline: Timeline
    faults: Faults
    tally: Tally
    generous: bool = False
    joined: Callable[[Machine], None] = _unheard
    lost: Callable[[Machine], None] = _unheard
    rows: dict[str, Row] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)
    _granted: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    _made: int = 0
    _boots: np.random.Generator = field(init=False)
    _slow: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._boots, self._slow = stream(self.seed, "boots"), stream(self.seed, "slow-nodes")
        for supply in self.scenario.supply:
            if supply.market != "overflow":
                self.rows[supply.id] = self._row(supply)
        for row in self.rows.values():
            self._price(row)
            self._step(row, 0)
            self._calendar(row)
        for kind, listener in (
            ("capacity", self._resized),
            ("price", self._repriced),
            ("reclaim", self._reclaim),
            ("kill", self._kill),
            ("manual_end", self._end_by_hand),
        ):
            self.faults.on(kind, listener)

    def _row(self, supply: Supply) -> Row:
        kind = self.scenario.catalogue_set.instance_types[supply.instance_type]
        steps = available(self.scenario, supply.id, self.seed)
        words = (supply.id, supply.zone, supply.region, supply.instance_type, supply.market, supply.pool)
        price = self.scenario.price(supply.id)
        self.tally.bills[supply.id] = Bill(
            supply.market, kind.gpus, supply.instance_type, supply.zone, supply.reservation, price
        )
        return Row(
            supply=supply,
            gpus=kind.gpus,
            families=frozenset((kind.family, family(supply.instance_type))),
            list_price=price,
            boot=self.scenario.boot_s(supply.id),
            steps_at_s=[float(at_s) for at_s in steps.at_s],
            steps=[int(count) for count in steps.count],
            names=frozenset(word for word in (*words, supply.reservation) if word),
        )

    # ---- launches ---------------------------------------------------------------------------------------------------
    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        """Ids of 1..`count` new instances, or of those that the same `token` got there before. Raises Refusal."""
        row = self.rows.get(offering)
        if row is None or count < 1 or not 1 <= len(token) <= 64:
            raise Refusal("InvalidParameterValue", f"offering {offering!r}, count {count}, token {token!r}")
        if (offering, token) in self._granted:
            return self._granted[offering, token]
        room = min(count, self._quota_room(row), self._pool_room(row))
        if self.faults.active("partial", row.names):
            room = max(1, int(room * self.faults.factor("partial", row.names)))
        made = tuple(self._make(row, token) for _ in range(room))
        self._granted[offering, token] = made
        return made

    def _quota_room(self, row: Row) -> int:
        """Instances that the account's quotas leave. A family is a type's letters (``g``) or those with its number."""
        cut = self.faults.factor("quota", row.names)
        room = UNLIMITED
        for quota in self.scenario.quotas:
            if quota.market != row.supply.market or quota.family not in row.families:
                continue
            limit = int(quota.gpus * cut)
            alike = [r for r in self.rows.values() if r.supply.market == quota.market and quota.family in r.families]
            room = min(room, (limit - sum(r.gpus * len(r.machines) for r in alike)) // max(1, row.gpus))
            if room < 1:
                raise Refusal("VcpuLimitExceeded", f"the quota of {quota.family}/{quota.market} is {limit} GPUs")
        return room

    def _pool_room(self, row: Row) -> int:
        if self.faults.strikes("unknown_code", row.names):
            raise Refusal("CapacityFairyAsleep", "a code that nobody has seen before")
        if self._free(row):
            return UNLIMITED
        room = 0 if self.faults.strikes("dry", row.names) else self.count(row) - len(row.machines)
        if room < 1:
            code = "ReservationCapacityExceeded" if row.supply.reservation or self._reserved(row) else ICE
            raise Refusal(code, f"no capacity for {row.supply.instance_type} in {row.supply.zone} ({row.id})")
        return room

    def _free(self, row: Row) -> bool:
        return self.generous and not self._reserved(row) and row.open(self.timeline.now_s)

    @staticmethod
    def _reserved(row: Row) -> bool:
        return row.supply.market in RESERVED

    def count(self, row: Row) -> int:
        """Instances that the offering can hold in all, now."""
        now_s, end_s = self.timeline.now_s, row.supply.end_s
        if row.supply.market == "block" and end_s is not None and now_s >= end_s - BLOCK_ENDS_EARLY_S:
            return 0
        return int(row.base * self.faults.factor("capacity", row.names)) if row.open(now_s) else 0

    def _make(self, row: Row, token: str) -> str:
        now_s = self.timeline.now_s
        self._made += 1
        boot_s = row.boot.draw(self._boots) * self.faults.factor("boot_slow", row.names)
        slow = SLOW_NODE if self._slow.random() < self.scenario.nodes_slow_fraction else 1.0
        machine = Machine(
            instance=f"i-{self._made:05x}",
            row=row,
            token=token,
            launched_at_s=now_s,
            runs_at_s=now_s + min(RUNS_AFTER * boot_s, RUNS_AFTER_MAX_S),
            joins_at_s=math.inf if self.faults.strikes("no_join", row.names) else now_s + boot_s,
            slow=slow * self.faults.factor("node_slow", row.names),
        )
        self.machines[machine.instance] = machine
        row.machines.append(machine)
        self.tally.opened(machine.instance, row.id, now_s)
        if machine.joins_at_s < math.inf:
            self.timeline.at(machine.joins_at_s, lambda: self._joins(machine))
        if self._closing(row):
            self.notice(machine, row.supply.end_s - BLOCK_ENDS_EARLY_S)  # type: ignore[operator]
        return machine.instance

    def _joins(self, machine: Machine) -> None:
        if machine.stopped_at_s == math.inf:
            self.joined(machine)

    # ---- ends -------------------------------------------------------------------------------------------------------
    def terminate(self, instance: str) -> None:
        """Begin to give an instance back; a second call is a no-op. Raises Refusal for one that is not listed."""
        machine = self.machines.get(instance)
        if machine is None or self.timeline.now_s > machine.gone_at_s + FORGET_S:
            raise Refusal("InvalidInstanceID.NotFound", f"no instance {instance!r}")
        self.stop(machine, GIVEN_BACK)

    def stop(self, machine: Machine, why: str) -> None:
        """The instance ends now: it is paid for no longer, and its node is lost."""
        if machine.stopped_at_s < math.inf:
            return
        now_s = self.timeline.now_s
        machine.stopped_at_s, machine.gone_at_s, machine.why = now_s, now_s + SHUTDOWN_S, why
        self.lost(machine)
        self.tally.closed(machine.instance, now_s)
        self.timeline.at(machine.gone_at_s, lambda: machine.row.machines.remove(machine))
        self.timeline.at(machine.gone_at_s + FORGET_S, lambda: self._forget(machine))

    def _forget(self, machine: Machine) -> None:
        del self.machines[machine.instance]

    def notice(self, machine: Machine, deadline_at_s: float) -> None:
        """A reclaim notice: the instance ends at the deadline. A second one only shortens."""
        if machine.stopped_at_s < math.inf or deadline_at_s >= machine.reclaim_at_s:
            return
        now_s = self.timeline.now_s
        machine.noticed_at_s = min(machine.noticed_at_s, now_s)
        machine.reclaim_at_s = max(now_s, deadline_at_s)
        why = BLOCK_OVER if machine.row.supply.market == "block" else RECLAIMED
        self.timeline.at(machine.reclaim_at_s, lambda: self.stop(machine, why))

    # ---- what changes by itself -------------------------------------------------------------------------------------
    def _step(self, row: Row, index: int) -> None:
        """Take the offering's step number `index`, and wait for the next one."""
        row.base = row.steps[index]
        self.tally.declare(row.id, row.base, self.timeline.now_s)
        self._shrink(row)
        if index + 1 < len(row.steps):
            self.timeline.at(max(self.timeline.now_s, row.steps_at_s[index + 1]), lambda: self._step(row, index + 1))

    def _shrink(self, row: Row) -> None:
        """Give notice to the newest of those that no longer fit."""
        if self._free(row) or (row.supply.market == "block" and self._closing(row)):
            return
        staying = [machine for machine in row.machines if machine.stays]
        surplus = len(staying) - self.count(row)
        for machine in reversed(staying[len(staying) - surplus :] if surplus > 0 else []):
            self.notice(machine, self.timeline.now_s + row.supply.notice_s)

    def _closing(self, row: Row) -> bool:
        end_s = row.supply.end_s
        return row.supply.market == "block" and end_s is not None and self.timeline.now_s >= end_s - BLOCK_NOTICE_S

    def _calendar(self, row: Row) -> None:
        end_s = row.supply.end_s
        if row.supply.market != "block" or end_s is None:
            return
        self.timeline.at(max(0.0, end_s - BLOCK_NOTICE_S), lambda: self._warn(row, end_s - BLOCK_ENDS_EARLY_S))

    def _warn(self, row: Row, deadline_at_s: float) -> None:
        for machine in tuple(row.machines):
            self.notice(machine, deadline_at_s)

    def _price(self, row: Row) -> None:
        usd_per_h = row.list_price * self.faults.factor("price", row.names)
        if self.generous and not self._reserved(row):
            alike = [r for r in self.rows.values() if r.supply.instance_type == row.supply.instance_type]
            usd_per_h = min(r.list_price * self.faults.factor("price", r.names) for r in alike if not self._reserved(r))
        self.tally.price(row.id, usd_per_h, self.timeline.now_s)

    def price_usd_per_h(self, row: Row) -> float:
        """What an instance of the offering costs now."""
        return self.tally.bills[row.id].price_usd_per_h

    # ---- faults -----------------------------------------------------------------------------------------------------
    def _hit(self, fault: Fault) -> list[Row]:
        return [row for row in self.rows.values() if hits(fault, row.names)]

    def _resized(self, fault: Fault) -> None:
        for row in self._hit(fault):
            self._shrink(row)

    def _repriced(self, _: Fault) -> None:
        for row in self.rows.values():
            self._price(row)

    def _victims(self, fault: Fault) -> list[Machine]:
        alive = [m for row in self._hit(fault) for m in row.machines if m.stopped_at_s == math.inf]
        return [alive[index] for index in self.faults.some(fault, len(alive))]

    def _reclaim(self, fault: Fault) -> None:
        for machine in self._victims(fault):
            self.notice(machine, self.timeline.now_s + machine.row.supply.notice_s)

    def _kill(self, fault: Fault) -> None:
        for machine in self._victims(fault):
            self.stop(machine, KILLED)

    def _end_by_hand(self, fault: Fault) -> None:
        for machine in self._victims(fault):
            self.stop(machine, GIVEN_BACK)
