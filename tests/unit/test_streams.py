"""Arrival streams: how many, when, how long, whatever way they are taken, and traces that cannot be used."""

# ruff: noqa: E501 - a table of file and message is read by the line
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.demand import TraceProblems
from chaos.engine.spec import SINGLE, RequestBatch
from chaos.scenario import Scenario, scenario_of
from chaos.streams import arrivals, check_traces, expected_requests, joined

HOUR_S = 3600.0
SERVICE = "support/chat"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
RATES = "t_minute,requests,input_tokens_est,output_tokens_est\n"


def scene(*demand: dict[str, Any], hours: float = 1.0, folder: Path | None = None, **more: Any) -> Scenario:
    """A scenario with one service and this demand."""
    service = {"name": "chat", "model": "meta-llama/Meta-Llama-3.1-8B", "goal": "latency", "slo": {"ttft_s": 1.0},
               "variants": [{"id": "l4", "instance_type": "g6.2xlarge"}]}  # fmt: skip
    data = {
        "name": "small",
        "duration_s": hours * HOUR_S,
        "policies": [{"unit": "support", "owner": "support@example.com", "services": [service]}],
        "demand": [{"service": SERVICE, **row} for row in demand],
        "supply": [],
        **more,
    }
    return scenario_of(data, folder)


def synthetic(kind: str, rps: float, **keys: Any) -> dict[str, Any]:
    """A demand with one synthetic profile."""
    return {"synthetic": {"kind": kind, "rps": rps, **keys}}


def taken(scenario: Scenario, seed: int = 1, step_s: float = 10.0) -> RequestBatch:
    """Everything, taken in steps; checks the contract of each step."""
    stream, parts, last_s = arrivals(scenario, SERVICE, seed), [], 0.0
    while last_s < scenario.duration_s:
        part = stream.take(last_s + step_s)
        assert np.all(np.diff(part.at_s) >= 0)
        assert len(part.at_s) == 0 or (part.at_s[0] >= last_s and part.at_s[-1] < last_s + step_s)
        parts.append(part)
        last_s += step_s
    return joined(parts)


def same(one: RequestBatch, other: RequestBatch) -> bool:
    """Equal to the last bit."""
    names = ("at_s", "input_tokens", "output_tokens", "prefix_tokens", "task")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def write(folder: Path, text: str) -> Path:
    """A trace in `folder`."""
    (folder / "trace.csv").write_text(text)
    return folder


# ---- rates and shapes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "row",
    [
        synthetic("constant", 40),
        synthetic("diurnal", 40, noise=0.1),
        synthetic("flash", 10, at_s=600.0) | {"cv": 4},
        synthetic("agents", 8),
        synthetic("rag", 5),
        synthetic("bursts", 20, on_s=300, off_s=300),
        synthetic("constant", 20) | {"scale": 2.5, "stretch": 3, "cv": 0.5},
    ],
    ids=lambda row: f"{row['synthetic']['kind']}-{row.get('scale', 1)}",
)
def test_a_seed_gives_the_same_requests_however_they_are_taken(row: dict[str, Any]) -> None:
    scenario = scene(row)
    whole = taken(scenario, step_s=HOUR_S)
    assert same(whole, taken(scenario, step_s=7.0))
    assert not same(whole, taken(scenario, seed=2, step_s=HOUR_S))


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_stated_variation(cv: float) -> None:
    batch = taken(scene(synthetic("constant", 50) | {"cv": cv}))
    gaps_s = np.diff(batch.at_s)
    assert len(batch.at_s) == pytest.approx(50 * HOUR_S, rel=0.03)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.05)


