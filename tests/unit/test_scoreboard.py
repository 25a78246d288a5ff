"""The scoreboard: knobs chosen in hindsight, rows over other seeds, dominance and claims, killed and failed runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from autoscaler.commands.outcome import BadInput
from chaos.bounds.static import Search, Trial
from chaos.scoreboard import command, jobs
from chaos.scoreboard.figures import Point, Scoreboard, Series, as_cheap, as_good, best_knob, claim, dominates, interval
from chaos.scoreboard.jobs import Job, Store, digest
from chaos.scoreboard.plan import FRACTIONS, MULTIPLIERS, Asked, measure
from chaos.scoreboard.pool import Pool
from tests import bench_fakes

ASKED = Asked(scenarios=("three_units",), controllers=("ours", "hpa", "kpa", "static"), seeds=(0, 1, 2))


def pool(folder: Path | None = None, work: str = "world", processes: int = 1) -> Pool:
    """A pool over a fake world."""
    return Pool(Store(folder), processes, getattr(bench_fakes, work))


def points(*pairs: tuple[float, float]) -> list[Point]:
    """Points of (attainment, cost), knobs 0, 1, …"""
    return [
        Point(scenario="s", controller="hpa", knob=float(knob), attainment_top=top, cost_usd=usd)
        for knob, (top, usd) in enumerate(pairs)
    ]


def test_the_multipliers_and_fractions_are_evenly_spaced_in_their_logarithm() -> None:
    assert (MULTIPLIERS[0], MULTIPLIERS[3], MULTIPLIERS[6]) == (0.25, 1.0, 4.0)
    assert np.ptp(np.diff(np.log(MULTIPLIERS))) < 1e-12
    assert (FRACTIONS[0], FRACTIONS[-1], len(FRACTIONS)) == (0.9, 0.999, 5)


@pytest.mark.parametrize(
    ("pairs", "best"),
    [
        ([(0.90, 10.0), (0.96, 30.0), (0.97, 20.0), (0.99, 40.0)], 2),  # the cheapest within the objective
        ([(0.90, 10.0), (0.94, 30.0), (0.94, 20.0), (0.91, 40.0)], 2),  # none within: attains most, then cheapest
    ],
)
def test_the_best_point_in_hindsight(pairs: list[tuple[float, float]], best: int) -> None:
    assert best_knob(points(*pairs), 0.95).knob == best


def test_a_peer_dominates_with_as_much_attained_at_two_percent_less() -> None:
    assert dominates(0.95, 98.0, 0.95, 100.0)
    assert not dominates(0.95, 98.1, 0.95, 100.0)
    assert not dominates(0.9499, 10.0, 0.95, 100.0)


def test_points_of_our_curve_that_answer_a_peer() -> None:
    curve = points((0.9, 10.0), (0.95, 20.0), (0.96, 15.0), (0.99, 40.0))
    equal, cheap = as_good(curve, 0.95), as_cheap(curve, 25.0)
    assert equal is not None
    assert cheap is not None
    assert (equal.cost_usd, cheap.attainment_top) == (15.0, 0.96)
    assert as_good(curve, 0.995) is None
    assert as_cheap(curve, 5.0) is None


def test_intervals_are_paired() -> None:
    ours = np.array([10.0, 20.0, 40.0, 80.0])
    ratio = interval("s", ours, 2.0 * ours)
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))
    alone = interval("s", ours)
    assert alone.low < alone.mean == 37.5 < alone.high
    assert interval("s", ours) == alone


def test_a_claim_says_how_much_cheaper_and_how_many_fewer_misses() -> None:
    def series(who: str, top: float, usd: float) -> Series:
        reports = tuple(bench_fakes.report("calm", who, seed, top, usd) for seed in range(3))
        return Series("s", who, None, reports, np.full(3, np.nan))

    found = claim(series("hpa", 0.94, 100.0), series("ours", 0.94, 60.0), series("ours", 0.98, 99.0))
    assert found.cheaper is not None
    assert found.fewer_misses is not None
    assert (found.cheaper.mean, found.fewer_misses.mean) == pytest.approx((0.4, 3.0))


# ---- the whole, over a fake world -----------------------------------------------------------------------------------
def board(work: str = "world", folder: Path | None = None, processes: int = 1) -> Scoreboard:
    """The scoreboard of ASKED."""
    return measure(ASKED, pool(folder, work, processes))


def test_every_controller_has_a_row_over_the_seeds_and_knobs_were_chosen_on_others() -> None:
    found = board()
    assert found.sweep_seeds == (3, 4)
    rows = {(row.controller, row.knob): row for row in found.rows}
    assert {who for who, _ in rows} == {"ours", "hpa", "kpa", "static"}
    ours, hpa = rows["ours", None], rows["hpa", next(knob for who, knob in rows if who == "hpa")]
    assert ours.seeds == hpa.seeds == (0, 1, 2)
    # .9 + .02 k reaches .95 at k = 2.5, so that the first multiplier that does is 2.52.
    assert hpa.knob == pytest.approx(4.0 ** (2 / 3))
    assert ours.cost_usd.mean == pytest.approx(101.0)
    assert ours.lb1_usd == pytest.approx(50.0)
    assert ours.regret_lb1 == pytest.approx(101.0 / 50.0 - 1.0)
    assert ours.attainment_by_priority == pytest.approx({"900": 0.97, "500": 0.5, "100": 0.5})
    assert ours.refused_per_grant == 2.0
    assert len([each for each in found.sweeps if each.controller == "hpa"]) == 7
    assert found.dominated_by == ()
    assert found.failures == ()


def test_the_oracles_run_on_half_of_the_seeds() -> None:
    asked = Asked(scenarios=("calm",), controllers=("ours", "oracle-demand"), seeds=(0, 1, 2))
    rows = {row.controller: row.seeds for row in measure(asked, pool()).rows}
    assert rows == {"ours": (0, 1, 2), "oracle-demand": (0, 1)}


def test_the_static_plan_is_the_smallest_that_meets_every_objective() -> None:
    static = next(row for row in board().rows if row.controller == "static")
    # A tenth for each replica: ten for 95 %, nine for 90 %, but no more than eight of the backlog are allowed.
    assert static.attainment_by_priority == pytest.approx({"900": 1.0, "500": 0.9, "100": 0.8})
    assert static.cost_usd.mean == pytest.approx(10.0 * (10 + 9 + 8))


def test_a_knob_that_dominates_is_not_hidden_by_the_rule_for_the_best() -> None:
    found = board("world_with_a_cheap_peer")
    assert [(each.controller, each.knob) for each in found.dominated_by] == [("hpa", 0.25)]


def test_our_curve_answers_the_best_peer() -> None:
    (found,) = board().claims
    assert found.peer in ("hpa", "kpa")
    assert found.cheaper_knob in FRACTIONS
    assert found.cheaper is not None
    assert found.cheaper.low <= found.cheaper.mean <= found.cheaper.high


def test_what_was_run_is_not_run_again(tmp_path: Path) -> None:
    first = board(folder=tmp_path)
    assert board("nowhere", tmp_path) == first
    assert first.spent_s["ours"] > first.spent_s["static"] > 0.0


@pytest.mark.parametrize("damage", ["", "[1]", '{"report": ', '{"report": null}'])
def test_a_damaged_result_is_made_again(tmp_path: Path, damage: str) -> None:
    first = board(folder=tmp_path)
    for path in tmp_path.iterdir():
        path.write_text(damage, encoding="utf-8")
    assert board(folder=tmp_path) == first


def test_a_failed_run_is_reported_and_its_row_left_out() -> None:
    found = board("world_that_fails")
    assert {(each.controller, each.seed, each.error) for each in found.failures} == {("hpa", 1, "ValueError: nonsense")}
    assert "hpa" not in {row.controller for row in found.rows}
    assert "kpa" in {row.controller for row in found.rows}


def test_a_run_that_kills_its_process_is_reported_and_all_others_are_done(tmp_path: Path) -> None:
    asked = [Job("calm", "hpa", None, seed) for seed in range(4)]
    asked.insert(1, Job("calm", "kpa", None, 0))
    outcomes = pool(tmp_path, "world_that_kills", processes=2).do("runs", asked)
    assert {job.controller for job, outcome in outcomes.items() if outcome.error} == {"kpa"}
    assert all(outcome.report for job, outcome in outcomes.items() if job.controller != "kpa")


def test_the_processes_of_a_bench_that_is_killed_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    asked = [Job(str(file), "hpa", None, 0), Job(str(tmp_path / "other"), "hpa", None, 0)]
    code = (
        "from tests.unit.test_scoreboard import Job, pool\n"
        f"if __name__ == '__main__': pool(None, 'world_that_waits', 2).do('runs', {asked!r})"
    )
    script = tmp_path / "bench.py"
    script.write_text(code)
    bench = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(jobs.ROOT)})
    try:
        assert until(lambda: file.exists() and file.read_text() != "")
        worker = psutil.Process(int(file.read_text()))
    finally:
        bench.kill()
        bench.wait()
    assert until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def until(true: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Whether it becomes true in time."""
    end_s = time.monotonic() + limit_s
    while not true() and time.monotonic() < end_s:
        time.sleep(0.05)
    return true()


