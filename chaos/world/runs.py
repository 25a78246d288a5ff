"""`simulate`: one scenario, one controller, one seed, from second 0 to the report.

May not read a clock: `Report.wall_s` is 0.0 here, and whoever times a run fills it in. Two runs of one seed give equal
bytes, report and journal.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from autoscaler.adapters.journal import FileJournal, MemoryJournal
from autoscaler.core.capacity import Mix, capacity
from autoscaler.core.model import Shape
from autoscaler.core.units import SECONDS_PER_HOUR
from autoscaler.ports import Misconfigured
from chaos.engine import Totals
from chaos.report import Report, ServiceReport, Tpot, Ttft
from chaos.scenario import Scenario
from chaos.streams import arrivals
from policies.model import Service

from .drivers import Driver, Loop, Stranger
from .guard import LIMIT_S, Ended, Foreign, Raised, TimedOut
from .oracle import seer
from .watch import OfferingSample, Sample, ServiceSample, Watch
from .world import World

Factory = Callable[[Any], Any]
OURS = ("ours", "quartermaster", "oracle-demand", "oracle-supply")
MIX_REQUESTS = 2000  # enough for a mean
COLLECT_AFTER = (50_000, 20, 50)
SEGMENT_RECORDS = 400  # what the journal in memory keeps: more live objects make every collection slower


class UnknownController(ValueError):
    """A controller that cannot be had: the name is wrong, or its module or factory fails."""


def simulate(
    scenario: Scenario,
    controller: str | Factory,
    seed: int,
    *,
    journal: Path | None = None,
    watch: Watch | None = None,
    limit_s: float = LIMIT_S,
) -> Report:
    """Run `scenario` to its end under `controller` and report.

    `controller`: one of OURS, a peer's name, ``module:attr``, or a factory. `limit_s` is the real time that one call of
    a ``module:attr`` may take before it counts as never returning. `journal`: a folder for the loop's journal.

    Raises UnknownController, Misconfigured (the journal's folder) or chaos.demand.TraceProblems.
    """
    world = World(scenario, seed, generous=controller == "oracle-supply")
    driver = _driver(world, controller, journal, limit_s)
    with few_collections(), closing(driver):
        for step in range(math.ceil(scenario.duration_s / scenario.tick_s)):
            world.run_until(step * scenario.tick_s)
            world.metrics.sample()
            driver.tick()
            world.scores.tick()
            if watch is not None:
                watch.sample(_sample(world, driver))
        world.run_until(scenario.duration_s)
        world.finish()
    return _report(world, controller if isinstance(controller, str) else getattr(controller, "__name__", "controller"))


@contextmanager
def few_collections() -> Iterator[None]:
    """A tick makes thousands of objects and no cycles: looking for them at the usual pace takes a sixth of a run."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


# ---- who decides ----------------------------------------------------------------------------------------------------
def _driver(world: World, controller: str | Factory, journal: Path | None, limit_s: float) -> Driver:
    if isinstance(controller, str) and controller in OURS:
        kept = MemoryJournal(segment_records=SEGMENT_RECORDS) if journal is None else _files(journal)
        if controller == "oracle-demand":
            return Loop(world, kept, seer(world.scenario, world.seed))
        return Loop(world, kept)
    if journal is not None:
        raise UnknownController(f"{controller} keeps no journal; leave it out, or take one of {', '.join(OURS)}")
    found = _controller(controller, limit_s)
    told = facts(world.scenario, world.seed)
    try:
        return Stranger(world, found, told)
    except (Raised, TimedOut, Ended, TypeError) as error:
        if not isinstance(found, Foreign):  # our own code: a defect, not a wrong word
            raise
        found.close()
        raise UnknownController(f"{controller}: its factory failed: {error}") from error


def _files(folder: Path) -> FileJournal:
    kept = FileJournal(folder, sync=False)
    if next(iter(kept.read()), None) is not None:
        kept.close()
        raise Misconfigured(f"{folder}: holds a journal already; give a new folder", "journal_not_empty")
    return kept


def _controller(controller: str | Factory, limit_s: float) -> Factory | Foreign:
    """Its factory, or for code that is not ours the process that will make it."""
    if not isinstance(controller, str):
        return controller
    from chaos.peers import PEERS

    if controller in PEERS:
        return PEERS[controller]
    module, _, attr = controller.partition(":")
    if not attr:
        known = ", ".join((*OURS, *sorted(PEERS)))
        raise UnknownController(f"{controller} is no controller; give module:attr, or one of {known}")
    foreign = Foreign(lambda: _attribute(module, attr), limit_s)
    try:
        foreign.loaded()
    except (Raised, TimedOut, Ended, TypeError) as error:
        foreign.close()
        why = f" {error}" if isinstance(error, TypeError) else f": cannot be imported: {error}"
        raise UnknownController(f"{controller}{why}") from error
    return foreign


def _attribute(module: str, attr: str) -> Any:
    """`attr` of `module`, which may lie in the current folder: a command's own folder is where Python looks first."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return getattr(import_module(module), attr)


# ---- what a controller is told --------------------------------------------------------------------------------------
def facts(scenario: Scenario, seed: int) -> dict[str, Any]:
    """The scenario as plain values with `shapes`: every variant with what one replica carries by our capacity model.

    A shape has service, variant, instance_type, instance_gpus, gpus, nodes, capacity_rps (planned requests/s),
    max_batch, input_tokens and output_tokens (the mean mix behind them), timing (the catalogue's constants),
    load_prior_s, boot_prior_s.
    """
    told: dict[str, Any] = scenario.model_dump(mode="json")
    entries = {key: entry for key, _, entry in scenario.policy_set.services()}
    mixes = {key: mean_mix(scenario, key, seed) for key in entries}
    told["shapes"] = [
        _shape(scenario, shape, entries[shape.service], mixes[shape.service]) for shape in scenario.shapes
    ]
    return told


def _shape(scenario: Scenario, shape: Shape, entry: Service, mix: Mix) -> dict[str, Any]:
    carries = capacity(shape.timing, mix, entry.slo, entry.goal)
    return {
        "service": shape.service,
        "variant": shape.variant,
        "instance_type": shape.instance_type,
        "instance_gpus": scenario.catalogue_set.instance_types[shape.instance_type].gpus,
        "gpus": shape.gpus,
        "nodes": shape.nodes,
        "capacity_rps": carries.rps,
        "max_batch": carries.batch,
        "input_tokens": mix.input_tokens,
        "output_tokens": mix.output_tokens,
        "timing": asdict(shape.timing),
        "load_prior_s": shape.load_prior_s,
        "boot_prior_s": shape.boot_prior_s,
    }


def mean_mix(scenario: Scenario, service: str, seed: int) -> Mix:
    """Mean tokens of the first MIX_REQUESTS requests, follow-up calls of agents included, and the share of inputs that
    prefix caches hold.
    """
    stream = arrivals(scenario, service, seed)
    calls = inputs = outputs = cached = 0.0
    until_s = 60.0
    while calls < MIX_REQUESTS and until_s < 2.0 * scenario.duration_s:
        batch = stream.take(min(until_s, scenario.duration_s))
        rows = zip(batch.input_tokens, batch.output_tokens, batch.prefix_tokens, batch.task, strict=True)
        for first, output, prefix, task in rows:
            count = int(stream.tasks.calls[task]) if task >= 0 else 1
            grows = float(output + stream.tasks.grow_tokens[task]) if task >= 0 else 0.0
            calls += count
            inputs += count * float(first) + grows * count * (count - 1) / 2.0
            outputs += count * float(output)
            cached += count * float(prefix)
        until_s *= 2.0
    return Mix(
        input_tokens=max(1.0, inputs / max(1.0, calls)),
        output_tokens=max(1.0, outputs / max(1.0, calls)),
        prefix_share=min(1.0, cached / max(1.0, inputs)),
    )


# ---- the report -----------------------------------------------------------------------------------------------------
def _report(world: World, name: str) -> Report:
    totals = {key: world.engine.totals(number) for key, number in world.numbers.items()}
    cost_by = world.tally.cost_by()
    return Report(
        scenario=world.scenario.name,
        controller=name,
        seed=world.seed,
        duration_s=world.scenario.duration_s,
        wall_s=0.0,
        requests=sum(each.requests for each in totals.values()),
        cost_usd=world.tally.cost_usd(),
        cost_usd_by=cost_by,
        services={key: _service(world.entries[key], each) for key, each in totals.items()},
        launches=world.tally.launches(),
        first_refusal_to_each_rung_s=dict(world.tally.rungs_s),
        direction_changes=world.scores.direction_changes,
        priority_inversion_s=world.scores.priority_inversion_s,
        idle_reservation_h=world.tally.idle_reservation_s / SECONDS_PER_HOUR,
        violations=tuple(world.violations),
    )


def _service(entry: Service, totals: Totals) -> ServiceReport:
    ttft, tpot = (_known(each) for each in (totals.ttft_s, totals.tpot_s))
    return ServiceReport(
        requests=totals.requests,
        slo_attainment=totals.met / totals.requests if totals.requests else None,
        fraction=entry.slo.fraction,
        priority=entry.priority,
        goal=entry.goal,
        ttft_s=Ttft(p50=ttft["p50"], p95=ttft["p95"], p99=ttft["p99"]),
        tpot_s=Tpot(p50=tpot["p50"], p95=tpot["p95"]),
        shed=totals.shed,
        overflowed=totals.overflowed,
        failed=totals.failed,
        cold_start_misses=totals.cold_start_misses,
        tokens=totals.input_tokens + totals.output_tokens,
    )


def _known(quantiles: dict[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(figure) else figure for name, figure in quantiles.items()}


# ---- samples for a watch --------------------------------------------------------------------------------------------
def _sample(world: World, driver: Driver) -> Sample:
    now_s = world.timeline.now_s
    overflow_usd = sum(world.engine.totals(number).overflow_usd for number in world.numbers.values())
    return Sample(
        at_s=now_s,
        services=tuple(_service_samples(world, driver)),
        offerings=tuple(_offering_samples(world)),
        cost_usd=world.tally.cost_usd(now_s) + overflow_usd,
        refused=sum(world.tally.refused.values()),
        violations=len(world.violations),
    )


def _service_samples(world: World, driver: Driver) -> Iterator[ServiceSample]:
    forecasts = driver.forecasts()
    for key, number in world.numbers.items():
        window, totals, made = world.metrics.windows[key], world.engine.totals(number), forecasts.get(key)
        replicas = [replica for replica in world.cluster.replicas() if replica.deployment.app.service == key]
        yield ServiceSample(
            service=key,
            arrived=window.arrived,
            finished=window.finished,
            shed=window.shed,
            queued=window.queued,
            running=window.running,
            ready=sum(replica.state == "ready" for replica in replicas),
            coming=sum(replica.state in ("pending", "loading") for replica in replicas),
            target=sum(d.target for d in world.cluster.deployments.values() if d.app.service == key),
            attainment=world.scores.lately_met(key, totals),
            forecast=made.quantiles if made is not None else (),
            lead_s=made.lead_s if made is not None else 0.0,
        )


def _offering_samples(world: World) -> Iterator[OfferingSample]:
    for row in world.pools.rows.values():
        nodes = [world.cluster.nodes.get(machine.instance) for machine in row.machines]
        stays = [
            machine.stays and (node is None or node.open) for machine, node in zip(row.machines, nodes, strict=True)
        ]
        ready = sum(stay and node is not None for stay, node in zip(stays, nodes, strict=True))
        yield OfferingSample(
            offering=row.id,
            market=row.supply.market,
            ready=ready,
            starting=sum(stays) - ready,
            draining=len(stays) - sum(stays),
            size=world.pools.count(row),
            price_usd_per_h=world.pools.price_usd_per_h(row),
        )