def test_a_day_has_its_peak_its_night_and_its_weekend() -> None:
    keys = {"peak_to_mean": 1.6, "peak_at_s": 43_200, "weekend": 0.5}
    weekday = taken(scene(synthetic("diurnal", 10, **keys), hours=24, start_at="2024-05-13T00:00:00Z"), step_s=HOUR_S)
    by_hour = np.histogram(weekday.at_s, np.arange(0, 25 * HOUR_S, HOUR_S))[0] / HOUR_S
    assert by_hour.mean() == pytest.approx(10, rel=0.02)
    assert (by_hour[11:13].mean(), by_hour[[0, 23]].mean()) == pytest.approx((16, 4), rel=0.05)
    sunday = taken(scene(synthetic("diurnal", 10, **keys), hours=24, start_at="2024-05-12T00:00:00Z"), step_s=HOUR_S)
    assert len(sunday.at_s) / len(weekday.at_s) == pytest.approx(0.5, rel=0.05)


def test_a_crowd_comes_within_a_minute_stays_and_goes() -> None:
    at_s = taken(scene(synthetic("flash", 20, at_s=600, hold_s=900, decay_s=600))).at_s
    rates = [
        np.sum((at_s >= start) & (at_s < end)) / (end - start) for start, end in ((0, 600), (660, 1560), (2160, 3600))
    ]
    assert rates == pytest.approx([20, 200, 20], rel=0.05)


def test_bursts_leave_silences() -> None:
    at_s = taken(scene(synthetic("bursts", 30, on_s=300, off_s=600), hours=12), step_s=HOUR_S).at_s
    assert at_s[0] == pytest.approx(0.0, abs=1.0)
    assert np.diff(at_s).max() > 60.0
    busy = np.histogram(at_s, np.arange(0, 12 * HOUR_S + 1, 60.0))[0] > 0
    assert 0.15 < busy.mean() < 0.6


def test_tokens_match_the_stated_mean_and_percentile() -> None:
    row = synthetic("constant", 60) | {"input_tokens": {"mean": 1624, "p99": 5800}, "output_tokens": 100}
    batch = taken(scene(row | {"prefix_share": 0.25}))
    assert batch.input_tokens.mean() == pytest.approx(1624, rel=0.02)
    assert np.percentile(batch.input_tokens, 99) == pytest.approx(5800, rel=0.04)
    assert batch.output_tokens.mean() == pytest.approx(100, rel=0.02)
    assert batch.prefix_tokens.sum() / batch.input_tokens.sum() == pytest.approx(0.25, rel=0.01)
    assert batch.output_tokens.min() >= 1


def test_retrieval_has_long_prompts_unless_it_says_otherwise() -> None:
    assert taken(scene(synthetic("rag", 20))).input_tokens.mean() == pytest.approx(12_000, rel=0.03)
    stated = taken(scene(synthetic("rag", 20, input_tokens=900)))
    assert stated.input_tokens.mean() == pytest.approx(900, rel=0.03)


def test_agents_are_tasks_of_five_to_ten_calls() -> None:
    scenario = scene(synthetic("agents", 5))
    tasks, batch = arrivals(scenario, SERVICE, 1).tasks, taken(scenario)
    assert (tasks.calls.min(), tasks.calls.max()) == (5, 10)
    assert batch.task.min() >= 0
    assert batch.task.max() < len(tasks.calls) == len(tasks.think_s) == len(tasks.grow_tokens)
    assert tasks.think_s.mean() == pytest.approx(2.0, rel=0.05)
    assert tasks.grow_tokens.mean() == pytest.approx(400, rel=0.05)


def test_several_demands_are_superposed_and_their_tasks_kept_apart() -> None:
    scenario = scene(
        synthetic("constant", 10), synthetic("agents", 3, calls=[1, 1]), synthetic("agents", 3, calls=[7, 7])
    )
    batch, tasks = taken(scenario), arrivals(scenario, SERVICE, 1).tasks
    single = batch.task == SINGLE
    assert single.sum() == pytest.approx(10 * HOUR_S, rel=0.05)
    assert set(tasks.calls[batch.task[~single]].tolist()) == {1, 7}


def test_a_demand_of_nothing_sends_nothing() -> None:
    assert len(taken(scene(synthetic("constant", 0)), step_s=HOUR_S).at_s) == 0


