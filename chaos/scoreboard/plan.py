"""Which runs the scoreboard takes, in three stages: sweeps, the best points on other seeds, bounds.

May not run anything itself: it asks a `Pool` for outcomes. Every controller but ours is judged at its best knob in
hindsight: of seven multipliers of its default, ÷ 4 … × 4 evenly in their logarithm, on two seeds, the cheapest within
the top priority's objective, else the one that attains most (`figures.best_knob`). A knob at which it would dominate us
on those two seeds is run, too, so that the rule for "best" cannot hide one. Ours is judged as it comes, and its curve
(five values of `slo.fraction`, .9 … .999, for all services) is compared with the best peer at one point each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from chaos.bounds.static import Search, Trial
from chaos.peers import KNOBS
from chaos.report import Report

from .figures import (
    Broken,
    Claim,
    Dominated,
    Failure,
    Point,
    Row,
    Scoreboard,
    Series,
    as_cheap,
    as_good,
    best_knob,
    best_peer,
    bound_usd,
    claim,
    dominates,
    met,
    point,
    row,
)
from .jobs import LB1, OURS, STATIC, Count, Job, Outcome, scenario_of_job
from .pool import Pool

MULTIPLIERS = tuple(4.0 ** (step / 3.0) for step in range(-3, 4))
FRACTIONS = tuple(round(1.0 - 10.0 ** (-1.0 - step / 2.0), 5) for step in range(5))
SWEEP_SEEDS = 2
ORACLES = ("oracle-demand", "oracle-supply")
PEER_NAMES = tuple(name for name in KNOBS if name != STATIC)
CONTROLLERS = (OURS, *ORACLES, *PEER_NAMES, STATIC)
GROUPS = {"all": CONTROLLERS, "peers": (*PEER_NAMES, STATIC), "own": (OURS, *ORACLES)}

Key = tuple[str, str, float | None]  # scenario, controller, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to measure. The sweep's seeds follow the last of `seeds`."""

    scenarios: tuple[str, ...]
    controllers: tuple[str, ...]
    seeds: tuple[int, ...]

    @property
    def sweep_seeds(self) -> tuple[int, ...]:
        """Seeds of the sweeps, none of `seeds`."""
        return tuple(range(max(self.seeds) + 1, max(self.seeds) + 1 + SWEEP_SEEDS))

    def seeds_of(self, controller: str) -> tuple[int, ...]:
        """The seeds of a row; half of them for the oracles, which explain our figures and are judged by none."""
        return self.seeds[: -(-len(self.seeds) // 2)] if controller in ORACLES else self.seeds


def measure(asked: Asked, pool: Pool) -> Scoreboard:
    """The whole scoreboard."""
    sweeps = _sweeps(asked, pool)
    keys: list[Key] = [
        (name, who, None) for name in asked.scenarios for who in asked.controllers if who in (OURS, *ORACLES)
    ]
    keys += _chosen(asked, sweeps)
    plans = _plans(asked, pool) if STATIC in asked.controllers else {}
    counts: dict[Key, Count] = {(name, STATIC, None): plan for name, plan in plans.items()}
    keys += list(counts)
    pool.do("seeds", [job for key in keys for job in _jobs(key, asked.seeds_of(key[1]), counts.get(key, ()))])
    rivals = {name: _rival(asked, pool, name, sweeps) for name in asked.scenarios}
    curves = {name: _matched(rivals[name], sweeps, name) for name in asked.scenarios}
    extra: list[Key] = [(name, OURS, at.knob) for name, both in curves.items() for at in both if at is not None]
    pool.do("our curve at the best peer's points", [job for key in extra for job in _jobs(key, asked.seeds)])
    bounds = _bounds(asked, pool)
    every = dict.fromkeys([*keys, *extra])
    series = {key: _series(pool, key, asked.seeds_of(key[1]), counts.get(key, ()), bounds) for key in every}
    whole = {key: each for key, each in series.items() if each.reports}
    rows = {key: row(each) for key, each in whole.items()}
    return Scoreboard(
        seeds=asked.seeds,
        sweep_seeds=asked.sweep_seeds,
        rows=tuple(rows[key] for key in _ordered(rows, asked)),
        dominated_by=tuple(_dominated(rows)),
        claims=tuple(_claims(whole, rivals, curves)),
        sweeps=tuple(sweeps.values()),
        failures=tuple(_failures(pool)),
        violations=tuple(_violations(pool)),
        spent_s=_spent(pool),
        older=sum(outcome.older for outcome in pool.outcomes.values()),
    )


# ---- stages ---------------------------------------------------------------------------------------------------------
def _sweeps(asked: Asked, pool: Pool) -> dict[Key, Point]:
    """Every knob of every controller on the sweep's seeds; ours also as it comes."""
    keys: list[Key] = []
    for name in asked.scenarios:
        keys += [(name, who, knob) for who in asked.controllers if who in PEER_NAMES for knob in MULTIPLIERS]
        if OURS in asked.controllers:
            keys += [(name, OURS, knob) for knob in (None, *FRACTIONS)]
    pool.do("knobs", [job for key in keys for job in _jobs(key, asked.sweep_seeds)])
    found: dict[Key, Point] = {}
    for key in keys:
        reports = [each.report for job in _jobs(key, asked.sweep_seeds) if (each := pool.outcomes[job]).report]
        if len(reports) == SWEEP_SEEDS:
            found[key] = point(*key, [report for report in reports if report is not None])
    return found


def _chosen(asked: Asked, sweeps: dict[Key, Point]) -> list[Key]:
    """Each peer's best knob in hindsight, and any at which it would dominate us."""
    keys: list[Key] = []
    for name in asked.scenarios:
        ours = sweeps.get((name, OURS, None))
        for who in asked.controllers:
            points = [each for (where, whose, _), each in sweeps.items() if (where, whose) == (name, who)]
            if who not in PEER_NAMES or not points:
                continue
            chosen = [best_knob(points, _fraction(name))]
            if ours is not None:
                better = [
                    each
                    for each in points
                    if dominates(each.attainment_top, each.cost_usd, ours.attainment_top, ours.cost_usd)
                ]
                chosen += [each for each in better if each not in chosen][:1] if chosen[0] not in better else []
            keys += [(name, who, each.knob) for each in chosen]
    return keys


def _plans(asked: Asked, pool: Pool) -> dict[str, Count]:
    """The best static plan of each scenario, by runs on the sweep's seeds: one that holds on each of them."""
    searches = {name: _search(name) for name in asked.scenarios}
    while True:
        tried = {name: plan for name, search in searches.items() if (plan := search.plan()) is not None}
        if not tried:
            return {name: search.best() for name, search in searches.items() if search.tried}
        jobs = {name: _jobs((name, STATIC, None), asked.sweep_seeds, plan) for name, plan in tried.items()}
        pool.do("static plans", [job for each in jobs.values() for job in each])
        for name, plan in tried.items():
            reports = [each.report for job in jobs[name] if (each := pool.outcomes[job]).report]
            if len(reports) < len(asked.sweep_seeds):
                del searches[name]
                continue
            searches[name].tell(plan, _trial([report for report in reports if report is not None]))


def _trial(reports: Sequence[Report]) -> Trial:
    """What a plan gave on several seeds: the least attainment of each service, the mean cost."""
    got = [{key: each.slo_attainment for key, each in report.services.items()} for report in reports]
    least = {key: min((each for one in got if (each := one[key]) is not None), default=None) for key in got[0]}
    return Trial(least, float(np.mean([report.cost_usd for report in reports])))


def _search(name: str) -> Search:
    services = scenario_of_job(Job(name, STATIC, None, 0)).policy_set.services()
    return Search(
        fraction={key: service.slo.fraction for key, _, service in services},
        most={key: service.max_replicas for key, _, service in services},
    )


def _bounds(asked: Asked, pool: Pool) -> dict[tuple[str, int], Outcome]:
    """LB1 of every scenario and seed, with prices for what ours met there."""
    jobs = []
    for name in asked.scenarios:
        for seed in asked.seeds:
            ours = pool.outcomes.get(Job(name, OURS, None, seed))
            if ours is not None and ours.report is not None:
                jobs.append(Job(name, LB1, None, seed, tuple(met(ours.report).items())))
    outcomes = pool.do("bounds", jobs)
    return {(job.scenario, job.seed): outcome for job, outcome in outcomes.items()}


# ---- against the best peer ------------------------------------------------------------------------------------------
def _rival(asked: Asked, pool: Pool, name: str, sweeps: dict[Key, Point]) -> Series | None:
    """The best peer at its best knob, on the seeds."""
    if OURS not in asked.controllers:
        return None
    series = {key: _series(pool, key, asked.seeds, (), {}) for key in _chosen(asked, sweeps) if key[0] == name}
    rows = {key: row(each) for key, each in series.items() if each.reports}
    best = best_peer(list(rows.values()))
    return series[name, best.controller, best.knob] if best else None


def _matched(rival: Series | None, sweeps: dict[Key, Point], name: str) -> tuple[Point | None, Point | None]:
    """The points of our curve that attain as much as the rival, and that cost as much."""
    if rival is None:
        return None, None
    curve = [each for (where, who, _), each in sweeps.items() if (where, who) == (name, OURS)]
    theirs = sweeps[name, rival.controller, rival.knob]
    return as_good(curve, theirs.attainment_top), as_cheap(curve, theirs.cost_usd)


def _claims(
    series: dict[Key, Series],
    rivals: dict[str, Series | None],
    curves: dict[str, tuple[Point | None, Point | None]],
) -> Iterable[Claim]:
    for name, rival in rivals.items():
        if rival is not None:
            equal, cheap = (series.get((name, OURS, at.knob)) if at else None for at in curves[name])
            yield claim(rival, equal, cheap)


def _dominated(rows: dict[Key, Row]) -> Iterable[Dominated]:
    for (name, who, knob), theirs in rows.items():
        ours = rows.get((name, OURS, None))
        if who in PEER_NAMES and ours is not None:
            pair = (theirs.attainment_top.mean, theirs.cost_usd.mean, ours.attainment_top.mean, ours.cost_usd.mean)
            if dominates(*pair):
                yield Dominated(scenario=name, controller=who, knob=knob)


# ---- gathering ------------------------------------------------------------------------------------------------------
def _jobs(key: Key, seeds: Sequence[int], counts: Count = ()) -> list[Job]:
    return [Job(*key, seed, counts) for seed in seeds]


def _series(
    pool: Pool, key: Key, seeds: Sequence[int], counts: Count, bounds: dict[tuple[str, int], Outcome]
) -> Series:
    """The reports of a key on all seeds, or none: a row over other seeds than its rivals' would compare nothing."""
    reports = [pool.outcomes[job].report for job in _jobs(key, seeds, counts)]
    if any(report is None for report in reports):
        return Series(*key, (), np.empty(0))
    whole = tuple(report for report in reports if report is not None)
    usd = [
        bound_usd(bounds[key[0], report.seed].bounds if (key[0], report.seed) in bounds else (), report)
        for report in whole
    ]
    return Series(*key, whole, np.array(usd))


def _ordered(rows: dict[Key, Row], asked: Asked) -> list[Key]:
    """Scenarios as asked; ours, the oracles and the static plan first, then peers by attainment."""

    def rank(key: Key) -> tuple[int, int, bool, float, str, float]:
        own = (OURS, *ORACLES, STATIC)
        place = own.index(key[1]) if key[1] in own else len(own)
        turned = place < len(own) and key[2] is not None
        return (asked.scenarios.index(key[0]), place, turned, -rows[key].attainment_top.mean, key[1], key[2] or 0.0)

    return sorted(rows, key=rank)


def _failures(pool: Pool) -> Iterable[Failure]:
    for job, outcome in sorted(pool.outcomes.items(), key=lambda pair: _plain(pair[0])):
        if outcome.error:
            yield Failure(
                scenario=job.scenario, controller=job.controller, knob=job.knob, seed=job.seed, error=outcome.error
            )


def _violations(pool: Pool) -> Iterable[Broken]:
    for job, outcome in sorted(pool.outcomes.items(), key=lambda pair: _plain(pair[0])):
        kinds = [violation.kind for violation in outcome.report.violations] if outcome.report else []
        for kind in sorted(set(kinds)):
            yield Broken(
                scenario=job.scenario, controller=job.controller, seed=job.seed, kind=kind, count=kinds.count(kind)
            )


def _plain(job: Job) -> tuple[str, str, float, int, Count]:
    return (job.scenario, job.controller, job.knob or 0.0, job.seed, job.counts)


def _spent(pool: Pool) -> dict[str, float]:
    """Seconds by controller, the dearest first."""
    sums: dict[str, float] = {}
    for job, outcome in pool.outcomes.items():
        sums[job.controller] = sums.get(job.controller, 0.0) + outcome.cpu_s
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def _fraction(name: str) -> float:
    """The objective of the top priority."""
    services = scenario_of_job(Job(name, STATIC, None, 0)).policy_set.services()
    top = services[0][2].priority
    return max(service.slo.fraction for _, _, service in services if service.priority == top)
