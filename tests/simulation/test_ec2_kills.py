"""A real process with the whole loop, its journal on disk and boto3 on a socket, killed by SIGKILL in a launch.

At each step of it, also while EC2 is answering; the next process reads what the dead one left. And two processes at
once. `test_ec2_crashes` goes through every single request, with a journal in S3, but only pretends to be killed.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from boto3.session import Session
from botocore.config import Config

from autoscaler.act import Pool as Threads
from autoscaler.adapters.ec2 import Ec2Cloud, Ec2Config, OfferConfig
from autoscaler.adapters.ec2.calls import READ_ATTEMPTS, Clients
from autoscaler.adapters.journal import FileJournal, read_all
from autoscaler.core.beliefs import Beliefs
from autoscaler.core.events import Event, LaunchGranted, LaunchTried, Record
from autoscaler.core.learn import fold
from autoscaler.core.lifecycle import InstanceState
from autoscaler.loop import Controller
from autoscaler.ports import Misconfigured
from chaos.ec2_server import Account, Ec2Server
from chaos.ec2_server.server import Reply
from chaos.ec2_server.state import Pool
from policies.model import PolicySet
from tests.contract.test_journal_contract import forked
from tests.ec2_rig import EAST, A, B, door
from tests.ec2_scene import SMALL, Machine, hidden, place
from tests.fakes import FakeMetrics, FakeServing
from tests.scene import CHAT, TICK_S, Fixed, service, shapes_of, unit

WANTED = 3
TICKS = 36
PATIENCE_S = 120.0
CALLS = (b"Action=RunInstances", b"Action=CreateFleet")
POLICY = PolicySet(units=(unit(service(min_replicas=WANTED, max_replicas=WANTED)),))
CHEAP, DEAR = place("cheap"), place("dear", B, price_usd_per_h=2.0)
WAYS = {"RunInstances": (CHEAP,), "CreateFleet": (CHEAP, DEAR)}
POOLS = {"RunInstances": {Pool(SMALL, A): 9}, "CreateFleet": {Pool(SMALL, A): 1, Pool(SMALL, B): 9}}
Step = tuple[str, Literal["before", "after"]]
STEPS: dict[str, tuple[Step, str]] = {  # with the kind of the last event that the dead one left
    "before the plan is journalled": (("planned", "before"), "forecasted"),
    "before the intent is journalled": (("launch_tried", "before"), "acted"),
    "after the intent, before the call": (("launch_tried", "after"), "launch_tried"),
    "during the call, which gets lost": (("the call", "before"), "launch_tried"),
    "during the call, which is carried out": (("the call", "after"), "launch_tried"),
    "after the call, before the grant is journalled": (("launch_granted", "before"), "launch_tried"),
    "after the grant": (("launch_granted", "after"), "launch_granted"),
}


class SharedClock:
    """One time for all processes: whoever ticks moves it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)
        self._write(1_000_000.0)

    def now_s(self) -> float:
        (at_s,) = struct.unpack("d", self._memory[:8])
        return float(at_s)

    def advance(self, by_s: float) -> None:
        self._write(self.now_s() + by_s)

    def _write(self, at_s: float) -> None:
        self._memory[:8] = struct.pack("d", at_s)


@cache
def clients() -> Clients:
    """Used by the controllers' processes alone: connections may not be shared with this one."""

    def made(attempts: int) -> Any:
        config = Config(retries={"mode": "standard", "total_max_attempts": attempts}, read_timeout=60.0, proxies={})
        session = Session(aws_access_key_id="test", aws_secret_access_key="test")
        return session.client("ec2", region_name=EAST, config=config, endpoint_url=door().url)

    return Clients(made(READ_ATTEMPTS), made(1))


