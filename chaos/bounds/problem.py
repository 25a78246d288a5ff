"""A scenario as the bound LB1 sees it: every request with its least work, every pool with its most.

Reads the scenario's traces; may not run the world, read a clock or draw a number of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chaos.engine.spec import SINGLE, RequestBatch, TaskTable
from chaos.scenario import Scenario
from chaos.streams import arrivals
from chaos.world.truth import true_timing
from policies.model import Service, Slo
from serve_apps.timing import Timing

from .supply import AFTER_S, Place, places, quotas, sunk_usd
from .work import Floats, Ints, Limits, Requests, least_work, requests_of

PERIODS = 96
MIN_PERIOD_S = 30.0


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Way:
    """One variant of a service: GPUs of one replica in all, where it may run (indices of places), seconds a request."""

    variant: str
    gpus: int
    places: tuple[int, ...]
    work_s: Floats


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Load:
    """One service's requests, arrays of shape (n,): the first and the last period in which each may be served.

    `overflow_usd`: what each costs at the overflow endpoint (inf where there is none), which takes `overflow_rpm`.
    """

    service: str
    first: Ints
    last: Ints
    ways: tuple[Way, ...]
    overflow_usd: Floats
    overflow_rpm: float

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Problem:
    """Everything the program needs. `edges_s` has one entry more than there are periods; the last is AFTER_S long."""

    edges_s: Floats
    loads: tuple[Load, ...]
    places: tuple[Place, ...]
    quotas: dict[str, float]
    sunk_usd: float

    @property
    def periods(self) -> int:
        """How many."""
        return len(self.edges_s) - 1


def problem_of(scenario: Scenario, seed: int, periods: int = PERIODS) -> Problem:
    """The problem of one seed: its arrivals, its pools and its true engine constants. Raises TraceProblems."""
    parts = max(1, min(periods, int(scenario.duration_s / MIN_PERIOD_S)))
    edges_s = np.append(np.linspace(0.0, scenario.duration_s, parts + 1), scenario.duration_s + AFTER_S)
    pools = places(scenario, seed, edges_s)
    truth = true_timing(scenario, seed)
    loads = [
        _load(scenario, key, service, truth, pools, seed, edges_s) for key, _, service in scenario.policy_set.services()
    ]
    return Problem(
        edges_s=edges_s, loads=tuple(loads), places=pools, quotas=quotas(scenario), sunk_usd=sunk_usd(scenario, seed)
    )


def _load(
    scenario: Scenario,
    key: str,
    service: Service,
    truth: dict[tuple[str, str], Timing],
    pools: Sequence[Place],
    seed: int,
    edges_s: Floats,
) -> Load:
    stream = arrivals(scenario, key, seed)
    limits = limits_of(service.slo)
    requests = _requests(stream.take(scenario.duration_s), stream.tasks, limits)
    first = _period(edges_s, requests.at_s)
    last = np.where(np.isfinite(requests.latest_s), _period(edges_s, requests.latest_s), len(edges_s) - 2)
    allowed = _allowed(scenario, service, pools)
    ways = tuple(
        Way(
            variant=shape.variant,
            gpus=shape.gpus * shape.nodes,
            places=tuple(index for index in allowed if pools[index].instance_type == shape.instance_type),
            work_s=least_work(truth[key, shape.variant], limits, requests, first == last),
        )
        for shape in scenario.shapes
        if shape.service == key
    )
    over = service.overflow
    tokens = requests.input_tokens + requests.output_tokens
    return Load(
        service=key,
        first=first,
        last=last,
        ways=ways,
        overflow_usd=tokens * over.usd_per_1m_tokens / 1e6 if over else np.full(len(requests), math.inf),
        overflow_rpm=float(over.rpm) if over else 0.0,
    )


def limits_of(slo: Slo) -> Limits:
    """The policy's limits as numbers."""
    whole = [limit for limit in (slo.e2e_s, slo.deadline_s) if limit is not None]
    return Limits(ttft_s=slo.ttft_s or math.inf, tpot_s=slo.tpot_s or math.inf, whole_s=min(whole, default=math.inf))


def _allowed(scenario: Scenario, service: Service, pools: Sequence[Place]) -> tuple[int, ...]:
    """Places that the policy permits the service."""
    zones = {row.id: row.zone for row in scenario.supply}
    return tuple(
        index
        for index, place in enumerate(pools)
        if place.market in service.markets
        and (not service.zones or zones[place.offering] in service.zones)
        and (not service.instance_types or place.instance_type in service.instance_types)
    )


def _period(edges_s: Floats, at_s: Floats) -> Ints:
    found: npt.NDArray[np.int64] = np.clip(np.searchsorted(edges_s, at_s, side="right") - 1, 0, len(edges_s) - 2)
    return found


def _requests(batch: RequestBatch, tasks: TaskTable, limits: Limits) -> Requests:
    """All requests, an agent task's later calls included: these begin after their thinking times at the earliest."""
    whole = (batch.at_s, batch.input_tokens, batch.output_tokens, batch.prefix_tokens)
    first = np.array([np.asarray(each, np.float64) for each in whole]).reshape(4, -1)
    parts, loose = [first], [np.zeros(first.shape[1], bool)]
    rows = np.flatnonzero(batch.task != SINGLE)
    call = 1
    while len(rows := rows[tasks.calls[batch.task[rows]] > call]):
        at_s, inputs, outputs, prefix = first[:, rows]
        task = batch.task[rows]
        grown = inputs + call * (outputs + tasks.grow_tokens[task])
        parts.append(np.array([at_s + call * tasks.think_s[task], grown, outputs, prefix]))
        loose.append(np.ones(len(rows), bool))
        call += 1
    at_s, inputs, outputs, prefix = np.concatenate(parts, axis=1)
    return requests_of(at_s, inputs, outputs, prefix, np.concatenate(loose), limits)
