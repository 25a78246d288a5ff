"""Pool sizes: fixed, stepped, recorded, stood in for; windows; and supply traces that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.demand import TraceProblems
from chaos.pools import available, check_supply
from chaos.scenario import Scenario, scenario_of

HEAD = "t_seconds,zone,available_nodes\n"


def scene(count: Any, folder: Path | None = None, **keys: Any) -> Scenario:
    """A scenario of ten hours with one pool."""
    service = {"name": "chat", "model": "meta-llama/Meta-Llama-3.1-8B", "goal": "latency", "slo": {"ttft_s": 1.0},
               "variants": [{"id": "l4", "instance_type": "g6.2xlarge"}]}  # fmt: skip
    row = {"id": "pool", "instance_type": "g6.2xlarge", "market": "spot", "count": count, **keys}
    data = {
        "name": "small",
        "duration_s": 36_000,
        "policies": [{"unit": "support", "owner": "support@example.com", "services": [service]}],
        "demand": [{"service": "support/chat", "synthetic": {"kind": "constant", "rps": 1.0}}],
        "supply": [row],
    }
    return scenario_of(data, folder)


def size(count: Any, folder: Path | None = None, **keys: Any) -> list[tuple[float, int]]:
    """Steps of the pool, as pairs."""
    found = available(scene(count, folder, **keys), "pool", 1)
    return list(zip(found.at_s.tolist(), found.count.tolist(), strict=True))


def write(folder: Path, text: str) -> Path:
    """A supply trace in `folder`."""
    (folder / "pools.csv").write_text(text)
    return folder


def test_a_number_holds_and_a_window_opens_and_closes_it() -> None:
    assert size(4) == [(0.0, 4)]
    assert size(4, start_s=100, end_s=500) == [(0.0, 0), (100.0, 4), (500.0, 0)]


def test_steps_change_it() -> None:
    assert size({"steps": [[0, 4], [50, 1], [70, 1], [90, 6]]}, start_s=60) == [(0.0, 0), (60.0, 1), (90.0, 6)]


def test_a_recorded_pool_is_scaled_down_to_whole_instances_and_its_last_value_holds(tmp_path: Path) -> None:
    folder = write(tmp_path, HEAD + "0,a,4\n0,b,1\n100,a,3\n200,a,0\n200,a,1\n300,b,9\n400,a,END\n")
    recorded = {"trace": "pools.csv", "key": "a", "scale": 1.5}
    assert size(recorded, folder) == [(0.0, 6), (100.0, 4), (200.0, 1)]
    assert size({**recorded, "from_s": 150}, folder) == [(0.0, 4), (50.0, 1)]


def test_a_stand_in_is_up_and_down_as_long_as_it_says() -> None:
    found = available(scene({"most": 5, "up_s": 300, "down_s": 100}), "pool", 3)
    assert set(found.count.tolist()) == {0, 5}
    lengths_s = np.diff(np.append(found.at_s, 36_000.0))
    assert np.sum(lengths_s * (found.count == 5)) / 36_000 == pytest.approx(0.75, abs=0.1)


def test_a_stand_in_runs_where_the_recording_is_absent() -> None:
    scenario = scene({"trace": "none.csv", "key": "a", "synthetic": {"most": 5, "up_s": 300, "down_s": 100}})
    assert scenario.stand_ins() == ("supply pool: none.csv is not here ($QM_DATA), its synthetic stand-in runs",)
    assert set(available(scenario, "pool", 1).count.tolist()) == {0, 5}


def test_each_seed_and_each_pool_has_its_own_outages() -> None:
    scenario = scene({"most": 5, "up_s": 300, "down_s": 100})
    assert np.array_equal(available(scenario, "pool", 1).at_s, available(scenario, "pool", 1).at_s)
    assert not np.array_equal(available(scenario, "pool", 1).at_s, available(scenario, "pool", 2).at_s)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: header: '' is not t_seconds,zone,available_nodes, give a supply trace"),
        (HEAD, ":1: there are no rows after the header, give at least one"),
        (HEAD + "0,a,1\n5,a\n", ":3: row: 2 fields where the header has 3, the row is cut off"),
        (HEAD + "9,a,1\n5,a,1\n", ":3: t_seconds: 5 is earlier than the row before of a, sort the file by time"),
        (HEAD + "0,a,-1\n", ":2: available_nodes: -1 is not from 0 to"),
        (HEAD + "0,a,nan\n", ":2: available_nodes: nan is not from 0 to"),
        (HEAD + "x,a,1\n", ":2: t_seconds: 'x' is not a number"),
        (HEAD + "0,b,1\n", ": has no zone a; known: b"),
    ],
)
def test_a_supply_trace_that_cannot_be_used_says_so(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceProblems) as caught:
        check_supply(scene({"trace": "pools.csv", "key": "a"}, write(tmp_path, text)))
    assert said in "\n".join(caught.value.problems)


def test_a_window_after_the_recordings_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceProblems, match="ends before from_s 500; lower it"):
        check_supply(scene({"trace": "pools.csv", "key": "a", "from_s": 500}, write(tmp_path, HEAD + "0,a,1\n")))