# ---- what a result depends on ---------------------------------------------------------------------------------------
def test_a_result_is_kept_under_everything_it_depends_on(tmp_path: Path) -> None:
    job = Job("calm", "hpa", 1.0, 1)
    others = [
        replace(job, scenario="flash"),
        replace(job, controller="kpa"),
        replace(job, knob=2.0),
        replace(job, seed=2),
        replace(job, counts=(("support/chat", 1),)),
    ]
    assert len({digest(job), *map(digest, others)}) == 6
    file = tmp_path / "mine.yaml"
    text = (Path(jobs.ROOT) / "chaos/scenarios/calm.yaml").read_text()
    file.write_text(text)
    mine = replace(job, scenario=str(file))
    before = digest(mine)
    jobs._scenario.cache_clear()
    jobs._content.cache_clear()
    file.write_text(text.replace("max_replicas: 64", "max_replicas: 63"))
    assert digest(mine) != before


def test_a_peers_results_do_not_depend_on_our_controller_but_on_the_world_and_the_capacity_model() -> None:
    theirs, ours, bound = (jobs._sources(who) for who in ("hpa", "ours", "lb1"))
    assert {"autoscaler/core/decide.py", "autoscaler/loop.py", "forecasting/model.py"} <= ours - theirs
    assert {"chaos/peers/pairs.py", "chaos/peers/ray_serve.py"} <= theirs - ours
    assert {"autoscaler/core/capacity.py", "chaos/world/world.py", "serve_apps/timing.py"} <= theirs & ours
    assert "chaos/bounds/lower.py" in bound - ours
    unused = ("chaos/live/", "chaos/ec2_server/", "autoscaler/commands/", "serve_apps/gateway/", "chaos/scoreboard/")
    assert not any(path.startswith(unused) for path in theirs | ours | bound)


