"""Scenarios: what is read, what is refused and in which words, overrides, durations, faults, and the shipped suite."""

# ruff: noqa: E501 - a table of value and message is read by the line
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.faults import KINDS
from chaos.scenario import (
    Dist,
    Scenario,
    ScenarioProblems,
    load_scenario,
    public_scenarios,
    scenario_of,
    scenario_schema,
)
from policies.problems import Problems

UNIT = """unit: support
owner: support@example.com
services:
  - name: chat
    model: meta-llama/Meta-Llama-3.1-8B
    goal: latency
    slo: {ttft_s: 1.0}
    variants: [{id: l4, instance_type: g6.2xlarge}]
"""
PLAIN = """name: small
duration_s: 3600
policies: units
demand:
  - {service: support/chat, synthetic: {kind: constant, rps: 3}}
supply:
  - {id: g6-1a, instance_type: g6.2xlarge, zone: us-east-1a, market: on_demand, count: 9}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small scenario whose policies lie in a folder beside it."""
    (tmp_path / "units").mkdir()
    (tmp_path / "units" / "support.yaml").write_text(UNIT)
    path = tmp_path / "small.yaml"
    path.write_text(PLAIN)
    return path


def refusal(file: Path, *overrides: str) -> list[str]:
    """What a person reads, without the folder."""
    with pytest.raises(Problems) as caught:
        load_scenario(file, overrides)
    return [str(problem).replace(f"{file.parent}/", "") for problem in caught.value.problems]


def with_lines(file: Path, old: str, new: str) -> list[str]:
    """What is said when a part of the file reads otherwise."""
    assert old in PLAIN
    file.write_text(PLAIN.replace(old, new))
    return refusal(file)


def inline(**changes: Any) -> dict[str, Any]:
    """The same scenario as plain values, its policy inline."""
    service = {"name": "chat", "model": "meta-llama/Meta-Llama-3.1-8B", "goal": "latency", "slo": {"ttft_s": 1.0},
               "variants": [{"id": "l4", "instance_type": "g6.2xlarge"}]}  # fmt: skip
    return {
        "name": "small",
        "duration_s": 3600,
        "policies": [{"unit": "support", "owner": "support@example.com", "services": [service]}],
        "demand": [{"service": "support/chat", "synthetic": {"kind": "constant", "rps": 3}}],
        "supply": [{"id": "g6-1a", "instance_type": "g6.2xlarge", "market": "on_demand", "count": 9}],
        **changes,
    }


# ---- what is read ---------------------------------------------------------------------------------------------------
def test_a_folder_and_an_inline_policy_are_the_same(file: Path) -> None:
    assert load_scenario(file).policy_set == scenario_of(inline()).policy_set


def test_what_is_not_stated_is_the_catalogues(file: Path) -> None:
    scenario = load_scenario(file)
    assert scenario.price("g6-1a") == scenario.catalogue_set.instance_types["g6.2xlarge"].on_demand_usd_per_h
    assert scenario.boot_s("g6-1a").mean == scenario.catalogue_set.instance_types["g6.2xlarge"].boot_s
    assert scenario.load_s("g6-1a", "support/chat", "l4").mean == scenario.shapes[0].load_prior_s


def test_load_may_differ_by_variant(file: Path) -> None:
    scenario = load_scenario(file, ["supply.0.load_s={l4: {dist: constant, mean: 77}}"])
    assert scenario.load_s("g6-1a", "support/chat", "l4").draw(np.random.default_rng(1)) == 77.0


def test_a_scenario_as_plain_values_reads_back() -> None:
    scenario = scenario_of(inline(quotas=[{"family": "g6", "market": "spot", "gpus": 4}]))
    assert scenario_of(json.loads(json.dumps(scenario.model_dump(mode="json")))) == scenario


def test_the_catalogue_can_be_overridden(file: Path) -> None:
    scenario = load_scenario(file, ["catalogue.instance_types={g6.2xlarge: {on_demand_usd_per_h: 7.5}}"])
    assert scenario.price("g6-1a") == 7.5


