"""Who decides in a simulated world: the loop itself, unchanged, or a controller under test behind the desk.

May not read a clock. A controller that raises, answers nonsense or never returns is a counted violation; the world
goes on with its last valid answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from autoscaler.act import Inline
from autoscaler.adapters.journal import FileJournal, MemoryJournal
from autoscaler.core.beliefs import Beliefs
from autoscaler.core.capacity import Mix
from autoscaler.core.events import CheckFailed, Event, Forecast
from autoscaler.core.publish import slack_s
from autoscaler.loop import Controller
from autoscaler.ports import Journal, PortError
from serve_apps.timing import Timing
from serve_apps.wire import app_name

from .desk import Answer, Desk, Nonsense, Waiting
from .guard import Ended, Foreign, Raised, TimedOut
from .trouble import Crashed, Fragile, Policies
from .world import World

QUOTED = 300  # characters of a stranger's error


class Driver(Protocol):
    """Decides once a tick."""

    def tick(self) -> None:
        """Look at the world and change it. May not raise."""
        ...

    def forecasts(self) -> Mapping[str, Forecast]:
        """What it expects, by service, if it says so."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


# ---- the loop -------------------------------------------------------------------------------------------------------
class Loop:
    """The controller's own loop over the world's ports. While a fault keeps it down nothing runs; then it restarts
    from its journal, as it does at the tick after one in which it crashed. `kind` builds it.
    """

    def __init__(self, world: World, journal: Journal, kind: Callable[..., Controller] = Controller) -> None:
        self._world, self._journal, self._kind = world, Fragile(journal, world.faults), kind
        self._controller: Controller | None = None
        self._second: Controller | None = None
        world.faults.on("journal_torn", lambda _: self._power_fails())

    def event(self, event: Event, beliefs: Beliefs) -> None:  # noqa: ARG002
        """loop.Telemetry: a plan that broke an invariant is a violation."""
        if isinstance(event, CheckFailed):
            for text in event.violations:
                self._world.violate("check_failed", text)

    def tick(self) -> None:
        """One tick of the loop, and of a second one while a fault says so."""
        world = self._world
        if world.faults.active("controller_down"):
            self._controller = None
        else:
            self._controller = self._controller or self.start(self._journal)
            self._run(self._controller)
        if world.faults.active("second_controller"):
            self._second = self._second or self.start(MemoryJournal())
            self._run(self._second)
        else:
            self._second = None
        figures = world.metrics.figures
        world.serving.follow_local_rule({key: row[3] + row[4] for key, row in figures.items()})

    def _run(self, controller: Controller) -> None:
        try:
            controller.tick()
        except Crashed:
            self._controller = None
        except PortError as error:
            self._world.violate("tick_failed", f"{error.code}: {error}")
        except Exception as defect:  # the run must say it, not end with it
            self._world.violate("controller_raised", _quoted(defect))

    def _power_fails(self) -> None:
        self._controller = None
        self._journal.tear()

    def start(self, journal: Journal) -> Controller:
        """A controller that has not ticked yet."""
        world = self._world
        return self._kind(
            clock=world.clock,
            metrics=world.metrics,
            serving=world.serving,
            cloud=world.cloud,
            journal=journal,
            policy_source=Policies(world.scenario, world.faults),
            executor=Inline(),
            telemetry=self,
            tick_s=world.scenario.tick_s,
        )

    def forecasts(self) -> Mapping[str, Forecast]:
        """Those in its beliefs."""
        return self._controller.ledger.beliefs.forecasts if self._controller is not None else {}

    def close(self) -> None:
        """Give the journal's folder free."""
        if isinstance(self._journal.kept, FileJournal):
            self._journal.kept.close()


# ---- controllers under test -----------------------------------------------------------------------------------------
class Stranger:
    """A controller under test: a factory of our own, or a stranger's. `facts` is the scenario as it is given it.

    Raises what its factory raises.
    """

    def __init__(self, world: World, controller: Callable[[Any], Any] | Foreign, facts: dict[str, Any]) -> None:
        self._world = world
        self._desk = Desk(
            world.pools,
            world.cloud,
            world.cluster,
            world.metrics,
            world.gateways,
            world.timeline,
            _waiting(world, facts),
        )
        for row in facts["shapes"]:
            app = world.cluster.apps[app_name(row["service"], row["variant"])]
            world.gateways.carry(app, row["capacity_rps"], row["max_batch"])
        self._answer = Answer()
        self._foreign = controller if isinstance(controller, Foreign) else None
        if isinstance(controller, Foreign):
            controller.made(facts)
        self._controller = controller if isinstance(controller, Foreign) else controller(facts)

    def tick(self) -> None:
        """Ask, check, carry out."""
        if not self._world.faults.active("controller_down") and not (self._foreign and self._foreign.gone):
            self._ask()
        self._desk.carry_out(self._answer)

    def _ask(self) -> None:
        now_s, view = self._world.timeline.now_s, self._desk.view()
        try:
            self._answer = self._desk.read(self._controller.decide(now_s, view))
        except TimedOut as error:
            self._world.violate("controller_hung", f"{error}; its last valid answer stays in force")
        except Ended as error:
            self._world.violate("controller_ended", f"{error}; its last valid answer stays in force")
        except Nonsense as error:
            self._world.violate("controller_nonsense", str(error))
        except Raised as error:
            self._world.violate("controller_raised", str(error)[:QUOTED])
        except Exception as error:
            self._world.violate("controller_raised", _quoted(error))

    def forecasts(self) -> Mapping[str, Forecast]:
        """It is not asked for any."""
        return {}

    def close(self) -> None:
        """Let its process end."""
        if self._foreign is not None and not self._foreign.gone:
            self._foreign.close()


def _waiting(world: World, facts: dict[str, Any]) -> dict[str, Waiting]:
    """The gateway's rules for every service, from the same figures that the loop's plans would have."""
    rules = {}
    for service, entry in world.entries.items():
        slacks = [math.inf]
        for row in facts["shapes"]:
            if row["service"] == service:
                mix = Mix(input_tokens=row["input_tokens"], output_tokens=row["output_tokens"])
                slacks.append(slack_s(entry.slo, Timing(**row["timing"]), mix, row["max_batch"]))
        rules[service] = Waiting(world.waits_s[service], min(slacks), "shed" not in entry.sacrifice)
    return rules


def _quoted(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:QUOTED]
