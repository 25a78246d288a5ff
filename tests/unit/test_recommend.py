# ruff: noqa: E501 - tables of input and message are read by the line
"""`qm recommend`: figures that follow from each other, ranks, the front, speed, what it refuses, journals, and pasting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from autoscaler.adapters.journal import FileJournal
from autoscaler.catalogue import load_catalogue
from autoscaler.cli import app
from autoscaler.core.capacity import Mix
from autoscaler.core.events import Configured, Observed
from autoscaler.core.model import Measured, Missing, Observation, ServiceLoad
from autoscaler.sizing.candidates import Candidate, Rejected, candidates
from autoscaler.sizing.rank import block, front, pasted, ranked, scarcity
from autoscaler.sizing.wanted import Wanted, input_spread
from policies.load import load
from policies.model import PolicySet, Service, Slo, Unit, Variant
from serve_apps.timing import Timing

CATALOGUE = load_catalogue()
LLAMA_8B, LLAMA_70B = "meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B"


def wanted(**over: Any) -> Wanted:
    fields: dict[str, Any] = {
        "model": LLAMA_8B,
        "goal": "cost",
        "rps": 20.0,
        "mix": Mix(input_tokens=1000.0, output_tokens=200.0),
        "input_p99": 4000.0,
        "prefix_share": 0.0,
        "slo": Slo(ttft_s=2.0, tpot_s=0.06, fraction=0.95),
        "region": "us-east-1",
        "market": "on_demand",
        "max_usd_per_h": 1e9,
        "types": tuple(CATALOGUE.instance_types),
    }
    return Wanted(**(fields | over))


def able(question: Wanted) -> list[Candidate]:
    found = candidates(question, CATALOGUE)
    return [row for row in found if isinstance(row, Candidate) and row.floor is None]


ALL = able(wanted())


def test_figures_follow_from_each_other() -> None:
    for row in ALL:
        gpus = CATALOGUE.instance_types[row.variant.instance_type].gpus
        assert row.replicas * row.capacity_rps >= 20.0
        assert (row.replicas - 1) * row.capacity_rps < 20.0 or row.replicas == 1
        assert row.utilisation == pytest.approx(20.0 / (row.replicas * row.capacity_rps))
        if row.variant.nodes_per_replica == 1:
            assert (
                (row.instances - 1) * (gpus // row.variant.tp)
                < row.replicas
                <= row.instances * (gpus // row.variant.tp)
            )
        else:
            assert row.instances == row.replicas * row.variant.nodes_per_replica
        assert row.usd_per_h == pytest.approx(row.instances * row.price_usd_per_h)
        assert row.usd_per_1m_tokens == pytest.approx(row.usd_per_h / (20.0 * 1200.0 * 3600.0) * 1e6)
        assert row.e2e_s == pytest.approx(row.ttft_s + 199.0 * row.tpot_s)
        assert row.binds in ("kv", "prefill", "decode", "network")
        assert row.kv_headroom < 1.0


def test_the_mean_load_is_inside_the_limits_it_was_planned_for() -> None:
    assert all(row.ttft_s < 2.0 and row.tpot_s < 0.06 for row in ALL)


def test_each_goal_has_its_order_and_weights_to_be_quantised_come_last() -> None:
    figures: dict[str, Callable[[Candidate], float]] = {
        "latency": lambda row: row.e2e_s,
        "throughput": lambda row: row.replicas,
        "cost": lambda row: row.usd_per_h,
    }
    for goal, figure in figures.items():
        rows = ranked(ALL, wanted(goal=goal))
        ready = [row for row in rows if row.published_weights]
        assert list(rows[: len(ready)]) == ready
        assert [figure(row) for row in ready] == sorted(figure(row) for row in ready)
    equal = ranked(ALL, wanted(precisions=("bf16", "int4")))
    assert [row.usd_per_h for row in equal] == sorted(row.usd_per_h for row in equal)


def test_the_front_is_what_nothing_beats_in_both() -> None:
    ready = [row for row in ALL if row.published_weights]
    kept = front(ALL, wanted())
    for row in ready:
        beaten = any(
            other.usd_per_h <= row.usd_per_h
            and other.e2e_s <= row.e2e_s
            and (other.usd_per_h, other.e2e_s) != (row.usd_per_h, row.e2e_s)
            for other in ready
        )
        assert not (row.variant.id in kept and beaten)
        assert (
            row.variant.id in kept
            or beaten
            or any(
                other.variant.id in kept and (other.usd_per_h, other.e2e_s) == (row.usd_per_h, row.e2e_s)
                for other in ready
            )
        )


def test_six_hundred_shapes_take_less_than_two_seconds() -> None:
    started = process_time()
    question = wanted(rps=31.0, mix=Mix(input_tokens=1313.0, output_tokens=171.0))  # not in any cache
    found = list(candidates(question, CATALOGUE))
    ranked([row for row in found if isinstance(row, Candidate)], question)
    assert len(found) >= 600
    assert process_time() - started < 2.0


def one(**over: Any) -> Candidate:
    (row,) = (row for row in candidates(wanted(types=("p5.4xlarge",), precisions=("bf16",), **over), CATALOGUE))
    assert isinstance(row, Candidate)
    return row


def test_a_shared_prefix_saves_prefills_and_a_long_tail_takes_head_room() -> None:
    assert one(prefix_share=0.5).capacity_rps > one().capacity_rps
    assert one(prefix_share=0.5).ttft_s < one().ttft_s
    tokens = one().shape.timing.kv_capacity_tokens
    assert one(input_p99=4000.0).kv_headroom - one(input_p99=14000.0).kv_headroom == pytest.approx(10000.0 / tokens)


def test_a_context_that_the_cache_cannot_hold_is_no_shape() -> None:
    (row,) = candidates(wanted(types=("g6.xlarge",), precisions=("bf16",), input_p99=30000.0), CATALOGUE)
    assert isinstance(row, Rejected)
    assert "context ends" in row.why


def test_short_caches_bind() -> None:
    small = wanted(types=("g6.xlarge",), precisions=("bf16",), slo=Slo(fraction=0.9))
    (row,) = candidates(small, CATALOGUE)
    assert isinstance(row, Candidate)
    assert row.binds == "kv"


def test_nodes_hold_layers_so_a_token_passes_all_of_them() -> None:
    rows = {
        row.variant.nodes_per_replica: row for row in able(wanted(types=("p5.48xlarge",), precisions=("bf16",), tp=8))
    }
    assert rows[2].tpot_s > 0.9 * rows[1].tpot_s
    assert rows[4].instances == 4 * rows[4].replicas


def test_a_measured_law_replaces_the_catalogues() -> None:
    law = Timing(a_s=0.011, b_s_per_seq=0.0, c_s_per_ktoken=0.0, prefill_tps=1e9)
    assert one(law=law, slo=Slo(fraction=0.9)).tpot_s == pytest.approx(0.011, rel=0.01)
    assert one(law=law).shape.source == "measured at the endpoint"


def test_the_price_is_that_of_the_market_or_the_next_that_has_the_type() -> None:
    assert (one().market, one().price_usd_per_h) == ("on_demand", 6.88)
    (block_only,) = candidates(
        wanted(types=("p5e.48xlarge",), region="us-east-2", tp=4, precisions=("bf16",)), CATALOGUE
    )
    assert isinstance(block_only, Candidate)
    assert (block_only.market, block_only.price_usd_per_h) == ("block", 43.26)
    spot = next(iter(candidates(wanted(types=("g6e.2xlarge",), market="spot", precisions=("bf16",)), CATALOGUE)))
    assert isinstance(spot, Candidate)
    assert spot.price_usd_per_h == pytest.approx(2.24208 * 0.37)


def test_scarcity_is_said_in_words_and_as_a_figure() -> None:
    words, figure = scarcity("p5.48xlarge", "us-east-1", CATALOGUE)
    assert words == "spot taken back more than 20 % a month; 2 of 7 zones without spot"
    assert figure == 1.0
    assert scarcity("g7e.2xlarge", "us-east-1", CATALOGUE) == ("nothing published", None)


def test_the_spread_of_prompts_goes_through_their_99th_percentile() -> None:
    cv, p99 = input_spread(1000.0, None)
    assert input_spread(1000.0, p99)[0] == pytest.approx(cv)
    assert input_spread(1000.0, 1000.0)[0] == 0.0
    assert input_spread(1000.0, 1e9)[0] > 10.0


def test_the_block_loads_as_part_of_a_policy(tmp_path: Path) -> None:
    rows = ranked(ALL, wanted())
    families = [row.variant.instance_type.partition(".")[0] for row in pasted(rows)]
    assert len(set(families)) == len(families) == 3
    text = "\n".join(f"    {line}" for line in block(rows).splitlines())
    head = f"unit: u\nowner: o@example.com\nservices:\n  - name: chat\n    model: {LLAMA_8B}\n    goal: cost\n"
    (tmp_path / "u.yaml").write_text(head + text + "\n")
    ((_, _, service),) = load(tmp_path).services()
    assert service.variants == tuple(row.variant for row in pasted(rows))


# ---- the command ----------------------------------------------------------------------------------------------------
OPTIONS = {
    "--model": LLAMA_8B, "--goal": "cost", "--rps": "20", "--input-tokens": "1000", "--output-tokens": "200",
    "--ttft-s": "2", "--tpot-s": "0.06",
}  # fmt: skip


def run(**over: str | None) -> Any:
    options = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in over.items()}
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    return CliRunner().invoke(app, ["recommend", *words])


def test_the_command_writes_json_a_page_and_ends_with_the_block(tmp_path: Path) -> None:
    done = run(json=str(tmp_path / "r.json"), html=str(tmp_path / "r.html"))
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["shapes_considered"] >= 600
    assert report["feasible"] == len(report["ranked"])
    assert any(row["pareto"] for row in report["ranked"])
    assert done.stdout.rstrip().endswith(report["variants"].splitlines()[-1])
    assert "<html>" in (tmp_path / "r.html").read_text()


REFUSED = {
    "unknown model": ({"model": "meta-llama/Meta-Llama-3.1-9B"}, "--model meta-llama/Meta-Llama-3.1-9B: is not in the catalogue; did you mean meta-llama/Meta-Llama-3.1-8B?"),
    "unknown GPU": ({"instance_types": "h101"}, "--instance-types h101: is no instance type, family or GPU of the catalogue; did you mean h100?"),
    "no such GPU": ({"instance_types": "tpu"}, "--instance-types tpu: is no instance type, family or GPU of the catalogue; known families and GPUs: a100-40gb"),
    "zero traffic": ({"rps": "0"}, "--rps 0: zero traffic needs no replica"),
    "no rate": ({"rps": None}, "--rps: is missing"),
    "negative": ({"input_tokens": "-5"}, "--input-tokens -5: give a finite number, 1 or more"),
    "no number": ({"rps": "nan"}, "--rps nan: give a number above 0"),
    "goal": ({"goal": "speed"}, "--goal speed: is none; choose one of latency, throughput, cost"),
    "region": ({"region": "us-east-9"}, "--region us-east-9: has no prices in the catalogue; did you mean"),
    "market": ({"market": "free"}, "--market free: is none with a price"),
    "precision": ({"precisions": "fp9"}, "--precisions fp9: is none; did you mean"),
    "fraction": ({"fraction": "1"}, "--fraction 1: give a fraction between 0 and 1"),
    "prefix": ({"prefix_share": "1"}, "--prefix-share 1: give the shared part of prompts"),
    "p99 under the mean": ({"input_p99": "10"}, "--input-p99 10: is below the mean"),
    "context": ({"model": "Qwen/Qwen3-8B", "input_p99": "100000"}, "--input-p99 100,000: with 200 output tokens exceeds Qwen/Qwen3-8B's context of 40,960 tokens by 59,240"),
    "fits nowhere": ({"model": "meta-llama/Meta-Llama-3.1-405B", "instance_types": "g6.xlarge", "precisions": "bf16"}, "--model meta-llama/Meta-Llama-3.1-405B: fits on none of these shapes; g6-xlarge-tp1-bf16 lacks 794.2 GB a node; the smallest shape that holds it is "),
    "floor of the first token": ({"ttft_s": "0.0001"}, "--ttft-s 0.0001: is unreachable; the physical floor is "),
    "floor of a token": ({"tpot_s": "0.0001"}, "--tpot-s 0.0001: is unreachable; the physical floor is "),
    "floor of the first token, which a prefill alone takes": ({"ttft_s": "0.001"}, "--ttft-s 0.001: is unreachable; the physical floor is "),
    "bursts": ({"arrival_cv": "20", "rps": "0.1", "ttft_s": "0.5", "instance_types": "g6e.xlarge", "precisions": "bf16"}, "because they come in bursts; lower it"),
    "too regular": ({"arrival_cv": "0.5"}, "--arrival-cv 0.5: give the gaps' variation, from 1"),
    "mean prompts": ({"input_tokens": "100000"}, "--input-tokens 100,000: one prompt in a hundred then has 338,070"),
    "published weights first": ({"model": "meta-llama/Meta-Llama-3.1-405B", "instance_types": "g6.xlarge"}, "g6-xlarge-tp1-fp8 lacks "),
    "too dear": ({"max_usd_per_h": "0.1"}, "--max-usd-per-h 0.1: the cheapest that serves it is "),
    "journal of nothing": ({"from_journal": "/nonexistent"}, "no journal here"),
    "service alone": ({"service": "a/b"}, "--service: is of a journal"),
    "elsewhere": ({"measure": "http://192.0.2.1:8000", "instance_types": "p5.4xlarge"}, "--measure http://192.0.2.1:8000: is not on this machine"),
    "no address": ({"measure": "ftp://x"}, "--measure ftp://x: is no web address"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_answered_is_said_in_words(name: str) -> None:
    over, text = REFUSED[name]
    done = run(**over)  # type: ignore[arg-type]
    assert done.exit_code == 2, done.output
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def journal(folder: Path, rates: tuple[float, ...]) -> Path:
    chat = Service(
        name="chat",
        model=LLAMA_8B,
        goal="latency",
        slo=Slo(ttft_s=1.0),
        variants=(Variant(id="v", instance_type="g6e.xlarge"),),
    )
    policy = PolicySet(units=(Unit(unit="u", owner="o", services=(chat,)),))
    kept = FileJournal(folder)
    kept.append(Configured(at_s=0.0, policy=policy, shapes=(), digest="d"), durable=False)
    for tick, rps in enumerate(rates):
        values = (Measured(value=rps * scale, at_s=float(tick)) for scale in (1.0, 800.0, 150.0, 0.0, 0.0))
        seen = Observation(at_s=float(tick), loads=(_load(*values),), serving=Missing(why="x"), cloud=Missing(why="x"))
        kept.append(Observed(at_s=float(tick), observation=seen), durable=False)
    kept.close()
    return folder


def _load(rps: Measured, prefill: Measured, decode: Measured, queued: Measured, running: Measured) -> ServiceLoad:
    return ServiceLoad(
        service="u/chat", arrival_rps=rps, prefill_tps=prefill, decode_tps=decode, queued=queued, running=running
    )


def test_a_journal_gives_traffic_model_and_limits(tmp_path: Path) -> None:
    folder = journal(tmp_path / "j", tuple(float(rate) for rate in range(1, 101)))
    out = str(tmp_path / "r.json")
    done = CliRunner().invoke(app, ["recommend", "--from-journal", str(folder), "--json", out])
    assert done.exit_code == 0, done.output
    report = json.loads(Path(out).read_text())
    assert (report["model"], report["goal"], report["rps"], report["arrival_cv"]) == (LLAMA_8B, "latency", 95.0, 1.0)


def test_a_journal_gives_the_variation_of_arrivals_and_more_of_it_takes_more(tmp_path: Path) -> None:
    counts = np.random.default_rng(1).poisson(0.625, 200) * 16.0  # 10 a second, in groups of sixteen
    folder, out = journal(tmp_path / "j", tuple(counts)), str(tmp_path / "r.json")
    words = ["recommend", "--from-journal", str(folder), "--instance-types", "g6e.xlarge", "--tpot-s", ".06"]
    found = {}
    for cv in ([], ["--arrival-cv", "1"]):
        done = CliRunner().invoke(app, [*words, *cv, "--rps", "20", "--json", out])
        assert done.exit_code == 0, done.output
        report = json.loads(Path(out).read_text())
        found[round(report["arrival_cv"])] = report["ranked"][0]["utilisation"]
    assert sorted(found) == [1, 4]
    assert found[4] > found[1]


def test_a_journal_without_traffic_or_that_service_is_refused(tmp_path: Path) -> None:
    folder = journal(tmp_path / "j", (0.0, 0.0))
    done = CliRunner().invoke(app, ["recommend", "--from-journal", str(folder)])
    assert done.exit_code == 2
    assert "saw no traffic of u/chat" in done.stderr
    done = CliRunner().invoke(app, ["recommend", "--from-journal", str(folder), "--service", "u/x"])
    assert "holds no service u/x; it has u/chat" in done.stderr