def test_the_schema_allows_both_kinds_of_policies_and_lists_the_faults() -> None:
    schema = scenario_schema()
    assert [each["type"] for each in schema["properties"]["policies"]["anyOf"]] == ["string", "array"]
    assert all(kind in json.dumps(schema["$defs"]["Fault"]) for kind in KINDS)


# ---- overrides ------------------------------------------------------------------------------------------------------
def test_overrides_reach_into_lists_maps_and_policy_files(file: Path) -> None:
    scenario = load_scenario(
        file,
        [
            "policies.0.services.0.slo.fraction=.95",
            "policies.support.services.chat.max_replicas=3",
            "supply.g6-1a.count=2",
            "demand.1={service: support/chat, synthetic: {kind: rag, rps: 1}}",
            "seed=4",
        ],
    )
    service = scenario.policy_set.units[0].services[0]
    assert (service.slo.fraction, service.max_replicas, service.slo.ttft_s) == (0.95, 3, 1.0)
    assert (scenario.supply[0].count, len(scenario.demand), scenario.seed) == (2, 2, 4)


def test_a_later_override_wins_and_the_file_is_not_changed(file: Path) -> None:
    assert load_scenario(file, ["seed=4", "seed=5"]).seed == 5
    assert load_scenario(file).seed == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed", "--set seed: is not KEY=VALUE; write it like demand.0.scale=2"),
        ("a..b=1", "--set a..b=1: is not KEY=VALUE; write it like demand.0.scale=2"),
        ("seed=[1", "--set seed=[1: the value is not valid YAML: did not find expected ',' or ']'; mend the syntax"),
        ("sed=1", "--set sed=1: sed: is not a known key; did you mean seed?"),
        ("seed=-1", "--set seed=-1: seed: is -1; it must be at least 0"),
        ("supply.7.count=1", "--set supply.7.count=1: supply has 1 items, none of them 7; use 0 to 1, or an id"),
        ("name.x.y=1", '--set name.x.y=1: name is "small", which has no x; correct the key'),
        ("policies.3.unit=a", "--set policies.3.unit=a: policies has 1 items, none of them 3; use 0 to 1, or an id"),
        ("policies.1.unit=a", "--set policies.1.unit=a: policies has 1 units; use 0 to 0, or a unit's name"),
        ("policies.0.services.0.slo.fraction=2", "--set policies.0.services.0.slo.fraction=2: services[chat].slo.fraction: is 2; it must be less than 1"),
        ("policies=elsewhere", "--set policies=elsewhere: policies: the folder elsewhere does not exist; give a folder of policy files"),
    ],
)  # fmt: skip
def test_an_override_that_cannot_be_says_so(file: Path, override: str, said: str) -> None:
    assert refusal(file, override) == [said]


