"""A world for the scoreboard that answers at once: what a controller attains and costs is a formula of its knob."""

from __future__ import annotations

import os
import signal
from functools import lru_cache
from pathlib import Path

from chaos.report import CostBy, Launches, Report, ServiceReport, Tpot, Ttft
from chaos.scenario import load_scenario
from chaos.scoreboard.jobs import Job, Outcome
from policies.model import Service, Unit

REQUESTS = 10_000
TOP = 900


@lru_cache
def _entries(scenario: str) -> tuple[tuple[str, Unit, Service], ...]:
    return load_scenario(scenario).policy_set.services()


def report(scenario: str, controller: str, seed: int, top: float, cost_usd: float) -> Report:
    """A report in which the top priority attains `top`, and everybody else half."""
    entries = _entries(scenario)
    return reported(
        scenario, controller, seed, {key: top if entry.priority == TOP else 0.5 for key, _, entry in entries}, cost_usd
    )


def reported(scenario: str, controller: str, seed: int, got: dict[str, float], cost_usd: float) -> Report:
    """A report with the attainment of each service."""
    services = {
        key: ServiceReport(
            requests=REQUESTS,
            slo_attainment=got[key],
            fraction=entry.slo.fraction,
            priority=entry.priority,
            goal=entry.goal,
            ttft_s=Ttft(p50=None, p95=None, p99=None),
            tpot_s=Tpot(p50=None, p95=None),
            shed=0,
            overflowed=0,
            failed=0,
            cold_start_misses=10,
            tokens=0,
        )
        for key, _, entry in _entries(scenario)
    }
    return Report(
        scenario=scenario,
        controller=controller,
        seed=seed,
        duration_s=3600.0,
        wall_s=0.0,
        requests=len(services) * REQUESTS,
        cost_usd=cost_usd,
        cost_usd_by=CostBy(unit={}, market={"spot": cost_usd}),
        services=services,
        launches=Launches(attempted=12, granted=4, refused={"no_capacity": 8}),
        first_refusal_to_each_rung_s={},
        direction_changes=2,
        priority_inversion_s=0.0,
        idle_reservation_h=0.0,
        violations=(),
    )


def world(job: Job) -> Outcome:
    """Ours: .97 for 100 USD, by its knob at what it asks for. A peer with multiplier k: .9 + .02 k, .96 at most, for
    60 + 30 k USD. A static plan: a tenth for each replica. The bound: 50 USD. Seeds differ by a little.
    """
    shift = 1.0 + 0.01 * (job.seed % 3)
    if job.controller == "lb1":
        return Outcome(
            bounds=({"at_zero_usd": 50.0, "per_met_usd": {key: 0.0 for key, _ in job.counts}, "sunk_usd": 0.0},)
        )
    if job.controller == "static":
        got = {key: min(1.0, 0.1 * count) for key, count in job.counts}
        cost_usd = 10.0 * sum(count for _, count in job.counts)
        return Outcome(report=reported(job.scenario, "static", job.seed, got, cost_usd), cpu_s=1.0)
    if job.controller in ("ours", "oracle-demand", "oracle-supply"):
        top = 0.97 if job.knob is None else job.knob
        usd = 100.0 if job.knob is None else 1000.0 * (job.knob - 0.87)
    else:
        knob = job.knob or 1.0
        top, usd = min(0.96, 0.9 + 0.02 * knob), 60.0 + 30.0 * knob
    return Outcome(report=report(job.scenario, job.controller, job.seed, top, shift * usd), cpu_s=1.0)


def world_with_a_cheap_peer(job: Job) -> Outcome:
    """As `world`, but HPA at × 4 attains .98 for 150 USD, and at ÷ 4 as much for 50."""
    if job.controller == "hpa" and job.knob in (0.25, 4.0):
        return Outcome(report=report(job.scenario, "hpa", job.seed, 0.98, 50.0 if job.knob == 0.25 else 150.0))
    return world(job)


def world_that_kills(job: Job) -> Outcome:
    """As `world`, but every run of KPA takes its process along, as one that is out of memory does."""
    if job.controller == "kpa":
        os._exit(9)
    return world(job)


def world_that_fails(job: Job) -> Outcome:
    """As `world`, but one run of HPA fails."""
    if job.controller == "hpa" and job.seed == 1:
        return Outcome(error="ValueError: nonsense")
    return world(job)


def only_ours(job: Job) -> Outcome:
    """As `world`, for ours and the bounds; nothing else may be run."""
    return world(job) if job.controller in ("ours", "lb1") else nowhere(job)


def world_killed_at_2(job: Job) -> Outcome:
    """As `world`, until the seed 2."""
    if job.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return world(job)


def nowhere(job: Job) -> Outcome:
    """Nothing may be run."""
    raise AssertionError(f"{job} was run again")


def world_that_waits(job: Job) -> Outcome:
    """Never answers; says which process it is in, in the file that is named as the scenario."""
    Path(job.scenario).write_text(str(os.getpid()))
    signal.pause()
    raise AssertionError("woken")
