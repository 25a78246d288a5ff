"""Killed at any step, or superseded while it stands still there: no intent is launched twice, no instance is lost.

A step is one request to S3 or EC2, before and after it takes effect. The journal, the ledger, the acts, the learning
and both adapters are the controller's own, over real boto3; what is wanted is decided by a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from autoscaler.act import Act, Inline
from autoscaler.adapters.ec2 import Ec2Cloud
from autoscaler.adapters.s3_journal import S3Journal
from autoscaler.adapters.s3_lease import TTL_S, Lease
from autoscaler.core.events import LaunchTried, Observed, Opened, Planned
from autoscaler.core.lifecycle import InstanceState
from autoscaler.core.model import CloudView, Launch, Missing, Observation, Plan, Terminate
from autoscaler.ledger import Ledger
from autoscaler.ports import Misconfigured, PortError, Reread, Superseded
from chaos.ec2_server.state import Pool
from serve_apps.wire import PlanMessage
from tests.ec2_rig import BIG, A, B, Ec2Rig, clients, ec2, region
from tests.s3_fake import FakeS3

TICK_S = 10.0
HEALING_S = 300.0
WANTED = 3
LIVE = frozenset(set(InstanceState) - {InstanceState.TERMINATING, InstanceState.GONE})
TEMPLATE = {
    "qm-node": {"ImageId": "ami-1", "CapacityReservationSpecification": {"CapacityReservationPreference": "none"}}
}
IN_FLIGHT = ("RunInstances before", "CreateFleet before")  # sent while it still might


class Killed(BaseException):
    """kill -9: nothing of the process runs after it."""


class Quiet:
    """A serving side that no plan of these tests touches."""

    def publish(self, message: PlanMessage) -> None: ...


@dataclass
class Steps:
    """Counts the requests of everybody; at number `at` `then` happens, once. `here` is the request it happened in."""

    at: int = 0
    then: Callable[[], None] = lambda: None
    count: int = 0
    here: str = ""

    def step(self, name: str, done: bool) -> None:
        self.count += 1
        if self.count == self.at:
            self.here = f"{name} {'after' if done else 'before'}"
            self.then()


@dataclass
class World:
    """One account and one bucket, in which controllers come and go."""

    rig: Ec2Rig
    s3: FakeS3
    steps: Steps = field(default_factory=Steps)
    tried: dict[str, int] = field(default_factory=dict)
    clouds: list[Ec2Cloud] = field(default_factory=list)

    def __post_init__(self) -> None:
        server, real = self.rig.server, self.rig.server.handle

        def handle(request: Any) -> Any:
            name = _action(request)
            self.steps.step(name, False)
            reply = real(request)
            self.steps.step(name, True)
            return reply

        server.handle = handle  # type: ignore[method-assign]
        self.s3.trouble = lambda method, key, done: self.steps.step(f"{method} {key}", done)

    def settled(self) -> None:
        """What must hold when all is over."""
        counts: dict[str, int] = {}
        for instance in self.rig.region.instances.values():
            token = instance.tags["qm:token"]
            counts[token] = counts.get(token, 0) + 1
        assert all(count <= self.tried[token] for token, count in counts.items())
        assert len(list(self.alive())) == WANTED

    def alive(self) -> Iterator[str]:
        """Instances that neither end nor have ended."""
        now_s = self.rig.clock.now_s()
        return (key for key, each in self.rig.region.instances.items() if each.state(now_s) in ("pending", "running"))


def _action(request: Any) -> str:
    body = request.body.decode() if isinstance(request.body, bytes) else str(request.body)
    return next((part[7:] for part in body.split("&") if part.startswith("Action=")), "other")


class Controller:
    """One process: journal, ledger and adapters of its own."""

    def __init__(self, world: World, name: str) -> None:
        self.world, clock = world, world.rig.clock
        lease = Lease(world.s3.store(), clock.now_s, name)
        self.journal = S3Journal(lease.store, lease)
        self.cloud = Ec2Cloud(world.rig.cloud._config, clock.now_s, clients=clients)
        world.clouds.append(self.cloud)
        self.cloud.hold(self.journal)
        self.ticks = 0
        self.begin()

    def begin(self) -> None:
        self.ledger = Ledger(self.journal, lambda *_: None)
        self.ledger.resume()
        self.run_id = f"{self.journal.epoch}-{self.ledger.seq}"
        at_s = self.world.rig.clock.now_s()
        self.ledger.record(Opened(at_s=at_s, run_id=self.run_id, schema_version=1, versions=()), durable=True)

    def record(self, event: Any, *, durable: bool = False) -> Any:
        if isinstance(event, LaunchTried):
            assert event.token not in self.world.tried
            self.world.tried[event.token] = event.count
        return self.ledger.record(event, durable=durable)

    def tick(self) -> None:
        self.ticks += 1
        now_s = self.world.rig.clock.now_s()
        cloud: CloudView | Missing
        try:
            cloud = self.cloud.describe(now_s)
        except PortError as error:
            cloud = Missing(why=error.code)
        unseen = Missing(why="not in this test")
        self.record(Observed(at_s=now_s, observation=Observation(at_s=now_s, loads=(), serving=unseen, cloud=cloud)))
        act = Act(now_s, Quiet(), self.cloud, self.record, Inline(), offerings=self.ledger.beliefs.offers)  # type: ignore[arg-type]
        message = PlanMessage(
            run_id="r", seq=1, published_at_s=now_s, stale_after_s=60.0, targets={}, local_rules={}, services=()
        )
        planned = self.record(Planned(at_s=now_s, plan=self._plan(now_s)), durable=True)
        act.carry_out(planned.plan, message)

    def run(self, for_s: float, tick_s: float = TICK_S) -> None:
        for _ in range(round(for_s / tick_s)):
            try:
                self.tick()
            except Reread:
                self.begin()
            self.world.rig.clock.advance(tick_s)

    def _plan(self, now_s: float) -> Plan:
        name, beliefs = f"{self.run_id}/{self.ticks}", self.ledger.beliefs
        mine = [row for _, row in sorted(beliefs.instances.items()) if row.state in LIVE]
        missing = WANTED - len(mine) - sum(intent.count for intent in beliefs.intents.values())
        cool = {key for key, row in beliefs.offerings.items() if now_s < row.cool_until_s}
        open_ = tuple(key for key in ("od-a", "od-b", "spot-a") if key in beliefs.offers and key not in cool)
        launch = Launch(id=name, service="s", variant="v", count=missing, alternates=open_, reasons=())
        surplus = [row.instance_id for row in mine[WANTED:] if row.state is not InstanceState.REQUESTED]
        return Plan(
            id=name, at_s=now_s, demands=(), targets=(), launches=(launch,) if missing > 0 and open_ else (), drains=(),
            terminates=tuple(Terminate(id=f"{name}/{key}", instance_id=key, reasons=()) for key in surplus),
            routes=(), shortfalls=(),
        )  # fmt: skip

    def accounts_for(self, instances: Iterator[str]) -> None:
        known = {key for key, row in self.ledger.beliefs.instances.items() if row.state is not InstanceState.GONE}
        assert set(instances) <= known


@contextmanager
def world() -> Iterator[World]:
    pools = {Pool(BIG, A): 1, Pool(BIG, B): 1, Pool(BIG, A, "spot"): 4}
    with ec2(region(pools=pools, templates=TEMPLATE, boot_s=15.0), launch_template="qm-node") as rig:
        s3 = FakeS3(rig.clock.now_s)
        made = World(rig, s3)
        try:
            yield made
        finally:
            for cloud in made.clouds:
                cloud.close()


def taken_over(world: World, name: str) -> Controller:
    """The next controller, which waits until it may."""
    for _ in range(12):
        with suppress(Misconfigured):
            return Controller(world, name)
        world.rig.clock.advance(TICK_S)
    raise AssertionError("nobody may write")


def steps_of_a_launch() -> int:
    """How many steps a controller's first two ticks take."""
    with world() as made:
        Controller(made, "a").run(2 * TICK_S)
        return made.steps.count