# ---- what is refused ------------------------------------------------------------------------------------------------
def test_every_problem_is_named_at_once_with_its_line(file: Path) -> None:
    (file.parent / "units" / "support.yaml").write_text(UNIT.replace("goal: latency", "goal: fast"))
    file.write_text(PLAIN.replace("duration_s: 3600", "duration_s: 5").replace("rps: 3", "rsp: 3"))
    assert refusal(file) == [
        "small.yaml:2: duration_s: is 5; it must be at least 60",
        "small.yaml:5: demand[0].synthetic.rps: is missing; add it",
        "small.yaml:5: demand[0].synthetic.rsp: is not a known key; did you mean rps?",
        'units/support.yaml:6: services[chat].goal: "fast" is not allowed; known: latency, throughput, cost',
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("support/chat", "support/caht", "5: demand[0].service: support/caht is in no policy; did you mean support/chat?"),
        ("g6.2xlarge", "g6.2xlrge", "7: supply[g6-1a].instance_type: g6.2xlrge is not in the catalogue; did you mean g6.2xlarge?"),
        ("market: on_demand", "market: ondemand", '7: supply[g6-1a].market: "ondemand" is not allowed; did you mean on_demand?'),
        ("count: 9", "count: -1", "7: supply[g6-1a].count: is -1; it must be at least 0"),
        ("count: 9", "count: {steps: [[5, 1]]}", "7: supply[g6-1a].count: steps does not begin at 0; give [0, N] first"),
        ("count: 9", "count: {trace: t.csv, key: a}", "7: supply[g6-1a].count.trace: t.csv is neither beside the scenario nor in $QM_DATA; set QM_DATA, correct the path, or declare a synthetic stand-in"),
        ("count: 9", "count: 9, boot_s: {dist: normal, mean: 3}", '7: supply[g6-1a].boot_s.dist: "normal" is not allowed; did you mean lognormal?'),
        ("count: 9", "count: 9, boot_s: {dist: constant, mean: 3, cv: 1}", "7: supply[g6-1a].boot_s: cv has no meaning for constant; remove it"),
        ("count: 9", "count: 9, boot_s: {dist: gamma, mean: -3}", "7: supply[g6-1a].boot_s.mean: is -3; it must be at least 0"),
        ("count: 9", "count: 9, load_s: {l5: {dist: constant, mean: 3}}", "7: supply[g6-1a].load_s.l5: l5 is a variant of no service; known: l4"),
        ("count: 9", "count: 9, start_s: 9, end_s: 4", "7: supply[g6-1a]: end_s 4 is not after start_s 9; correct one"),
        ("market: on_demand", "market: block", "7: supply[g6-1a]: a Capacity Block has an end; give end_s"),
        ("market: on_demand", "market: interruptible, price_usd_per_h: x", '7: supply[g6-1a].price_usd_per_h: must be a number, not "x"; correct it'),
        ("synthetic: {kind: constant, rps: 3}", "scale: 2", "5: demand[0]: has neither trace nor synthetic; give one"),
        ("synthetic: {kind: constant, rps: 3}", "trace: t.csv", "5: demand[0].trace: t.csv is neither beside the scenario nor in $QM_DATA; set QM_DATA, correct the path, or declare a synthetic stand-in"),
        ("kind: constant", "kind: wave", '5: demand[0].synthetic: "wave" is not allowed; known: constant, diurnal, flash, agents, rag, bursts'),
        ("kind: constant", "kind: agents, calls: [5, 2]", "5: demand[0].synthetic: calls [5, 2] begins above its end; write the smaller number first"),
        ("rps: 3", "rps: -3", "5: demand[0].synthetic.rps: is -3; it must be at least 0"),
        ("rps: 3", "rps: .nan", "5: demand[0].synthetic.rps: must be a finite number; correct it"),
        ("duration_s: 3600", "duration_s: 3600\nstart_at: monday", '3: start_at: "monday" is not a date and time; write it like 2024-05-13T00:00:00Z'),
        ("duration_s: 3600", "duration_s: 3600\ntick_s: 7200", "small.yaml:3: tick_s: is 7200"),
        ("policies: units", "policies: []", "3: policies: is empty; give at least one unit"),
        ("policies: units\n", "", "1: policies: is missing; add it"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused(file: Path, old: str, new: str, said: str) -> None:
    assert any(said in line for line in with_lines(file, old, new))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("{at_s: 1, for_s: 1, kind: capacitty}", "faults[0].kind: capacitty is no kind of fault; did you mean capacity?"),
        ("{at_s: 1, for_s: 1, kind: dry, target: us-east-9z}", "faults[0].target: us-east-9z is nothing that dry can act on"),
        ("{at_s: 1, for_s: 1, kind: metrics_gone, target: g6-1a}", "faults[0].target: g6-1a is nothing that metrics_gone can act on"),
        ("{at_s: 1, for_s: 1, kind: dry, value: 2}", "faults[0]: value 2 must be from 0 to 1"),
        ("{at_s: 1, kind: dry}", "faults[0]: for_s is missing: dry lasts; add it"),
        ("{at_s: 1, for_s: 5, kind: reclaim}", "faults[0]: for_s has no meaning: reclaim happens once; remove it"),
        ("{at_s: -1, kind: reclaim}", "faults[0].at_s: is -1; it must be at least 0"),
    ],
)  # fmt: skip
def test_a_fault_that_cannot_be_is_refused(file: Path, fault: str, said: str) -> None:
    assert any(said in line for line in refusal(file, f"faults.0={fault}"))


