"""What the loader makes of good folders: every shipped file, defaults under units, and where each value came from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from autoscaler.catalogue import resolve
from autoscaler.commands.promises import broken_promises
from policies import tree
from policies.load import DEFAULTS_FILE, PolicyProblems, load, origins
from policies.model import Service, Unit

PACKAGE = Path(policies.__file__).parent
SHIPPED = sorted({path.parent for path in PACKAGE.rglob("*.yaml")} - {PACKAGE, *PACKAGE.rglob("catalogue")})


def test_there_are_samples_and_two_demos() -> None:
    assert [str(folder.relative_to(PACKAGE)) for folder in SHIPPED] == ["local/sim", "local/vllm", "units"]


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_every_shipped_folder_loads_and_fits_its_hardware(folder: Path) -> None:
    found = resolve(folder)
    assert {unit.unit for unit in found.policy.units} >= {"support", "coding", "research"}
    assert not broken_promises(found)
    assert {service.goal for _, _, service in found.policy.services()} == {"latency", "throughput", "cost"}
    assert len(found.shapes) == sum(len(service.variants) for _, _, service in found.policy.services())


def test_there_are_four_worked_examples_and_each_says_what_the_others_do_not() -> None:
    found = load(PACKAGE / "units")
    assert len(found.units) == 4
    words = {word for _, _, service in found.services() for word in service.sacrifice}
    assert words == {"queue", "shed", "smaller_variant", "overflow"}
    assert any(unit.budget_usd_per_month for unit in found.units)
    assert {type(unit.lends) for unit in found.units} == {bool, int}


def test_the_vllm_demo_fits_a_machine_of_two_cores() -> None:
    floors = [service.min_replicas for _, _, service in load(PACKAGE / "local" / "vllm").services()]
    assert sum(floors) <= 2
    assert sum(service.max_replicas for _, _, service in load(PACKAGE / "local" / "vllm").services()) <= 7


def test_defaults_file_and_model_say_the_same() -> None:
    written = tree.read(DEFAULTS_FILE).data
    silent = {"name": "x", "model": "x", "goal": "cost", "variants": []}
    assert Service.model_validate_json(_json({**silent, **written["service"]})) == Service.model_validate_json(
        _json(silent)
    )
    silent = {"unit": "x", "owner": "x", "services": []}
    assert Unit.model_validate_json(_json({**silent, **written["unit"]})) == Unit.model_validate_json(_json(silent))
    assert set(written["service"]) == {name for name, field in Service.model_fields.items() if not field.is_required()}
    assert set(written["unit"]) == {name for name, field in Unit.model_fields.items() if not field.is_required()}


CHAT = """\
unit: support
owner: a@example.com
quota_gpus: 8
services:
  - name: chat
    model: m
    goal: latency
    slo: {ttft_s: 2}
    variants:
      - {id: v1, instance_type: g6.2xlarge}
"""


def test_a_value_comes_from_the_service_or_else_from_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "support.yaml").write_text(CHAT)
    (_, unit, service), = load(tmp_path).services()  # fmt: skip
    assert (unit.quota_gpus, service.slo.ttft_s, service.slo.fraction, service.priority) == (8, 2.0, 0.95, 100)
    written = {origin.key: origin for origin in origins(tmp_path)}
    own, inherited = written["support/chat.slo.ttft_s"], written["support/chat.slo.fraction"]
    assert (own.value, own.file, own.line) == (2, str(tmp_path / "support.yaml"), 8)
    assert (inherited.value, inherited.file) == (0.95, str(DEFAULTS_FILE))
    assert "fraction: 0.95" in DEFAULTS_FILE.read_text().splitlines()[inherited.line - 1]
    assert written["support.quota_gpus"].line == 3
    assert written["support/chat.variants[v1].id"].line == 10


def test_units_come_in_the_order_of_their_names_whatever_the_files_are_called(tmp_path: Path) -> None:
    (tmp_path / "1.yaml").write_text(CHAT.replace("unit: support", "unit: zoo"))
    (tmp_path / "2.yml").write_text(CHAT.replace("unit: support", "unit: abc"))
    (tmp_path / ".3.yaml").write_text("an editor's leftover")
    (tmp_path / "notes.txt").write_text("not a policy")
    assert [unit.unit for unit in load(tmp_path).units] == ["abc", "zoo"]


def test_problems_of_all_files_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CHAT.replace("latency", "speed"))
    (tmp_path / "b.yaml").write_text(CHAT)
    (tmp_path / "c.yaml").write_text("")
    with pytest.raises(PolicyProblems) as caught:
        load(tmp_path)
    assert [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems] == [
        'a.yaml:7: services[chat].goal: "speed" is not allowed; known: latency, throughput, cost',
        f"b.yaml:1: unit: the unit support is also defined in {tmp_path}/a.yaml; merge the files or rename one".replace(
            f"{tmp_path}/", ""
        ),
        "c.yaml:1: is empty; start with unit: NAME",
    ]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: folder / "nowhere", "does not exist; give a folder of policy files"),
        (lambda folder: folder, "holds no .yaml file; add one file for each business unit"),
        (lambda folder: folder.parent / "notes.txt", "is a file; give the folder that holds it"),
    ],
    ids=["missing", "empty", "file"],
)
def test_a_folder_that_is_none(make: Callable[[Path], Path], text: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no policy")
    (tmp_path / "folder").mkdir()
    folder = make(tmp_path / "folder")
    with pytest.raises(PolicyProblems) as caught:
        load(folder)
    assert [str(problem) for problem in caught.value.problems] == [f"{folder}: {text}"]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_only_regular_files_are_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "a.yaml")
    with pytest.raises(PolicyProblems) as caught:
        load(tmp_path)
    text = "is not a regular file; remove it, or give it another name"
    assert [str(problem) for problem in caught.value.problems] == [f"{tmp_path}/a.yaml: {text}"]


def test_a_link_to_nothing_is_one_clear_problem(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to("nowhere")
    with pytest.raises(PolicyProblems, match=r"a\.yaml: cannot be read \(No such file or directory\); check the path"):
        load(tmp_path)


HOSTILE = [
    "services:\n",
    "  - ",
    "a: &a [",
    "*a, ",
    "? ",
    "<<: ",
    "{",
    "}",
    "]",
    ": ",
    "!!int ",
    '"\\ud800"',
    "\t",
    "---\n",
]
HOSTILE += ["1:2:3:4", "0x" + "f" * 50, "~", "\x00", "é", "| \n", "-1e400"]
FRAGMENTS = st.sampled_from(CHAT.splitlines(keepends=True) + HOSTILE)


@given(st.lists(FRAGMENTS, max_size=30).map("".join))
def test_whatever_is_written_there_is_a_policy_or_a_list_of_problems(text: str) -> None:
    from policies.load import _draft

    problems: list[object] = []
    draft = _draft(tree.parse(text, "a.yaml"), tree.read(DEFAULTS_FILE), problems)  # type: ignore[arg-type]
    assert problems or (draft is not None and draft.unit is not None)


def _json(data: object) -> str:
    import json

    return json.dumps(data)
