"""Traces: what is read, what is refused and in which words, and the statistics of what is generated."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chaos.demand import Rates, Trace, TraceProblems, TraceUnreadable, generated, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def _refusal(path: Path, **options: object) -> str:
    with pytest.raises(TraceProblems) as caught:
        read_trace(path, **options)  # type: ignore[arg-type]
    assert all(problem.startswith(f"{path}:") for problem in caught.value.problems)
    return "\n".join(problem.removeprefix(f"{path}:") for problem in caught.value.problems)


def test_azure_rows_with_seven_decimals(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    trace = read_trace(_file(tmp_path, AZURE + rows))
    assert isinstance(trace, Trace)
    np.testing.assert_allclose(trace.at_s, [0.0, 4.314579], atol=1e-5)
    assert trace.input_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]


def test_mooncake_prefix_blocks_become_tokens_within_the_prompt(tmp_path: Path) -> None:
    trace = read_trace(
        _file(tmp_path, "t_ms,input_tokens,output_tokens,prefix_hit_blocks_inf,blocks\n0,700,5,1,2\n1500,600,5,2,2\n")
    )
    assert isinstance(trace, Trace)
    assert trace.at_s.tolist() == [0.0, 1.5]
    assert trace.prefix_tokens.tolist() == [512, 600]


def test_rates_per_bin_and_per_minute(tmp_path: Path) -> None:
    per_bin = read_trace(
        _file(tmp_path, "t_minute,requests,input_tokens_est,output_tokens_est\n0,600,6000,1200\n10,0,0,0\n")
    )
    assert isinstance(per_bin, Rates)
    assert per_bin.rps.tolist() == [1.0, 0.0]
    assert per_bin.input_tokens.tolist() == [10.0, 0.0]
    assert per_bin.output_tokens.tolist() == [2.0, 0.0]
    per_min = read_trace(_file(tmp_path, "t_minute,requests_per_min_mid,requests_per_min_low\n0,60,1\n10,120,1\n"))
    assert isinstance(per_min, Rates)
    assert per_min.rps.tolist() == [1.0, 2.0]


def test_named_columns_units_and_sessions(tmp_path: Path) -> None:
    path = _file(tmp_path, "when,in,out,who,x\n0,10,2,a,9\n2,11,3,b,9\n")
    trace = read_trace(path, {"time": "when", "input_tokens": "in", "output_tokens": "out", "session": "who"}, "min")
    assert isinstance(trace, Trace)
    assert trace.at_s.tolist() == [0.0, 120.0]
    assert trace.sessions == ("a", "b")
    assert trace.mean_rps == pytest.approx(1 / 120)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: header: the file is empty, give a CSV file with a header and rows"),
        (AZURE, "1: row: there are no rows after the header, give at least one request"),
        (
            AZURE + "2023-11-16 18:15:46,374\n",
            "2: row: 2 fields where the header has 3, the row is cut off or has extra commas",
        ),
        (
            AZURE + "2023-11-16 18:15:46,-3,4\n",
            "2: ContextTokens: -3 is not a count, use a finite number that is not negative",
        ),
        (
            AZURE + "2023-11-16 18:15:46,nan,4\n",
            "2: ContextTokens: nan is not a count, use a finite number that is not negative",
        ),
        (AZURE + "2023-11-16 18:15:46,x,4\n", "2: ContextTokens: 'x' is not a number, correct or remove the row"),
        (
            AZURE + "2023-11-16 18:15:46,3,4\n2023-11-16 18:15:45,3,4\n",
            "3: TIMESTAMP: 2023-11-16 18:15:45 is earlier than the row before, sort the file by time",
        ),
        (
            AZURE + "yesterday,3,4\n",
            "2: TIMESTAMP: 'yesterday' is not an ISO 8601 time, correct the row or give the time unit",
        ),
        ("t_minute,requests\n0,5\n", "2: row: fewer than two bins, so their length is unknown, give at least two"),
        (
            "at_s,input_tokens,output_tokens\n1e15,3,4\n",
            "2: at_s: 1e15 is too far away for a number of s, correct the row or give the time unit",
        ),
        (
            "at_s,input_tokens,output_tokens\n0,3,4\n31622401,3,4\n",
            "3: at_s: 31622401 is more than 366 days after the first row, split the file",
        ),
        (
            AZURE + "2023-11-16 18:15:46,3,999999999999\n",
            "2: GeneratedTokens: 999999999999 is more than 10,000,000, correct or remove the row",
        ),
        (
            "t_minute,requests\n0,5\n10,1e12\n",
            "3: requests: 1e12 is more than 1,000,000,000, correct or remove the row",
        ),
        (
            "t_minute,requests,input_tokens_est,output_tokens_est\n0,2,5,5\n10,2,5,20000001\n",
            "3: output_tokens_est: 20000001 is more than 20,000,000, correct or remove the row",
        ),
        (
            AZURE + "2023-11-16 18:15:46,3,4\n" + "x" * 200_000 + "\n",
            "3: row: is not CSV (field larger than field limit (131072)), correct or remove the row",
        ),
        ("t_minute,requests\n0,5\n0,6\n5,5\n", "3: t_minute: the same time twice, give each bin once"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, text: str, message: str) -> None:
    refusal = _refusal(_file(tmp_path, text))
    assert refusal.startswith(message)


def test_unknown_header_lists_the_known_ones(tmp_path: Path) -> None:
    refusal = _refusal(_file(tmp_path, "a,b\n1,2\n"))
    assert refusal.startswith(
        "1: header: 'a,b' is not known, use one of (TIMESTAMP,ContextTokens,GeneratedTokens; t_ms,"
    )


def test_a_named_column_that_is_not_there(tmp_path: Path) -> None:
    refusal = _refusal(_file(tmp_path, "a,b\n1,2\n"), columns={"time": "a", "requests": "c"})
    assert refusal == "1: columns: requests = 'c' is not in the header, choose from a, b"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "No such file or directory"),
        (Path.mkdir, "Not a regular file"),
        (os.mkfifo, "Not a regular file"),
    ],
)
def test_what_cannot_be_opened_is_one_problem_without_a_line(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "t.csv"
    make(path)
    with pytest.raises(TraceUnreadable) as caught:
        read_trace(path)
    assert caught.value.problems == (f"{path}: {why}; give a CSV file with a header",)


def test_a_binary_file_is_refused_at_its_first_such_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(AZURE.encode() + b"\xff\xfe\n")
    assert _refusal(path) == "2: file: is not UTF-8 text, give a CSV file with a header"


def test_the_limits_themselves_are_accepted(tmp_path: Path) -> None:
    path = _file(tmp_path, "at_s,input_tokens,output_tokens\n0,1,1\n31622400,10000000,10000000\n")
    assert len(read_trace(path).at_s) == 2  # type: ignore[union-attr]
    assert isinstance(read_trace(_file(tmp_path, "t_minute,requests\n0,1e9\n10,0\n")), Rates)


def test_every_bad_row_is_listed(tmp_path: Path) -> None:
    refusal = _refusal(_file(tmp_path, AZURE + "2023-11-16 18:15:46,-3,4\n2023-11-16 18:15:47,3\n"))
    assert [line.split(":")[0] for line in refusal.splitlines()] == ["2", "3"]


def test_generated_has_the_published_statistics() -> None:
    trace = generated(1, 3600.0)
    assert trace.mean_rps == pytest.approx(5.5, rel=0.03)
    assert np.percentile(trace.input_tokens, 50) == pytest.approx(1020, rel=0.03)
    assert np.percentile(trace.input_tokens, 99) == pytest.approx(4142, rel=0.08)
    assert np.percentile(trace.output_tokens, 50) == pytest.approx(129, rel=0.03)
    assert np.percentile(trace.output_tokens, 99) == pytest.approx(601, rel=0.08)
    gaps_s = np.diff(trace.at_s)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.09, abs=0.05)


def test_generated_is_a_function_of_its_seed() -> None:
    assert np.array_equal(generated(3, 60.0).at_s, generated(3, 60.0).at_s)
    assert not np.array_equal(generated(3, 60.0).at_s, generated(4, 60.0).at_s)


def test_rates_become_arrivals_at_their_rate_with_the_stated_burstiness() -> None:
    zero = np.zeros(2)
    rates = Rates(
        "r", "r", np.array([0.0, 1000.0]), np.array([1000.0, 1000.0]), np.array([1.0, 5.0]), zero + 100.0, zero
    )
    trace = rates.arrivals(1, duration_s=2000.0, cv=2.0)
    assert ((trace.at_s >= 0) & (trace.at_s < 2000)).all()
    assert np.sum(trace.at_s < 1000) == pytest.approx(1000, rel=0.2)
    assert np.sum(trace.at_s >= 1000) == pytest.approx(5000, rel=0.1)
    gaps_s = np.diff(trace.at_s[trace.at_s >= 1000])
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(2.0, rel=0.1)
    assert trace.input_tokens.mean() == pytest.approx(100, rel=0.05)
    late = rates.arrivals(1, duration_s=500.0, offset_s=1000.0, scale=0.5)
    assert len(late) == pytest.approx(1250, rel=0.1)