class DeadlyJournal(FileJournal):
    """Its process dies at one event, before or after that is on disk."""

    at: Step = ("", "before")

    def append(self, event: Event, *, durable: bool) -> Record:
        if self.at == (event.kind, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        record = super().append(event, durable=durable)
        if self.at == (event.kind, "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return record


@dataclass(frozen=True)
class Listed:
    """What FakeServing wants of a cloud, from the adapter's listings."""

    cloud: Ec2Cloud
    clock: SharedClock
    offerings: dict[str, OfferConfig]

    @property
    def supply(self) -> Listed:
        return self

    def settle(self) -> None: ...

    @property
    def machines(self) -> dict[str, Machine]:
        rows = self.cloud.describe(self.clock.now_s()).instances
        return {row.instance_id: Machine(row.instance_id, row.offering, row.state, row.launched_at_s) for row in rows}


@dataclass
class World:
    """An account behind a socket, a folder for the journal, and the processes that come and go. `strike(pid)`
    happens to the next launch call, and says whether that is carried out.
    """

    way: str
    folder: Path
    clock: SharedClock = field(default_factory=SharedClock)
    strike: Callable[[int], bool] | None = None
    struck: threading.Event = field(default_factory=threading.Event)
    pid: int = 0
    _forking: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.region = hidden(POOLS[self.way])
        server = Ec2Server(Account({EAST: self.region}), self.clock.now_s)
        real = server.handle

        def handle(request: Any) -> Reply:
            body = request.body if isinstance(request.body, bytes) else request.body.encode()
            if self.strike is None or not any(call in body for call in CALLS):
                return real(request)
            strike, self.strike = self.strike, None
            with self._forking:  # until it is known who asks
                pid = self.pid
            done = strike(pid)
            return real(request) if done else Reply(0, b"", "lost")

        server.handle = handle  # type: ignore[method-assign]
        door().core = server

    def begin(self, at: Step = ("", "before")) -> int:
        """A controller's process; the end of a pipe from which its last words come."""
        with self._forking:
            self.pid, hears = forked(lambda tells: self._control(at, tells))
        return hears

    def ended(self, hears: int) -> str:
        """The last words of a process, empty when it was killed."""
        with os.fdopen(hears) as words:
            return words.read()

    def _control(self, at: Step, tells: int) -> None:
        said = "done"
        try:
            journal = DeadlyJournal(self.folder)
            journal.at = at
            controller = self._controller(journal)
            for _ in range(TICKS):
                controller.tick()
                self.clock.advance(TICK_S)
        except Misconfigured as error:
            said = f"refused: {error}"
        except Exception as error:
            said = f"defect: {error!r}"
        os.write(tells, said.encode())

    def _controller(self, journal: FileJournal) -> Controller:
        offers = WAYS[self.way]
        config = Ec2Config(cluster="test", region=EAST, launch_template="nodes", offerings=offers)
        cloud = Ec2Cloud(config, self.clock.now_s, clients=lambda _: clients())
        cloud.hold(journal)
        fleet: Any = Listed(cloud, self.clock, {row.offering: row for row in offers})
        clock: Any = self.clock
        metrics = FakeMetrics()
        metrics.set(CHAT, 0.5, input_tokens=500.0, output_tokens=100.0)
        return Controller(
            clock=self.clock,
            metrics=metrics,
            serving=FakeServing(fleet, clock, shapes_of(POLICY)),
            cloud=cloud,
            journal=journal,
            policy_source=Fixed(POLICY),
            executor=Threads(4, PATIENCE_S),
            tick_s=TICK_S,
        )

    def events(self) -> list[Event]:
        return [record.event for record in read_all(self.folder)]

    def check(self) -> None:
        """Nothing was bought twice or beyond the need, nothing is lost, and the need is met."""
        events = self.events()
        tried = [event for event in events if isinstance(event, LaunchTried)]
        asked = {event.token: event.count for event in tried}
        assert len(asked) == len(tried), "an intent was sent twice"
        bought = Counter(row.tags["qm:token"] for row in self.region.instances.values())
        assert all(count <= asked[token] for token, count in bought.items()), "launched twice"
        assert bought.total() == WANTED, bought
        beliefs: Beliefs = fold(events)
        alive = {key for key, row in beliefs.instances.items() if row.state is InstanceState.JOINED}
        assert alive == set(self.region.instances)
        assert not beliefs.intents


@pytest.fixture(params=list(WAYS))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    clients()  # here, because it takes long
    made = World(request.param, tmp_path)
    yield made
    made.strike = None


@pytest.mark.parametrize("name", list(STEPS))
def test_killed_at_any_step_of_a_launch_it_buys_nothing_twice_and_loses_nothing(world: World, name: str) -> None:
    at, last = STEPS[name]

    def killed(pid: int) -> bool:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # nothing of it runs any more
        return at[1] == "after"

    world.strike = killed if at[0] == "the call" else None
    assert world.ended(world.begin(at)) == ""
    _, status = os.waitpid(world.pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert world.events()[-1].kind == last
    assert world.ended(world.begin()) == "done"
    os.waitpid(world.pid, 0)
    world.check()


def test_a_second_process_is_kept_out_while_the_first_stands_still_in_a_call(world: World) -> None:
    go_on = threading.Event()

    def stand_still(pid: int) -> bool:
        os.kill(pid, signal.SIGSTOP)
        world.struck.set()
        return go_on.wait(PATIENCE_S)

    world.strike = stand_still
    hears = world.begin()
    first = world.pid
    assert world.struck.wait(PATIENCE_S)
    seen, second = len(world.region.log), world.begin()
    assert world.ended(second).startswith(f"refused: {world.folder}: another controller (process {first} on ")
    os.waitpid(world.pid, 0)
    assert len(world.region.log) == seen, "it asked EC2 for nothing"
    go_on.set()
    os.kill(first, signal.SIGCONT)
    assert world.ended(hears) == "done"
    os.waitpid(first, 0)
    assert [event.kind for event in world.events()].count("opened") == 1
    assert any(isinstance(event, LaunchGranted) for event in world.events())
    world.check()
