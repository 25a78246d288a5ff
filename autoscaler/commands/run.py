"""`qm run` and `qm advise`: put the adapters together and tick until told to stop.

The composition root of the controller. Nothing of a token is ever written to the log.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from autoscaler.act import Pool
from autoscaler.adapters.clock import SystemClock
from autoscaler.adapters.journals import Place, open_journal
from autoscaler.adapters.order_box import OrderBox
from autoscaler.adapters.policy_folder import PolicyFolder, read_policy
from autoscaler.adapters.telemetry import PrometheusTelemetry
from autoscaler.commands.console import check_console, read_token, served
from autoscaler.commands.outcome import OK, VIOLATED, BadInput, check_json, check_port, write_json
from autoscaler.core.beliefs import Beliefs
from autoscaler.core.defects import defect
from autoscaler.core.events import PLAN, CheckFailed, Event, Forecasted, PolicyRefused
from autoscaler.core.model import Plan
from autoscaler.core.reasons import Reason
from autoscaler.explain import words
from autoscaler.loop import Controller, NoOrders
from autoscaler.ports import (
    Cloud,
    Journal,
    Metrics,
    Misconfigured,
    PortError,
    Reread,
    Serving,
    Superseded,
    Tenure,
    Transient,
)
from autoscaler.render import Engine

if TYPE_CHECKING:
    from autoscaler.adapters.journal import FileJournal
    from autoscaler.adapters.s3_journal import S3Journal

LAUNCH_WORKERS = 16
HANG_TICKS, HANG_MIN_S = 30.0, 300.0  # of a tick: far beyond the limits of all its calls


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `qm run` was given; paths are as given, `metrics_port` None means no exporter. The local cloud has an
    address and a token, EC2 has ``cloud/ec2.yaml`` beside the policies. `console_port` None means no console.
    """

    policies: Path
    ray_address: str
    dashboard_url: str
    cloud: str
    cloud_url: str | None
    cloud_token_file: Path | None
    journal: Place
    engine: Engine
    tick_s: float
    metrics_port: int | None
    once: bool
    advise: bool
    json_file: str | None
    console_port: int | None = None
    console_token_file: Path | None = None


@dataclass(frozen=True, slots=True)
class World:
    """The edges of one cluster, and how to leave it. `hold` tells the cloud who may act."""

    metrics: Metrics
    serving: Serving
    cloud: Cloud
    leave: Callable[[], None]
    hold: Callable[[Tenure], None] = lambda _: None


def run_command(options: RunOptions, connect: Callable[[RunOptions], World] | None = None) -> int:
    """Tick until SIGTERM or SIGINT, or once. Returns the exit code: 1 when a plan broke an invariant.

    Raises BadInput, PolicyProblems or Misconfigured before anything is started.
    """
    if not options.tick_s > 0:
        raise BadInput(f"--tick-s {options.tick_s:g}: give a number of seconds above 0")
    check_json(options.json_file)
    if options.metrics_port is not None:
        check_port("--metrics-port", options.metrics_port)
    token = read_token("--console-token-file", options.console_token_file)
    if options.console_port is not None:
        check_console(options.journal, options.console_port)
    read = partial(read_policy, engine=options.engine)
    read(options.policies)
    folder = PolicyFolder(options.policies, read)
    telemetry = PrometheusTelemetry()
    with ExitStack() as leaving:
        world = (connect or connect_cluster)(options)
        leaving.callback(world.leave)
        journal = _opened(options.journal)
        leaving.callback(journal.close)
        world.hold(journal)
        if journal.repaired:
            log("journal", repaired=journal.repaired)
        if options.metrics_port is not None:
            telemetry.serve(options.metrics_port)
        if options.console_port is not None:
            leaving.enter_context(served(options.journal, options.console_port, token))
        stop = leaving.enter_context(_signals(folder))
        pool = Pool(LAUNCH_WORKERS, options.tick_s / 2.0)
        make = partial(_controller, options, world, journal, folder, _Watch(telemetry), pool)
        return _Ticker(make, telemetry, stop, options).run()


def _opened(place: Place) -> FileJournal | S3Journal:
    try:
        return open_journal(place)
    except Transient as error:
        raise BadInput(f"--journal {place}: {error}; check that it can be reached, then start again") from error


def _controller(
    options: RunOptions, world: World, journal: Journal, folder: PolicyFolder, telemetry: _Watch, pool: Pool
) -> Controller:
    controller = Controller(
        clock=SystemClock(),
        metrics=world.metrics,
        serving=world.serving,
        cloud=world.cloud,
        journal=journal,
        policy_source=folder,
        executor=pool,
        telemetry=telemetry,
        orders=OrderBox.of(options.journal) if isinstance(options.journal, Path) else NoOrders(),
        advise=options.advise,
        tick_s=options.tick_s,
    )
    telemetry.metrics.seq = lambda: controller.ledger.seq
    return controller


def connect_cluster(options: RunOptions) -> World:
    """The adapters for a running Ray cluster and a cloud. Raises BadInput when one does not answer."""
    from autoscaler.adapters.prometheus import ClusterMetrics, EngineScraper, GatewayMetrics
    from autoscaler.adapters.ray_serve import RayServe
    from autoscaler.commands.clouds import CLOUDS

    if options.cloud not in CLOUDS:
        raise BadInput(f"--cloud {options.cloud}: unknown; this version has: {', '.join(CLOUDS)}")
    serving = RayServe(options.ray_address, options.dashboard_url)
    cloud = CLOUDS[options.cloud](options, serving.notes)
    try:
        serving.probe()
    except Misconfigured as error:
        raise BadInput(f"--dashboard-url {options.dashboard_url}: {error}") from error
    except PortError as error:
        raise BadInput(f"--ray-address {options.ray_address}: {error}") from error

    scraper = EngineScraper(serving.metrics_urls)
    scraper.start()

    def leave() -> None:
        scraper.stop()
        serving.close()
        cloud.leave()

    return World(ClusterMetrics(GatewayMetrics(serving.reports), scraper), serving, cloud.cloud, leave, cloud.hold)


