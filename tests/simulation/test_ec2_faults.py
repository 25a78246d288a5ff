"""Random faults on every call, through real boto3: nothing is launched or bought twice, lost, or asked for too often.

The acts and the learning are the controller's own; what is wanted and given back is decided by a few lines here, so
that a seed costs milliseconds. `$QM_EC2_SEEDS` seeds run in this process and `$QM_EC2_SOCKET_SEEDS` over a socket, few
of them by default.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoscaler.act import Act, Inline
from autoscaler.adapters.ec2.calls import Bucket as OwnBucket
from autoscaler.adapters.ec2.calls import Caller
from autoscaler.adapters.ec2.purchase import BlockForSale, Purchases
from autoscaler.core.beliefs import EMPTY, Beliefs
from autoscaler.core.events import Event, LaunchTried, Observed
from autoscaler.core.learn import learn
from autoscaler.core.lifecycle import InstanceState
from autoscaler.core.model import CloudView, Launch, Missing, Observation, Plan, Terminate
from autoscaler.ports import PortError, Throttled, Transient
from chaos.ec2_server import Fault, Region
from chaos.ec2_server.state import BlockOffering, Bucket, Pool
from serve_apps.wire import PlanMessage
from tests.ec2_rig import BIG, EAST, HUGE, WEST, A, B, Ec2Rig, Wire, clients, ec2, region

SEEDS = int(os.environ.get("QM_EC2_SEEDS", "14"))
SOCKET_SEEDS = int(os.environ.get("QM_EC2_SOCKET_SEEDS", "2"))
START_S = 1_000_000.0
TICK_S = 10.0
FAULTY_S = 240.0
HEALED_S = 300.0
BURST, PER_S = 12, 0.25  # tight enough to bind while everything fails
KINDS = ("error", "error_after", "lost_before", "lost_after", "hang", "duplicate", "html", "page", "garbled")
CODES = (
    ("InternalError", 500),
    ("Unavailable", 503),
    ("RequestLimitExceeded", 503),
    ("InsufficientInstanceCapacity", 500),
    ("VcpuLimitExceeded", 400),
    ("NobodyKnows", 400),
)
ACTIONS = ("RunInstances", "CreateFleet", "DescribeInstances", "TerminateInstances", "PurchaseCapacityBlock", "*")
BLOCK = BlockForSale(
    offering_id="cb-1", instance_type=HUGE, zone=A, count=1, start_at_s=2e6, end_at_s=2e6 + 86_400.0, fee_usd=900.0
)
LIVE = frozenset(set(InstanceState) - {InstanceState.TERMINATING, InstanceState.GONE})


class Quiet:
    """A serving side that no plan of these tests touches."""

    def publish(self, message: PlanMessage) -> None: ...


@dataclass
class Driver:
    """Wants a number of instances, and gives back what is too many or in doubt."""

    rig: Ec2Rig
    beliefs: Beliefs = EMPTY
    tried: dict[str, LaunchTried] = field(default_factory=dict)
    ticks: int = 0

    def record(self, event: Any, *, durable: bool = False) -> Any:
        if isinstance(event, LaunchTried):
            assert event.token not in self.tried
            self.tried[event.token] = event
        self.beliefs = learn(self.beliefs, event)
        return event

    def tick(self, wanted: int) -> None:
        self.ticks += 1
        now_s = self.rig.clock.now_s()
        cloud: CloudView | Missing
        try:
            cloud = self.rig.cloud.describe(now_s)
        except PortError as error:
            cloud = Missing(why=error.code)
        unseen = Missing(why="not in this test")
        seen: Event = Observed(at_s=now_s, observation=Observation(at_s=now_s, loads=(), serving=unseen, cloud=cloud))
        self.record(seen)
        act = Act(now_s, Quiet(), self.rig.cloud, self.record, Inline(), offerings=self.beliefs.offers)  # type: ignore[arg-type]
        message = PlanMessage(
            run_id="run",
            seq=self.ticks,
            published_at_s=now_s,
            stale_after_s=60.0,
            targets={},
            local_rules={},
            services=(),
        )
        act.carry_out(self._plan(wanted, now_s), message)

    def _plan(self, wanted: int, now_s: float) -> Plan:
        name = f"run/{self.ticks}"
        mine = [row for _, row in sorted(self.beliefs.instances.items()) if row.state in LIVE]
        coming = sum(intent.count for intent in self.beliefs.intents.values())
        missing = wanted - len(mine) - coming
        again = [
            row.instance_id
            for row in self.beliefs.instances.values()
            if row.state is InstanceState.TERMINATING and now_s - row.since_s > 60.0
        ]
        surplus = [row.instance_id for row in mine[wanted:] if row.state is not InstanceState.REQUESTED]
        open_ = [o for o in ("od-a", "od-b", "spot-a") if o in self.beliefs.offers and not self._cools(o, now_s)]
        launches = (
            (Launch(id=name, service="s", variant="v", count=missing, alternates=tuple(open_), reasons=()),)
            if missing > 0 and open_
            else ()
        )
        terminates = tuple(Terminate(id=f"{name}/{i}", instance_id=i, reasons=()) for i in (*surplus, *again))
        return Plan(
            id=name, at_s=now_s, demands=(), targets=(), launches=launches, drains=(), terminates=terminates,
            routes=(), shortfalls=(),
        )  # fmt: skip

    def _cools(self, offering: str, now_s: float) -> bool:
        known = self.beliefs.offerings.get(offering)
        return known is not None and now_s < known.cool_until_s


@dataclass
class Buyer:
    """Buys a Capacity Block now and then, and asks about each purchase until it is settled, as a new process."""

    caller: Caller
    folder: Path
    rig: Ec2Rig
    open: list[str] = field(default_factory=list)
    named: int = 0

    def wish(self) -> None:
        self.named += 1
        self.open.append(f"block-{self.named}")

    def tick(self) -> None:
        for name in tuple(self.open):
            try:
                Purchases(self.caller, self.folder, self.rig.clock.now_s).buy(name, BLOCK)
            except (Transient, Throttled):
                continue
            except PortError:
                pass  # refused, or certainly not made
            self.open.remove(name)

    def check(self) -> None:
        """A name was sent once and bought at most one block."""
        rows = [row.tags["qm:purchase"] for row in self.rig.region.reservations.values()]
        assert len(rows) == len(set(rows)), f"bought twice: {rows}"
        assert self.rig.calls("PurchaseCapacityBlock") <= self.named, "a purchase was sent again"


def troubled(rng: np.random.Generator) -> Region:
    """A region whose account throttles, whose pools are small, and whose listings lag."""
    pools = {Pool(BIG, A): int(rng.integers(0, 4)), Pool(BIG, B): int(rng.integers(1, 9)), Pool(BIG, A, "spot"): 2}
    return region(
        pools=pools,
        boot_s=float(rng.uniform(1.0, 60.0)),
        stopping_s=float(rng.uniform(1.0, 60.0)),
        calls={"RunInstances": Bucket(5.0, 0.5), "DescribeInstances": Bucket(20.0, 2.0)},
        blocks={"cb-1": BlockOffering("cb-1", HUGE, A, 1, BLOCK.start_at_s, BLOCK.end_at_s, 900.0)},
    )


def fault(rng: np.random.Generator) -> Fault:
    """What goes wrong with the next calls. Only calls that carry a token are delivered twice by this network."""
    code, status = CODES[int(rng.integers(len(CODES)))]
    kind: Any = KINDS[int(rng.integers(len(KINDS)))]
    times = int(rng.integers(1, 4))
    action = ACTIONS[int(rng.integers(len(ACTIONS)))]
    if kind == "duplicate" and action in ("*", "PurchaseCapacityBlock"):
        action = "RunInstances"
    return Fault(kind, action, times, code=code, status=status)


def check_calls(rig: Ec2Rig) -> None:
    """No more calls were sent to any region than the bucket holds."""
    since_s = rig.clock.now_s() - START_S
    for name, sent in rig.server.requests.items():
        assert sent <= BURST + PER_S * since_s, f"{sent} calls to {name} in {since_s:g} s"


def check_launches(driver: Driver, rig: Ec2Rig) -> None:
    """No intent got more than it asked for."""
    counts: dict[str, int] = {}
    for instance in rig.region.instances.values():
        token = instance.tags["qm:token"]
        counts[token] = counts.get(token, 0) + 1
    twice = {token for token, count in counts.items() if count > driver.tried[token].count}
    assert not twice, f"launched twice: {sorted(twice)}"


def check_known(driver: Driver, rig: Ec2Rig) -> None:
    """The controller knows every instance there is, and holds none for alive that is not."""
    now_s = rig.clock.now_s()
    live = {each.instance_id for each in rig.region.live(now_s)}
    known = {key for key, row in driver.beliefs.instances.items() if row.state is not InstanceState.GONE}
    assert live <= known, f"unaccounted: {sorted(live - known)}"
    assert {key for key in live if rig.region.instances[key].state(now_s) != "shutting-down"} == {
        key for key, row in driver.beliefs.instances.items() if row.state in LIVE
    }


def run(seed: int, wire: Wire = "inproc") -> None:
    rng = np.random.default_rng([seed, 8])
    limits: dict[str, Any] = {"calls_burst": BURST, "calls_per_s": PER_S}
    with tempfile.TemporaryDirectory() as folder, ec2(troubled(rng), region(WEST), wire=wire, **limits) as rig:
        rig.server.lag_s = lambda _: float(rng.uniform(0.0, 20.0))
        driver = Driver(rig)
        caller = Caller(clients(EAST, wire), OwnBucket(1000.0, 1.0, rig.clock.now_s))
        buyer = Buyer(caller, Path(folder), rig)
        try:
            while rig.clock.now_s() < START_S + FAULTY_S:
                if rng.random() < 0.7:
                    rig.server.faults.append(fault(rng))
                if rng.random() < 0.1:
                    buyer.wish()
                driver.tick(int(rng.integers(0, 7)))
                buyer.tick()
                check_calls(rig)
                rig.clock.advance(TICK_S)
            rig.server.faults.clear()
            rig.server.lag_s = lambda each: each.lag_s
            healed_at_s = rig.clock.now_s()
            while rig.clock.now_s() <= healed_at_s + HEALED_S:
                driver.tick(3)
                check_calls(rig)
                rig.clock.advance(TICK_S)
            buyer.check()
            check_launches(driver, rig)
            check_known(driver, rig)
        finally:
            caller.close()


def run_all(seeds: range, wire: Wire) -> None:
    for seed in seeds:
        try:
            run(seed, wire)
        except AssertionError as error:
            raise AssertionError(f"seed {seed} ({wire}): {error}") from error


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_nothing_is_launched_twice_bought_twice_lost_or_asked_for_in_a_storm(first: int) -> None:
    run_all(range(first, min(first + 20, SEEDS)), "inproc")


def test_neither_is_it_over_a_socket() -> None:
    run_all(range(SOCKET_SEEDS), "socket")