# ---- recorded -------------------------------------------------------------------------------------------------------
REQUESTS = "at_s,input_tokens,output_tokens,prefix_tokens\n0,100,10,50\n1,200,20,0\n4,300,30,0\n"


def test_a_request_trace_is_replayed_as_it_is_and_begun_again(tmp_path: Path) -> None:
    batch = taken(scene({"trace": "trace.csv"}, folder=write(tmp_path, REQUESTS), hours=0.02))  # 72 s, a round is 6
    assert batch.at_s[:5].tolist() == [0.0, 1.0, 4.0, 6.0, 7.0]
    assert batch.input_tokens[:4].tolist() == [100, 200, 300, 100]
    assert batch.prefix_tokens[:4].tolist() == [50, 0, 0, 50]
    assert len(batch.at_s) == 36


def test_a_request_trace_can_begin_later_and_be_stretched(tmp_path: Path) -> None:
    row = {"trace": "trace.csv", "start_s": 1, "stretch": 2.0}
    batch = taken(scene(row, folder=write(tmp_path, REQUESTS), hours=0.02))
    assert batch.at_s[:4].tolist() == [0.0, 6.0, 10.0, 12.0]
    assert batch.output_tokens[:4].tolist() == [20, 30, 10, 20]


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5, 15.0])
def test_scale_thins_or_superposes(tmp_path: Path, scale: float) -> None:
    rows = "".join(f"{number / 4},{number % 7 + 1},5\n" for number in range(4 * 1800))
    folder = write(tmp_path, "at_s,input_tokens,output_tokens\n" + rows)
    batch = taken(scene({"trace": "trace.csv", "scale": scale}, folder=folder))
    assert len(batch.at_s) == pytest.approx(4 * HOUR_S * scale, rel=0.03)
    assert batch.input_tokens.mean() == pytest.approx(4.0, rel=0.03)


def test_a_rate_trace_keeps_its_rates_and_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path, RATES + "0,6000,600000,60000\n10,60000,24000000,1200000\n20,0,0,0\n30,6000,600000,60000\n")
    batch = taken(scene({"trace": "trace.csv"}, folder=folder, hours=2 / 3))
    counts = np.histogram(batch.at_s, np.arange(0, 2401, 600.0))[0]
    assert counts.tolist() == pytest.approx([6000, 60_000, 0, 6000], rel=0.05)
    busy = (batch.at_s >= 600) & (batch.at_s < 1200)
    assert batch.input_tokens[busy].mean() == pytest.approx(400, rel=0.02)
    assert batch.output_tokens[~busy].mean() == pytest.approx(10, rel=0.05)


def test_a_missing_bin_lies_between_its_neighbours_and_is_mentioned(tmp_path: Path) -> None:
    folder = write(tmp_path, "t_minute,requests\n0,6000\n10,6000\n30,18000\n40,\n50,18000\n")
    scenario = scene({"trace": "trace.csv"}, folder=folder)
    counts = np.histogram(taken(scenario).at_s, np.arange(0, 3601, 600.0))[0]
    assert counts.tolist() == pytest.approx([6000, 6000, 12_000, 18_000, 18_000, 18_000], rel=0.06)
    assert check_traces(scenario) == (
        "demand of support/chat: trace.csv: 2 of 6 bins are missing; their rate lies between their neighbours'",
    )


def test_zero_is_missing_only_where_the_demand_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path, "t_minute,requests\n0,6000\n10,0\n20,6000\n30,6000\n")
    for missing, wanted in (("blank", 18_000), ("zero", 24_000)):
        scenario = scene({"trace": "trace.csv", "missing": missing}, folder=folder, hours=2 / 3)
        assert len(taken(scenario).at_s) == pytest.approx(wanted, rel=0.03)


def test_a_trace_that_counts_tokens_becomes_requests(tmp_path: Path) -> None:
    head = "t_minute,input_tokens_per_min,output_tokens_per_min\n"
    folder = write(tmp_path, head + "0,600000,60000\n30,600000,60000\n")
    batch = taken(scene({"trace": "trace.csv", "input_tokens": 1000}, folder=folder))
    assert len(batch.at_s) == pytest.approx(600 * 60, rel=0.03)
    assert batch.output_tokens.mean() == pytest.approx(100, rel=0.03)


