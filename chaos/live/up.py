"""`qm up`: the whole product on this machine, under a real load and through a shortage, and then gone again.

Check every input, start the parts, replay the load while one pool runs dry and one instance is reclaimed, wait until
capacity is given back, end everything, report. May not decide anything about capacity: the controller it starts is the
same `qm run` that production has, and what it did is read from its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from autoscaler.commands.outcome import OK, VIOLATED, write_json
from autoscaler.ports import PortError
from chaos.report import Report, Violation, build, live_part

from . import processes
from .cluster import Cluster, Setup, StartFailedError
from .inputs import Given, Inputs, check_inputs
from .load import Load, errors
from .script import Script
from .status import Snapshot, Status, summary
from .watch import Watch

FIRST_READY_S = 300.0  # a first vLLM replica takes 45 s alone; several share two cores
GIVE_BACK_S = 240.0  # what is held after a load: a minute's look-back and one and a half leads, of 70 s here
ENDING_S = 10.0
LOOK_S = 1.0
PSS_EVERY_S = 10.0
INTERRUPTED = 130
MAX_TEMPDIR = 24
PLAIN_WIDTH = 132  # columns of the summary where there is no terminal to ask


def up_command(given: Given) -> int:
    """Run the main job. Returns 0; 1 with violations, or when a part did not start or ended; 130 after Ctrl-C.

    Raises BadInput listing every problem before anything is started.
    """
    inputs = check_inputs(given)
    stderr = given.json_file == "-"
    plain = None if Console(stderr=stderr).is_terminal else PLAIN_WIDTH
    return Run(inputs, Console(stderr=stderr, width=plain)).main()


def stop_command() -> int:
    """`qm down`: end every process that runs on this machine have left, by `--keep` or otherwise."""
    found = processes.marked()
    left = processes.end(None)
    print(f"{len(found) - len(left)} processes ended" + (f"; not: {processes.describe(left)}" if left else ""))
    return VIOLATED if left else OK


@dataclass
class Run:
    """One run, from the first process to the last. Lives in one folder, which keeps the journal and the logs."""

    inputs: Inputs
    console: Console
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="qm-", dir=_short_tempdir())))
    started_s: float = field(default_factory=time.monotonic)
    peak_pss_bytes: int = 0
    ready_after_s: float = 0.0
    leaked_instances: int = 0
    leaked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = self.inputs.given
        self.run_id = self.folder.name.removeprefix("qm-")
        self.cluster = Cluster(
            Setup(
                run_id=self.run_id,
                folder=self.folder,
                journal=given.journal or self.folder / "journal",
                policies=self.inputs.policies,
                engine=given.engine,
                offerings=self.inputs.offerings,
                http_port=self.inputs.http_port,
                keep=given.keep,
                cloud=given.cloud,
                console_port=given.console_port,
            )
        )
        self.watch = Watch(self.cluster.setup.journal)
        self.load = Load(self.cluster.gateway_url, self.inputs.sends())
        self.status = Status(self.console)
        self._pss_bytes = 0

    def main(self) -> int:
        """Everything, with everything ended again whatever happens, unless it is to be kept and came to its end."""
        kept = False
        try:
            with _interruptible(), self.status:
                self._bring_up()
                asyncio.run(self._drive())
            kept = self.inputs.given.keep
        except KeyboardInterrupt:
            self.console.print("interrupted; ending everything")
            return INTERRUPTED
        except StartFailedError as error:
            self.console.print(f"qm up: {error}", markup=False, highlight=False)
            return VIOLATED
        finally:
            self._end(kept)
        return self._report()

    # ---- up ---------------------------------------------------------------------------------------------------------
    def _bring_up(self) -> None:
        say, cluster = self.status.say, self.cluster
        cloud = "the local cloud" if cluster.setup.cloud == "local" else "the test EC2"
        say(f"run {self.run_id}: Ray head, then {cloud}, Serve's applications and the controller")
        cluster.start_head()
        say(f"Ray at {cluster.ray_address}, dashboard {cluster.dashboard_url}")
        cluster.start_cloud()
        cluster.deploy(self.inputs.config)
        cluster.start_controller()
        say(f"controller started, metrics {cluster.metrics_url}; waiting for the first replicas")
        say(f"watch it on a page: {cluster.console_url} (orders need the token in {cluster.console_token_file})")
        self._await_first_replicas()
        self.ready_after_s = time.monotonic() - self.started_s
        say(f"ready: {cluster.gateway_url}/v1 answers for {', '.join(sorted(self.watch.ready()))}")

    def _await_first_replicas(self) -> None:
        """Until the gateway answers and every service with a floor has a ready replica."""
        rows = self.inputs.resolved.policy.services()
        floor = {key for key, _, service in rows if service.min_replicas > 0 and not service.scale_to_zero}
        until_s = time.monotonic() + FIRST_READY_S
        while time.monotonic() < until_s:
            self._look("starting", 0.0)
            if floor <= self.watch.ready().keys() and self.cluster.gateway_is_up():
                return
            time.sleep(LOOK_S)
        missing = ", ".join(sorted(floor - self.watch.ready().keys())) or "the gateway"
        raise StartFailedError(f"not ready after {FIRST_READY_S:g} s: {missing}\n{self.cluster.tail('controller')}")

    # ---- load -------------------------------------------------------------------------------------------------------
    async def _drive(self) -> None:
        """The load with the shortage beside it, then quiet until capacity has been given back."""
        start_s = time.monotonic()
        script = Script(
            self.cluster.cloud.weather(), self.inputs.duration_s, lambda: self.watch.serving, self.status.say
        )
        tasks = [asyncio.create_task(job) for job in (self.load.run(), script.run(), self._measure())]
        load, weather, _ = tasks
        try:
            while not load.done():
                self._look("load", time.monotonic() - start_s)
                await asyncio.sleep(LOOK_S)
            await load
            await self._give_back(start_s)
            await weather
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_back(self, start_s: float) -> None:
        """The load is over: until an instance was given back and every reclaimed one was seen empty, within limits."""
        self.status.say("load over; waiting for capacity to be given back")
        until_s = time.monotonic() + GIVE_BACK_S
        while time.monotonic() < until_s:
            self._look("quiet", time.monotonic() - start_s)
            empty = all(at_s is not None for _, at_s in self.watch.facts.reclaims())
            if empty and self.watch.facts.given_back():
                self.status.say(f"{self.watch.facts.given_back()} instances given back")
                return
            await asyncio.sleep(LOOK_S)
        self.status.say(f"waited {GIVE_BACK_S:g} s")

    def _look(self, phase: str, done_s: float) -> None:
        """One look at everything: parts alive, journal; shown."""
        self.cluster.check_alive()
        self.watch.look()
        for line in self.watch.news:
            self.status.say(line)
        self.watch.news.clear()
        states = [seen.state for seen in self.load.outcomes]
        self.status.show(
            Snapshot(
                phase=phase,
                done_s=done_s,
                whole_s=self.inputs.duration_s,
                sent=self.load.sent,
                answered=states.count("ok"),
                shed=states.count("shed"),
                failed=states.count("failed"),
                in_flight=self.load.in_flight,
                ready=self.watch.ready(),
                instances=self.watch.instances(),
                pss_bytes=self._pss_bytes,
            )
        )

    async def _measure(self) -> None:
        """Memory now and then, in a thread: reading it takes long enough to disturb the clients' clocks."""
        while True:
            self._pss_bytes = await asyncio.to_thread(processes.pss_bytes, self.run_id)
            self.peak_pss_bytes = max(self.peak_pss_bytes, self._pss_bytes)
            await asyncio.sleep(PSS_EVERY_S)

    # ---- the end ----------------------------------------------------------------------------------------------------
    def _end(self, kept: bool) -> None:
        """End everything, in order, then whatever is left; Ctrl-C no longer helps now. Count what had to be killed."""
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.leaked_instances = self._unknown_instances()
            if not kept:
                self.cluster.stop()
                self.leaked = processes.wait_gone(self.run_id, ENDING_S)
                processes.end(self.run_id)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _unknown_instances(self) -> int:
        """Instances that the cloud holds and no launch in the journal asked for."""
        with contextlib.suppress(PortError, OSError):
            self.watch.look()
            listed = self.cluster.cloud.weather().describe(time.time()).instances
            return sum(seen.state != "terminated" and seen.token not in self.watch.facts.tried for seen in listed)
        return 0

    def _violations(self) -> list[Violation]:
        now_s = time.time()
        found = [
            Violation(at_s=deadline, kind="reclaim_missed", detail="an instance was not seen empty by its deadline")
            for deadline, empty_at_s in self.watch.facts.reclaims()
            if empty_at_s is None or empty_at_s > deadline
        ]
        if self.leaked:
            names = processes.describe(self.leaked) or f"{len(self.leaked)} processes, killed since"
            found.append(Violation(at_s=now_s, kind="leaked_processes", detail=names))
        if self.leaked_instances:
            text = f"{self.leaked_instances} instances that no launch in the journal asked for"
            found.append(Violation(at_s=now_s, kind="leaked_instances", detail=text))
        return found

    def _report(self) -> int:
        given, facts = self.inputs.given, self.watch.facts
        failed = sum(seen.state == "failed" for seen in self.load.outcomes)
        report = build(
            scenario=f"up-{given.engine}-{self.inputs.trace.name}",
            controller="quartermaster",
            seed=given.seed,
            duration_s=self.inputs.duration_s,
            wall_s=time.monotonic() - self.started_s,
            outcomes=self.load.outcomes,
            policy=self.inputs.resolved.policy,
            facts=facts,
            violations=self._violations(),
            live=live_part(given.engine, facts, failed, self.leaked_instances, len(self.leaked)),
        )
        summary(self.console, report, facts, self._notes(report), self._kept() if given.keep else "")
        if given.json_file:
            write_json(given.json_file, report.model_dump_json(indent=2).encode())
        if not (report.violations or failed or given.keep):
            shutil.rmtree(self.folder / "ray", ignore_errors=True)  # Ray's own logs are for when something went wrong
        return VIOLATED if report.violations else OK

    def _kept(self) -> str:
        """What still runs after `--keep`."""
        instances, running = sum(self.watch.instances().values()), len(processes.marked(self.run_id))
        return f"{instances} instances and {running} processes, until qm down"

    def _notes(self, report: Report) -> list[str]:
        trace, cluster = self.inputs.trace, self.cluster
        notes = [
            f"load: {trace.source}; {self.inputs.sizing.text()}",
            f"ready after {self.ready_after_s:.0f} s, {report.wall_s:.0f} s in all; "
            f"memory at most {self.peak_pss_bytes / 2**30:.1f} GiB (PSS of everything)",
            f"journal: {cluster.setup.journal} (qm explain --journal …, qm replay --journal …); logs: {self.folder}",
        ]
        notes += [f"failed {count} ×: {text}" for text, count in errors(self.load.outcomes)[:5]]
        if self.inputs.given.keep:
            notes += [
                f"still running: gateway {cluster.gateway_url}/v1, controller metrics {cluster.metrics_url}",
                f"Ray {cluster.ray_address}, dashboard {cluster.dashboard_url}, for both: "
                f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={cluster.ray_token_file}",
                f"console {cluster.console_url}, token for orders in {cluster.console_token_file}",
                f"cloud {cluster.cloud_url}, token in {cluster.token_file}",
                "end it with: qm down",
            ]
        return notes


def _short_tempdir() -> str:
    """Where temporary folders go, or /tmp when that is too deep: names of Ray's sockets must stay within 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= MAX_TEMPDIR else "/tmp"  # noqa: S108


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does; so does SIGINT where a shell's ``&`` had it ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)  # which asyncio knows and replaces
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
