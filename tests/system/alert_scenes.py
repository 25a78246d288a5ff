"""Runs of the loop, one made for each alert over fakes and shipped scenarios, as what a Prometheus would have scraped.

Time begins at 1,000 s, so that promtool's clock and the scene's agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from autoscaler.adapters.journal import read_all
from autoscaler.adapters.telemetry import PrometheusTelemetry
from autoscaler.core.events import CheckFailed, Opened, Planned
from autoscaler.core.learn import EMPTY, learn
from autoscaler.core.model import CloudView
from autoscaler.ports import Broken, Transient
from chaos.scenario import load_scenario
from chaos.world import simulate
from policies.model import PolicySet
from tests.fakes import FakeClock
from tests.repo.test_metric_names import rules, used
from tests.scene import CHAT, TICK_S, Scene, offering, service, unit

START_S = 1000.0
INSTANTS = ("_at", "_until")
OTHER = "support/other"


@dataclass
class Tape:
    """A scene with its scrapes, one a tick."""

    scene: Scene
    telemetry: PrometheusTelemetry = field(default_factory=PrometheusTelemetry)
    scrapes: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        ledger = self.scene.controller.ledger
        self.telemetry.seq = lambda: ledger.seq
        self.scene.controller.telemetry, ledger.on_event = self.telemetry, self.telemetry.event

    def play(self, minutes: float, before: Callable[[], None] = lambda: None, *, ticks: bool = True) -> Tape:
        """So many minutes of scrapes; `before` each tick something happens, or nothing ticks at all."""
        for _ in range(round(minutes * 60.0 / TICK_S)):
            before()
            if ticks:
                self.scene.controller.tick()
            self.scrapes.append(scraped(self.telemetry))
            self.scene.clock.advance(TICK_S)
        return self

    def series(self) -> list[dict[str, str]]:
        """What a Prometheus would have seen."""
        return as_series(self.scrapes, START_S, TICK_S)


def scraped(telemetry: PrometheusTelemetry, begun_s: float = 0.0) -> dict[str, float]:
    """Every sample by its name and labels, instants counted from `begun_s`."""
    rows: dict[str, float] = {}
    for family in telemetry.registry.collect():
        for sample in family.samples:
            labels = ",".join(f'{name}="{text}"' for name, text in sorted(sample.labels.items()))
            since_s = begun_s if sample.name.endswith(INSTANTS) else 0.0
            rows[f"{sample.name}{{{labels}}}"] = max(0.0, sample.value - since_s)
    return rows


def as_series(scrapes: list[dict[str, float]], first_s: float, every_s: float) -> list[dict[str, str]]:
    """promtool's input_series, of what rules ask for: one value a scrape since time 0, `_` where there was none."""
    asked = {name for kind in ("record", "alert") for rule in rules(kind) for name in used(rule["expr"])}
    names = sorted({name for scrape in scrapes for name in scrape if name.partition("{")[0] in asked})
    blank = ["_"] * round(first_s / every_s)
    return [
        {"series": name, "values": " ".join(blank + [f"{s[name]:.17g}" if name in s else "_" for s in scrapes])}
        for name in names
    ]


def simulated(name: str, folder: Path, *overrides: str) -> list[dict[str, str]]:
    """What a Prometheus would have seen of our controller in a shipped scenario, from its journal."""
    simulate(load_scenario(name, overrides), "ours", 1, journal=folder)
    telemetry, beliefs, begun_s = PrometheusTelemetry(), EMPTY, 0.0
    scrapes = []
    for record in read_all(folder):
        beliefs = learn(beliefs, record.event)
        telemetry.event(record.event, beliefs)
        if isinstance(record.event, Planned):
            begun_s = begun_s or record.event.at_s
            scrapes.append(scraped(telemetry, begun_s - START_S))
    return as_series(scrapes, START_S, TICK_S)


def tape(price: float = 1.0, market: str = "on_demand", **limits: float) -> Tape:
    """One service that keeps two replicas, another one beside it in a unit of these limits, and one pool."""
    made = Scene(
        units=[unit(service("chat", min_replicas=2), service("other")).model_copy(update=limits)],
        offerings=[offering("pool", price=price, market=market)],
        clock=FakeClock(START_S),
    )
    made.load(CHAT, 0.5)
    made.load(OTHER, 0.2)
    return Tape(made)


def calm() -> Tape:
    return tape().play(45.0)


def short() -> Tape:
    made = tape().play(15.0)
    made.scene.cloud.set_supply("pool", 3)
    made.scene.load(CHAT, 9.0)
    return made.play(20.0)