def test_results_of_another_version_count_when_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when all peers were run at one commit and ours at a later one."""
    board(folder=tmp_path)
    version = jobs._code
    monkeypatch.setattr(jobs, "_code", lambda who: version(who) if who == "ours" else f"later{version(who)}")
    assert pool(tmp_path).store.get(Job("three_units", "hpa", 1.0, 0)) is None
    merged = measure(ASKED, Pool(Store(tmp_path, older=True), 1, bench_fakes.only_ours))
    first = board(folder=None)
    assert (merged.rows, merged.claims) == (first.rows, first.claims)
    assert merged.older > 0


def test_a_bench_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed by -9 in its third run: two are kept whole, and only the others are made by the next."""
    asked = [Job("calm", "hpa", None, seed) for seed in range(4)]
    code = (
        "from tests.unit.test_scoreboard import Job, Path, pool\n"
        f"pool(Path({str(tmp_path)!r}), 'world_killed_at_2').do('runs', {asked!r})"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=jobs.ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    kept = Store(tmp_path)
    assert [kept.get(job) is not None for job in asked] == [True, True, False, False]
    again = pool(tmp_path)
    assert all(outcome.report for outcome in again.do("runs", asked).values())
    assert again.reused == 2


def test_two_benches_in_one_folder_are_one_too_many(tmp_path: Path) -> None:
    with (
        command._alone(tmp_path),
        pytest.raises(BadInput, match="another qm bench is at work there; wait for it, or give a folder"),
        command._alone(tmp_path),
    ):
        pytest.fail("both are at work")
    with command._alone(tmp_path):
        pass


# ---- the search for a static plan -----------------------------------------------------------------------------------
@pytest.mark.parametrize("needs", [{"a": 3, "b": 17}, {"a": 0, "b": 1}, {"a": 64, "b": 64}])
def test_the_search_finds_what_each_service_needs(needs: dict[str, int]) -> None:
    search = Search(fraction={"a": 0.95, "b": 0.9}, most={"a": 64, "b": 64})
    while (plan := search.plan()) is not None:
        got: dict[str, float | None] = {key: 1.0 if count >= needs[key] else 0.5 for key, count in plan}
        search.tell(plan, Trial(got, float(sum(count for _, count in plan))))
    assert dict(search.best()) == needs


def test_where_nothing_suffices_the_important_service_is_met_best() -> None:
    search = Search(fraction={"top": 0.95, "low": 0.9}, most={"top": 10, "low": 10})
    while (plan := search.plan()) is not None:
        count = dict(plan)
        short = max(0, count["top"] + count["low"] - 10)  # ten in all
        got: dict[str, float | None] = {"top": min(1.0, count["top"] / 8 - 0.05 * short), "low": count["low"] / 20}
        search.tell(plan, Trial(got, float(sum(count.values()))))
    assert dict(search.best())["top"] >= 7