@pytest.mark.parametrize("target", ["*", "g6-1a", "us-east-1a", "us-east-1", "g6.2xlarge", "on_demand"])
def test_a_fault_may_name_pools_by_anything_they_share(file: Path, target: str) -> None:
    fault = f'faults.0={{at_s: 1, for_s: 1, kind: dry, target: "{target}"}}'
    assert load_scenario(file, [fault]).faults[0].target == target


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; start with name: NAME"),
        ("- a\n", "holds a list instead of keys; start with name: NAME"),
        ("a: &x 1\nb: *x\n", "uses a YAML alias (*name); write the value out"),
        ("a: !!python/object/apply:os.system [echo]\n", "uses the YAML tag"),
    ],
)
def test_what_is_no_scenario_is_refused(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    assert [line for line in refusal(file) if said in line]


def test_a_file_that_is_not_there_names_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ScenarioProblems, match="does not exist; give a scenario's file, or one of blind, block, calm"):
        load_scenario(tmp_path / "none.yaml")


# ---- durations ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dist", ["lognormal", "gamma", "uniform", "exponential"])
def test_durations_have_their_mean_and_variation(dist: str) -> None:
    law = Dist.model_validate({"dist": dist, "mean": 100.0} | ({} if dist == "exponential" else {"cv": 0.4}))
    drawn = np.array([law.draw(np.random.default_rng(seed)) for seed in range(4000)])
    assert drawn.mean() == pytest.approx(100.0, rel=0.06)
    assert drawn.std() / drawn.mean() == pytest.approx(1.0 if dist == "exponential" else 0.4, rel=0.1)
    assert drawn.min() >= law.min_s


def test_the_least_that_can_be_drawn_is_declared() -> None:
    assert Dist(dist="constant", mean=9.0).min_s == 9.0
    assert Dist(dist="lognormal", mean=9.0, cv=2.0).min_s == 0.0
    cut = Dist(dist="lognormal", mean=9.0, cv=2.0, min=8.0, max=10.0)
    drawn = [cut.draw(np.random.default_rng(seed)) for seed in range(50)]
    assert (cut.min_s, min(drawn), max(drawn)) == (8.0, 8.0, 10.0)


# ---- the shipped suite ----------------------------------------------------------------------------------------------
SUITE = ("blind", "block", "calm", "drought", "flash", "gang", "idle", "packed", "reasoning", "three_units", "week")


def test_the_suite_is_complete() -> None:
    assert set(public_scenarios()) == {*SUITE, "week_full"}


@pytest.mark.parametrize("name", SUITE)
def test_every_shipped_scenario_loads_without_recorded_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QM_DATA", raising=False)
    scenario = load_scenario(name)
    traces = [row.trace for row in scenario.demand if row.trace]
    assert scenario.name == name
    assert len(scenario.stand_ins()) >= len(traces)


@pytest.mark.data
@pytest.mark.parametrize("name", SUITE)
def test_no_shipped_scenario_needs_a_stand_in_where_the_data_are(name: str, qm_data: Path) -> None:
    assert qm_data.is_dir()
    assert load_scenario(name).stand_ins() == ()


def test_a_scenario_never_changes() -> None:
    scenario: Scenario = scenario_of(inline())
    with pytest.raises(ValueError, match="frozen"):
        scenario.seed = 5  # type: ignore[misc]