def block_ends() -> Tape:
    """The block under all replicas ends half an hour later, and nothing else is for sale."""
    made = tape(market="block").play(15.0)
    cloud, ends_at_s = made.scene.cloud, made.scene.clock.at_s + 1800.0
    listed = cloud.describe

    def ending(now_s: float) -> CloudView:
        view = listed(now_s)
        return replace(view, offerings=tuple(replace(row, ends_at_s=ends_at_s) for row in view.offerings))

    cloud.describe = ending  # type: ignore[method-assign]
    return made.play(28.0)


def blind() -> Tape:
    made = tape().play(15.0)
    return made.play(15.0, lambda: made.scene.cloud.failures.append(Transient("no answer")))


def one_blind() -> Tape:
    made = tape().play(15.0)
    made.scene.metrics.set_missing(CHAT)
    return made.play(15.0)


def never_join() -> Tape:
    """Every new instance ends soon after its start."""
    made = tape().play(15.0)
    made.scene.load(CHAT, 9.0)
    cloud = made.scene.cloud

    def end() -> None:
        for machine in cloud.supply.machines.values():
            if machine.launched_at_s > START_S + 600.0 and machine.state in ("pending", "running"):
                cloud.supply.ended(machine.instance_id, made.scene.clock.at_s, "Client.InstanceInitiatedShutdown")

    return made.play(15.0, end)


def unused() -> Tape:
    made = tape(market="odcr").play(15.0)
    made.scene.source.set(PolicySet(units=(unit(service("chat", max_replicas=1), service("other")),)))
    return made.play(45.0)


def poor() -> Tape:
    """The unit may spend three dollars an hour, and needs more."""
    made = tape(budget_usd_per_h=3.0).play(15.0)
    made.scene.load(CHAT, 9.0)
    return made.play(15.0)


def month() -> Tape:
    return tape(price=100.0, budget_usd_per_month=160.0).play(45.0)


def refused() -> Tape:
    made = tape().play(15.0)
    made.scene.source.poll = lambda _: Broken(problems=("chat.yaml:3: goal: is no goal",))  # type: ignore[method-assign,assignment,return-value]
    return made.play(15.0)


def broken() -> Tape:
    made = tape().play(15.0)
    failed = CheckFailed(at_s=made.scene.clock.at_s, plan_id="p", violations=("negative target",))
    made.telemetry.event(failed, made.scene.beliefs)
    return made.play(5.0)


def burning() -> Tape:
    """Nine of ten requests miss their limits."""
    made = tape().play(15.0)
    made.scene.load(CHAT, 0.5, met=0.1)
    return made.play(70.0)


def smouldering() -> Tape:
    """A fifth of all requests miss their limits, four times what the policy allows."""
    made = tape().play(15.0)
    made.scene.load(CHAT, 0.5, met=0.8)
    return made.play(180.0)


def defective() -> Tape:
    """Learning trips over every listing."""
    made = tape().play(15.0)
    ledger = made.scene.controller.ledger

    def trip() -> None:
        ledger.beliefs = replace(ledger.beliefs, defect="defect: KeyError: 'p3'")
        made.telemetry.event(Opened(at_s=0.0, run_id="r", schema_version=1, versions=()), ledger.beliefs)

    return made.play(5.0, trip, ticks=False)


def silent() -> Tape:
    return tape().play(15.0).play(10.0, ticks=False)


@dataclass(frozen=True)
class Case:
    """`alert` is silent at `before_min` and fires at `at_min`, minutes since START_S, once for each of `labels`."""

    alert: str
    play: Callable[[], Tape]
    labels: tuple[dict[str, str], ...]
    at_min: float
    before_min: float = 14.0


HERE, THERE = {"service": CHAT}, {"service": OTHER}
CASES = (
    Case("QmSloBurnsFast", burning, (HERE,), 84.0),
    Case("QmSloBurnsSlowly", smouldering, (HERE,), 190.0),
    Case("QmShortOfCapacity", short, (HERE,), 34.0),
    Case("QmBlockEndsUnreplaced", block_ends, (HERE, THERE), 40.0),
    Case("QmBlind", blind, ({"port": "cloud"},), 25.0),
    Case("QmServiceBlind", one_blind, (HERE,), 25.0),
    Case("QmBreakerOpen", never_join, ({"instance_type": "g6.2xlarge"},), 25.0),
    Case("QmIdleReservation", unused, ({"offering": "pool"},), 58.0),
    Case("QmBudgetBinds", poor, (HERE | {"code": "budget"},), 29.0),
    Case("QmMonthNearlySpent", month, ({"unit": "support"},), 44.0),
    Case("QmPolicyRefused", refused, ({},), 20.0),
    Case("QmDefect", defective, ({},), 18.0),
    Case("QmPlanBrokeInvariant", broken, ({},), 18.0),
    Case("QmControllerSilent", silent, ({},), 24.0),
)