@contextmanager
def _signals(folder: PolicyFolder) -> Iterator[threading.Event]:
    """SIGTERM and SIGINT set the event, SIGHUP has the policy looked at; all as before on leaving."""
    stop = threading.Event()
    handlers: dict[signal.Signals, Callable[..., None]] = {
        signal.SIGTERM: lambda *_: stop.set(),
        signal.SIGINT: lambda *_: stop.set(),
        signal.SIGHUP: lambda *_: folder.look_now(),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Watch:
    """loop.Telemetry: the metrics, and a line in the log for what an operator must hear of. What the metrics raise is
    logged and counted; it may not come between a plan and its acts.
    """

    metrics: PrometheusTelemetry
    _defect: str = ""

    def event(self, event: Event, beliefs: Beliefs) -> None:
        """See loop.Telemetry."""
        try:
            self.metrics.event(event, beliefs)
        except Exception as error:
            self.metrics.failures.inc()
            log("event not shown in the metrics:", kind=event.kind, why=defect(error))
        match event:
            case PolicyRefused():
                for problem in event.problems:
                    log("policy refused, the one before stays in force:", problem=problem)
            case CheckFailed():
                for violation in event.violations:
                    log("plan not acted on, the one before stays in force:", plan=event.plan_id, why=violation)
            case Forecasted():
                for row in event.forecasts:
                    if row.failed:
                        log("forecast failed, the one before stays in force:", service=row.service, why=row.failed)
            case _ if beliefs.defect and beliefs.defect != self._defect:
                log("event not learnt:", why=beliefs.defect)
        self._defect = beliefs.defect


@dataclass
class _Ticker:
    """A fixed cadence: a slow tick makes the next one late, and none is made up for. A controller that must begin anew,
    or met a defect of ours that it could not end as a plan not acted on, is made again. A tick that hangs ends the
    process, with where it hung on standard error: whoever started it starts it again.
    """

    make: Callable[[], Controller]
    telemetry: PrometheusTelemetry
    stop: threading.Event
    options: RunOptions
    controller: Controller = field(init=False)
    broke: bool = False

    def __post_init__(self) -> None:
        self.controller = self.make()

    def run(self) -> int:
        plan: Plan | None = None
        due_s = monotonic()
        while not self.stop.is_set():
            plan = self._tick()
            if self.options.once:
                break
            due_s = max(due_s + self.options.tick_s, monotonic())
            self.stop.wait(due_s - monotonic())
        if plan is not None and self.options.json_file:
            write_json(self.options.json_file, PLAN.dump_json(plan))
        return VIOLATED if self.telemetry.violated or self.broke else OK

    def _tick(self) -> Plan | None:
        began_s = monotonic()
        hang_s = max(HANG_TICKS * self.options.tick_s, HANG_MIN_S)
        faulthandler.dump_traceback_later(hang_s, exit=True, file=sys.__stderr__ or 2)
        try:
            with self.telemetry.timed():
                plan = self.controller.tick()
        except Superseded as error:
            raise BadInput(f"--journal {self.options.journal}: {error}; this controller ends") from error
        except PortError as error:
            if isinstance(error, Reread):
                self.controller = self.make()
            log("tick failed", error=f"{error.code}: {error}")
            return None
        except Exception as error:
            self.broke, self.controller = True, self.make()
            log("tick failed", error=defect(error))
            return None
        finally:
            faulthandler.cancel_dump_traceback_later()
        log("tick", took_ms=round(1000.0 * (monotonic() - began_s)), **_summary(plan))
        if plan is not None and self.options.advise and self.options.json_file != "-":
            sys.stdout.writelines(f"{line}\n" for line in advice(plan))
        return plan


def _summary(plan: Plan | None) -> dict[str, object]:
    if plan is None:
        return {"plan": "none yet"}
    return {
        "plan": plan.id,
        "demand_rps": round(sum(row.arrival_rps for row in plan.demands), 2),
        "replicas": sum(row.replicas for row in plan.targets),
        "wanted": sum(row.wanted for row in plan.targets),
        "short": sum(row.replicas for row in plan.shortfalls),
        "launches": sum(row.count for row in plan.launches),
        "drains": len(plan.drains),
        "terminates": len(plan.terminates),
    }


def advice(plan: Plan) -> list[str]:
    """What `qm run` would do now, one line an act, each with its reasons."""
    acts: list[tuple[str, tuple[Reason, ...]]] = [
        (f"publish {target.replicas} of {target.service} {target.variant}", target.reasons) for target in plan.targets
    ]
    acts += [
        (f"launch {row.count} at {', '.join(row.alternates)} for {row.service}", row.reasons) for row in plan.launches
    ]
    acts += [(f"drain {one.instance_id}", one.reasons) for one in plan.drains]
    acts += [(f"terminate {one.instance_id}", one.reasons) for one in plan.terminates]
    return [f"{act} ({'; '.join(words(reason) for reason in reasons)})" for act, reasons in acts]


def log(what: str, **fields: object) -> None:
    """One line on standard error: time, what, then key=value."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    words = " ".join(f"{key}={value}" for key, value in fields.items())
    sys.stderr.write(f"{at} qm[{os.getpid()}] {what} {words}\n")