@pytest.mark.parametrize(
    ("text", "row", "said"),
    [
        (AZURE + "2023-11-16 18:15:46,374\n", {}, ":2: row: 2 fields where the header has 3, the row is cut off"),
        (AZURE + "2023-11-16 18:15:46,374,4\n2023-11-16 18:15:45,374,4\n", {}, ":3: TIMESTAMP: 2023-11-16 18:15:45 is earlier"),
        (RATES + "0,-5,0,0\n10,1,1,1\n", {}, ":2: requests: -5 is not a count"),
        ("t_minute,requests\n0,1\n10,1\n9990,1\n", {}, ":4: t_minute: 997 bins of 600 s are missing before this row"),
        ("t_minute,requests\n0,\n10,\n", {}, ":3: requests: every bin is missing, give at least one with a count"),
        ("a,b\n1,2\n", {}, ":1: header: 'a,b' is not known"),
        (REQUESTS, {"start_s": 99.0}, ": lasts 4 s, so start_s 99 is after its end; lower it"),
        (REQUESTS, {"columns": {"time": "t", "value": "v"}}, "time = 't' is not in the header"),
        ("t_minute,requests\n0,1\n10,1\n", {"time_unit": "ms", "stretch": 1e-6}, "would be repeated"),
        (REQUESTS, {"scale": 1e5, "stretch": 1e-6}, "demand of support/chat: would send 1.8e+14 requests; lower scale"),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_used_says_so_before_anything_runs(
    tmp_path: Path, text: str, row: dict[str, Any], said: str
) -> None:
    scenario = scene({"trace": "trace.csv", **row}, folder=write(tmp_path, text))
    with pytest.raises(TraceProblems) as caught:
        check_traces(scenario)
    assert said in "\n".join(caught.value.problems)


def test_a_stand_in_runs_where_the_recording_is_absent(tmp_path: Path) -> None:
    row = {"trace": "trace.csv", **synthetic("constant", 5, input_tokens=50)}
    absent = scene(row, folder=tmp_path)
    assert absent.stand_ins() == (
        "demand of support/chat: trace.csv is not here ($QM_DATA), its synthetic stand-in runs",
    )
    assert taken(absent).input_tokens.mean() == pytest.approx(50, rel=0.05)
    present = scene(row, folder=write(tmp_path, REQUESTS))
    assert present.stand_ins() == ()
    assert set(taken(present).input_tokens.tolist()) == {100, 200, 300}


RECORDED = (
    "azure_2023_conv_requests",
    "azure_2024_conv_week_10min",
    "azure_2024_conv_week_tokens_30min",
    "mooncake_conversation_requests",
    "servegen_deepseek_r1_1d_10min",
    "servegen_m_small_14d_10min",
)


# ---- cost -----------------------------------------------------------------------------------------------------------
def test_millions_of_requests_take_seconds_and_no_memory() -> None:
    scenario = scene(synthetic("diurnal", 800, peak_to_mean=1.0), hours=1)
    assert expected_requests(scenario, SERVICE) == pytest.approx(800 * HOUR_S)
    began_s = time.process_time()
    stream, sent = arrivals(scenario, SERVICE, 1), 0
    for step in range(360):
        sent += len(stream.take(10.0 * (step + 1)).at_s)
    assert sent == pytest.approx(800 * HOUR_S, rel=0.01)
    assert sent / (time.process_time() - began_s) > 2_000_000  # five and more where nothing else runs


@pytest.mark.data
@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_demand_is_known_by_its_header(name: str, qm_data: Path) -> None:
    assert qm_data.is_dir()
    scenario = scene({"trace": f"demand/{name}.csv", "scale": 0.1}, hours=0.5)
    assert check_traces(scenario) == ()
    assert len(taken(scenario).at_s) == pytest.approx(expected_requests(scenario, SERVICE), rel=0.4)