STEPS = steps_of_a_launch()


def kill() -> None:
    raise Killed


@pytest.mark.parametrize("block", range(4))
def test_killed_at_any_step_no_intent_is_launched_twice_and_nothing_is_lost(block: int) -> None:
    for at in range(1 + block, STEPS + 1, 4):
        with world() as made:
            made.steps = Steps(at, kill)
            with pytest.raises(Killed):
                Controller(made, "a").run(2 * TICK_S)
            new = taken_over(made, "b")
            new.run(HEALING_S, 30.0)
            made.settled()
            new.accounts_for(made.alive())


@pytest.mark.parametrize("block", range(4))
def test_superseded_while_it_stands_still_at_any_step_it_does_no_more(block: int) -> None:
    for at in range(1 + block, STEPS + 1, 4):
        with world() as made:
            news: list[Controller] = []

            def stand_still(made: World = made, news: list[Controller] = news) -> None:
                made.rig.clock.advance(TTL_S + 1.0)
                news.append(taken_over(made, "b"))
                news[0].run(2 * TICK_S)

            made.steps = Steps(at, stand_still)
            old: Controller | None = None
            with suppress(Superseded, Misconfigured, Reread):
                old = Controller(made, "a")
                old.run(2 * TICK_S)
            (new,) = news
            taken_at_s = made.rig.clock.now_s()
            if old is not None and old.journal.epoch < new.journal.epoch:
                for _ in range(2):
                    with pytest.raises(Superseded):
                        old.tick()
            by_old = [each for each in made.rig.region.instances.values() if each.tags["qm:epoch"] == "1"]
            late = [each for each in by_old if each.launched_at_s >= taken_at_s]
            assert not late or made.steps.here in IN_FLIGHT, (at, made.steps.here)
            new.run(HEALING_S, 30.0)
            made.settled()
            new.accounts_for(made.alive())
