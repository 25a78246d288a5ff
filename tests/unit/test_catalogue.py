# ruff: noqa: E501 - tables of input and message are read by the line
"""The catalogue: figures that follow from architecture, a source for each, what fits where, and overrides."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoscaler.catalogue import CatalogueProblems, load_catalogue, resolve, shapes
from autoscaler.catalogue.load import CatalogueFileProblems
from autoscaler.core.model import Shape
from policies.load import PolicyProblems
from policies.model import PolicySet, Service, Unit, Variant
from serve_apps.timing import decode_step_s, prefill_s

CATALOGUE = load_catalogue()
LLAMA_8B, LLAMA_70B = "meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B"

# Written by hand from the models' published configs: layers, KV heads, head size, parameters.
ARCHITECTURES = {
    LLAMA_8B: (32, 8, 128, 8.03e9),
    LLAMA_70B: (80, 8, 128, 70.6e9),
    "meta-llama/Meta-Llama-3.1-405B": (126, 8, 128, 405.9e9),
    "Qwen/Qwen3-8B": (36, 8, 128, 8.19e9),
    "Qwen/Qwen3-32B": (64, 8, 128, 32.8e9),
    "Qwen/Qwen3-30B-A3B": (48, 4, 128, 30.5e9),
    "Qwen/Qwen3-235B-A22B": (94, 4, 128, 235.1e9),
    "Qwen/Qwen2.5-72B-Instruct": (80, 8, 128, 72.7e9),
    "mistralai/Mixtral-8x7B-v0.1": (32, 8, 128, 46.7e9),
    "openai/gpt-oss-120b": (36, 8, 64, 116.8e9),
    "qwen2.5-7b-instruct": (28, 4, 128, 7.62e9),
}


def one(model: str, *variants: Variant) -> PolicySet:
    service = Service(name="chat", model=model, goal="cost", variants=variants)
    return PolicySet(units=(Unit(unit="u", owner="o", services=(service,)),))


def shape_of(model: str, instance_type: str, tp: int = 1, precision: str = "bf16") -> Shape:
    variant = Variant(id="v", instance_type=instance_type, tp=tp, precision=precision)  # type: ignore[arg-type]
    return shapes(one(model, variant), CATALOGUE)[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kv_bytes_and_weights_follow_from_the_architecture(name: str) -> None:
    layers, kv_heads, head_size, parameters = ARCHITECTURES[name]
    card = CATALOGUE.models[name]
    assert card.kv_bytes_per_token == 2 * layers * kv_heads * head_size * 2  # keys and values, two bytes each
    assert card.weight_bytes("bf16") == pytest.approx(2 * parameters, rel=0.01)
    assert card.weight_bytes("fp8") == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-R1", "moonshotai/Kimi-K2-Instruct"])
def test_latent_attention_keeps_576_values_a_layer(name: str) -> None:
    card = CATALOGUE.models[name]
    assert card.kv_heads is None
    assert card.kv_bytes_per_token == card.layers * (512 + 64) * 2


def test_every_entry_names_a_source_with_a_date() -> None:
    entries = list(CATALOGUE.entries())
    assert len(entries) > 90
    for path, entry in entries:
        assert entry.source, path
        assert all(CATALOGUE.sources[name].date for name in entry.source), path


def test_the_families_that_policies_name_are_there() -> None:
    families = {instance.family for instance in CATALOGUE.instance_types.values()}
    assert families >= {"g5", "g6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"}
    assert CATALOGUE.instance_types["p5.48xlarge"].on_demand_usd_per_h == 55.04
    assert CATALOGUE.instance_types["p5e.48xlarge"].on_demand_usd_per_h is None  # sold as Capacity Blocks only
    for name, instance in CATALOGUE.instance_types.items():
        spot, full = instance.spot_usd_per_h, instance.on_demand_usd_per_h
        assert spot is None or (full is not None and 0.1 * full < spot < full), name


def test_kv_capacity_of_an_8b_on_one_h100_is_what_arithmetic_says() -> None:
    free_bytes = 0.9 * 81920 * 2**20 - 16.1e9 - 3e9
    assert shape_of(LLAMA_8B, "p5.4xlarge").timing.kv_capacity_tokens == int(free_bytes / 131072)


def test_tensor_parallel_ranks_share_kv_heads_but_not_latent_kv() -> None:
    two, four = (shape_of(LLAMA_70B, "p5.48xlarge", tp).timing.kv_capacity_tokens for tp in (4, 8))
    per_gpu = 0.9 * 81920 * 2**20 - 3e9
    assert two == int((4 * per_gpu - 141.1e9) / 327680)
    assert four == int((8 * per_gpu - 141.1e9) / 327680)
    latent = shape_of("deepseek-ai/DeepSeek-R1", "p5en.48xlarge", 8, "fp8").timing.kv_capacity_tokens
    assert latent == int((8 * (0.9 * 144384 * 2**20 - 3e9) - 671.0e9) / 8 / 70272)


def test_context_is_cut_to_what_the_kv_cache_holds() -> None:
    small, large = shape_of(LLAMA_8B, "g6.2xlarge").timing, shape_of(LLAMA_8B, "p5.4xlarge").timing
    assert small.max_model_len == small.kv_capacity_tokens < 131072
    assert large.max_model_len == 131072


def test_measured_constants_are_those_of_the_gpu_behind_the_instance_type() -> None:
    for name, a_s in (
        ("g6e.2xlarge", 0.0218),
        ("p4de.24xlarge", 0.0117),
        ("p5.4xlarge", 0.0063),
        ("p5en.48xlarge", 0.0049),
    ):
        shape = shape_of(LLAMA_8B, name)
        assert (shape.timing.a_s, shape.source) == (a_s, "vllm-silicon-fits, +-12%")


def test_a_shape_without_measurement_says_roofline_and_is_of_the_right_size() -> None:
    assert shape_of("Qwen/Qwen3-8B", "g6e.2xlarge").source == "roofline estimate, not measured, +-40%"


def test_nodes_of_a_replica_hold_layers_a_token_passes_all_and_each_works_on_its_part_of_the_batch() -> None:
    alone, two = (
        shapes(
            one(
                "deepseek-ai/DeepSeek-R1",
                Variant(id="v", instance_type="p5en.48xlarge", tp=8, precision="fp8", nodes_per_replica=nodes),
            ),
            CATALOGUE,
        )[0].timing
        for nodes in (1, 2)
    )
    assert (two.a_s, two.moe_w_s) == (alone.a_s, alone.moe_w_s)
    assert two.b_s_per_seq == pytest.approx(alone.b_s_per_seq / 2)
    assert two.c_s_per_ktoken == pytest.approx(alone.c_s_per_ktoken / 2)
    assert two.prefill_tps == pytest.approx(alone.prefill_tps * 2)


@pytest.mark.parametrize("index", range(len(CATALOGUE.measurements)))
def test_the_roofline_is_within_half_of_every_measurement_on_silicon(index: int) -> None:
    row = CATALOGUE.measurements[index]
    if "vllm-silicon-fits" not in row.source:
        return
    instance = {"l40s": "g6e.48xlarge", "a100-40gb": "p4d.24xlarge", "a100-80gb": "p4de.24xlarge", "h100": "p5.48xlarge",
                "h200": "p5en.48xlarge", "b200": "p6-b200.48xlarge"}[row.gpu]  # fmt: skip
    measured = shape_of(row.model, instance, row.tp, row.precision).timing
    variant = Variant(id="v", instance_type=instance, tp=row.tp, precision=row.precision)
    bare = CATALOGUE.model_copy(update={"measurements": ()})
    estimate = shapes(one(row.model, variant), bare)[0].timing
    for batch in (8, 64):
        ratio = decode_step_s(estimate, batch, batch * 1500.0) / decode_step_s(measured, batch, batch * 1500.0)
        assert 0.6 < ratio < 1.7, (row.key, batch, ratio)
    assert 0.4 < prefill_s(measured, 2000.0) / prefill_s(estimate, 2000.0) < 1.5


def test_loading_takes_the_weights_over_the_network_and_then_the_engines_start() -> None:
    assert shape_of(LLAMA_8B, "p5.4xlarge").load_prior_s == pytest.approx(16.1 + 22.0 + 0.5 * 32)
    assert shape_of(LLAMA_70B, "p5.48xlarge", 4).load_prior_s == pytest.approx(141.1 + 22.0 + 0.5 * 80)
    assert shape_of(LLAMA_8B, "p5.4xlarge").boot_prior_s > shape_of(LLAMA_8B, "g6.2xlarge").boot_prior_s > 0


def test_shapes_come_most_important_service_first_then_in_the_order_of_the_variants() -> None:
    low = Service(
        name="b", model=LLAMA_8B, goal="cost", priority=1, variants=(Variant(id="z", instance_type="g6e.xlarge"),)
    )
    both = (Variant(id="y", instance_type="g6e.xlarge"), Variant(id="x", instance_type="p5.4xlarge"))
    high = low.model_copy(update={"name": "a", "priority": 9, "variants": both})
    policy = PolicySet(units=(Unit(unit="u", owner="o", services=(low, high)),))
    assert [(s.service, s.variant) for s in shapes(policy, CATALOGUE)] == [("u/a", "y"), ("u/a", "x"), ("u/b", "z")]


UNFIT = {
    "unknown type": (LLAMA_8B, "g6.2xlage", 1, "bf16", "instance_type: g6.2xlage is not in the catalogue; did you mean g6.2xlarge?"),
    "more ranks than GPUs": (LLAMA_8B, "g6.2xlarge", 2, "bf16", "tp: is 2, but g6.2xlarge has 1 GPU; lower it, or take a larger type"),
    "ranks that do not divide heads": ("Qwen/Qwen2.5-32B-Instruct", "p5.48xlarge", 3, "bf16", "tp: is 3, which does not divide the model's 40 attention heads; choose another"),
    "too big": (LLAMA_70B, "p5.48xlarge", 1, "bf16", "tp: 141.1 GB of bf16 weights with 2048 tokens of KV exceed 1 GPU of p5.48xlarge by 67.5 GB; raise tp, lower the precision, or take larger GPUs"),
    "too big for two": (LLAMA_70B, "g6e.12xlarge", 2, "bf16", "tp: 141.1 GB of bf16 weights with 2048 tokens of KV exceed 2 GPUs of g6e.12xlarge by 61.4 GB; raise tp, lower the precision, or take larger GPUs"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_is_said_with_figures(name: str) -> None:
    model, instance_type, tp, precision, text = UNFIT[name]
    with pytest.raises(CatalogueProblems) as caught:
        shape_of(model, instance_type, tp, precision)
    assert caught.value.problems == (f"u/chat: variants[v].{text}",)


def test_an_unknown_model_is_said_once_for_all_variants() -> None:
    variants = (Variant(id="a", instance_type="g6.2xlarge"), Variant(id="b", instance_type="g5.2xlarge"))
    with pytest.raises(CatalogueProblems) as caught:
        shapes(one("Qwen/Qwen3-9B", *variants), CATALOGUE)
    assert caught.value.problems == (
        "u/chat: model: Qwen/Qwen3-9B is not in the catalogue; did you mean Qwen/Qwen3-8B?",
    )


def test_the_demo_engine_fits_any_instance_type() -> None:
    for name in ("g6.2xlarge", "g5.2xlarge", "p5.48xlarge"):
        timing = shape_of("quartermaster/tiny-llama", name).timing
        assert (timing.max_num_seqs, timing.max_model_len) == (4, 1024)


UNIT = """\
unit: u
owner: o
services:
  - name: chat
    model: MODEL
    goal: cost
    variants:
      - id: v
        instance_type: g6.2xlarge
"""


def folder(tmp_path: Path, model: str = LLAMA_8B, **overrides: str) -> Path:
    (tmp_path / "u.yaml").write_text(UNIT.replace("MODEL", model))
    (tmp_path / "catalogue").mkdir()
    for name, text in overrides.items():
        (tmp_path / "catalogue" / f"{name}.yaml").write_text(text)
    return tmp_path


def test_an_override_changes_one_value_and_leaves_the_rest(tmp_path: Path) -> None:
    changed = load_catalogue(
        folder(tmp_path, instance_types="instance_types: {g6.2xlarge: {on_demand_usd_per_h: 0.5}}")
    )
    before, after = CATALOGUE.instance_types["g6.2xlarge"], changed.instance_types["g6.2xlarge"]
    assert after == before.model_copy(update={"on_demand_usd_per_h": 0.5})
    assert changed.instance_types["g5.2xlarge"] == CATALOGUE.instance_types["g5.2xlarge"]


def test_an_own_measurement_wins_over_the_packages(tmp_path: Path) -> None:
    own = (
        f"sources: {{ours: {{what: our bench, date: 2026-11-01, licence: ours}}}}\n"
        f"measurements: [{{model: {LLAMA_8B}, gpu: l4, a_s: 0.05, b_s_per_seq: 0.0, c_s_per_ktoken: 0.0, prefill_tps: 3000, "
        f"uncertainty: 0.05, source: [ours]}}]\n"
    )
    shape = resolve(folder(tmp_path, performance=own)).shapes[0]
    assert (shape.timing.a_s, shape.timing.prefill_tps, shape.source) == (0.05, 3000.0, "ours, +-5%")


def test_an_own_model_is_estimated_from_its_card(tmp_path: Path) -> None:
    card = (
        "models: {corp/own-8b: {layers: 32, hidden: 4096, heads: 32, kv_heads: 8, head_dim: 128, max_position: 8192, params_b: 8.0, "
        "active_params_b: 8.0, kv_bytes_per_token: 131072, weights_gb: {bf16: 16.0}, source: [config]}}\n"
    )
    shape = resolve(folder(tmp_path, "corp/own-8b", models=card)).shapes[0]
    assert shape.timing.max_model_len == 8192
    assert shape.source.startswith("roofline")


BROKEN = {
    "unknown key": ("instance_types", "instance_types: {g6.2xlarge: {price: 1.0}}", "instance_types.yaml:1: instance_types.g6.2xlarge.price: is not a known key; known: "),
    "wrong kind": ("instance_types", "instance_types:\n  g6.2xlarge: {gpus: many}", 'instance_types.yaml:2: instance_types.g6.2xlarge.gpus: must be a whole number, not "many"; correct it'),
    "new type half told": ("instance_types", "instance_types:\n  x1.large:\n    gpu: l4", "instance_types.yaml:2: instance_types.x1.large.boot_s: is missing; add it"),
    "unknown GPU": ("instance_types", "instance_types:\n  g6.2xlarge:\n    gpu: l4s", "instance_types.yaml:3: instance_types.g6.2xlarge.gpu: l4s is not in gpus; did you mean l40s?"),
    "no source": ("instance_types", "gpus:\n  l4: {source: [rumour]}", "instance_types.yaml:2: gpus.l4.source: rumour is not in sources; known: "),
    "measurement of nothing": ("performance", "measurements:\n  - {model: m, gpu: l4}", "performance.yaml:2: measurements[0].a_s: is missing; add it"),
    "another file": ("price", "x: 1", "price.yaml:1: is not a catalogue file; did you mean prices.yaml?"),
    "price of nothing": ("prices", "prices:\n  - {instance_type: g6.huge, region: us-east-1, market: spot, since: 2026-01-01, usd_per_h: 1.0, source: [skypilot-catalog]}", "prices.yaml:2: prices[0].instance_type: g6.huge is not in instance_types; did you mean"),
    "no date": ("prices", "prices:\n  - {instance_type: g6.xlarge, region: x, market: spot, since: May, usd_per_h: 1.0, source: [skypilot-catalog]}", "prices.yaml:2: prices["),
    "pool of nothing": ("prices", "spot_pools:\n  g6.huge: {source: [skypilot-catalog], regions: {}}", "prices.yaml:2: spot_pools.g6.huge: g6.huge is not in instance_types"),
    "nothing": ("models", "", "models.yaml:1: holds no keys; remove it, or fill it"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_override_names_its_file_and_line(name: str, tmp_path: Path) -> None:
    file, text, expected = BROKEN[name]
    with pytest.raises(CatalogueFileProblems) as caught:
        load_catalogue(folder(tmp_path, **{file: text}))
    said = [str(problem).removeprefix(f"{tmp_path}/catalogue/") for problem in caught.value.problems]
    assert any(line.startswith(expected) for line in said), said


def test_an_impossible_variant_is_reported_at_its_line(tmp_path: Path) -> None:
    with pytest.raises(PolicyProblems) as caught:
        resolve(folder(tmp_path, LLAMA_70B))
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.key) == (str(tmp_path / "u.yaml"), 8, "u/chat.variants[v].tp")


def test_problems_of_policies_and_overrides_come_together(tmp_path: Path) -> None:
    path = folder(tmp_path, models="")
    (path / "u.yaml").write_text(UNIT.replace("goal: cost", "goal: speed"))
    with pytest.raises(PolicyProblems) as caught:
        resolve(path)
    assert [Path(problem.file).name for problem in caught.value.problems] == ["models.yaml", "u.yaml"]


def test_shape_differs_where_any_constant_differs() -> None:
    shape = shape_of(LLAMA_8B, "g6e.2xlarge")
    assert shape == shape_of(LLAMA_8B, "g6e.2xlarge")
    assert shape != replace(shape, load_prior_s=1.0)


def test_a_price_is_that_of_its_region_market_and_day(tmp_path: Path) -> None:
    newest, old = (
        CATALOGUE.price("p5.48xlarge", "us-east-1", "on_demand", day) for day in ("2026-01-01", "2024-01-01")
    )
    assert newest is not None
    assert old is not None
    assert (newest.usd_per_h, newest.since, old.usd_per_h) == (55.04, "2025-06-23", 98.32)
    assert CATALOGUE.price("p5.48xlarge", "us-east-1", "on_demand", "2020-01-01") is None
    block = CATALOGUE.price("p5e.48xlarge", "us-east-2", "block")
    assert block is not None
    assert block.usd_per_h == 43.26
    own = (
        "prices: [{instance_type: p5.48xlarge, region: us-east-1, market: on_demand, since: 2026-07-20, usd_per_h: 40.0, "
        "source: [skypilot-catalog]}]"
    )
    changed = load_catalogue(folder(tmp_path, prices=own)).price("p5.48xlarge", "us-east-1", "on_demand")
    assert changed is not None
    assert changed.usd_per_h == 40.0


def test_the_files_that_the_docs_show_are_files(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    shown = dict(re.findall(r"```yaml\n# catalogue/(\w+)\.yaml\n(.*?)```", text, re.DOTALL))
    assert sorted(shown) == ["models", "performance", "prices"]
    loaded = load_catalogue(folder(tmp_path, **shown))
    assert loaded.measurement("corp/own-8b", "l40s", 1, "bf16") is not None
    price = loaded.price("p5.48xlarge", "us-east-1", "on_demand")
    assert price is not None
    assert price.usd_per_h == 41.0


def test_today_s_us_east_1_prices_are_the_types_own() -> None:
    for name, instance in CATALOGUE.instance_types.items():
        price = CATALOGUE.price(name, "us-east-1", "on_demand")
        assert (price is None) == (instance.on_demand_usd_per_h is None), name
        if price is not None:
            assert price.usd_per_h == pytest.approx(instance.on_demand_usd_per_h, rel=1e-4), name


@pytest.mark.data
def test_types_and_cards_are_what_the_published_tables_say(qm_data: Path) -> None:
    with (qm_data / "catalogue" / "ec2_accelerated_instance_types.csv").open() as file:
        types = {row["instance_type"]: row for row in csv.DictReader(file)}
    for name, instance in CATALOGUE.instance_types.items():
        row, gpu = types[name], CATALOGUE.gpus[instance.gpu]
        assert (instance.gpus, instance.vcpus) == (int(row["gpu_count"]), int(row["vcpus"])), name
        assert gpu.memory_mib == pytest.approx(int(row["gpu_mem_mib_each"]), rel=0.03), name
        assert instance.efa_interfaces == int(row["efa_interfaces"]), name
        assert instance.local_nvme_gb == pytest.approx(float(row["local_nvme_gb"]), rel=0.01), name
        assert instance.network_gbps == pytest.approx(float(row["network_mbps"]) / 1000.0, rel=0.01), name
    with (qm_data / "catalogue" / "model_cards.csv").open() as file:
        cards = list(csv.DictReader(file))
    assert len(cards) == 25
    for row in cards:
        card = CATALOGUE.models[row["model"]]
        assert card.kv_bytes_per_token == int(row["kv_bytes_per_token_bf16"]), row["model"]
        assert (card.layers, card.heads, card.max_position) == (
            int(row["layers"]), int(row["heads"]), int(row["max_position"]),
        )  # fmt: skip
        assert card.weights_gb["bf16"] == float(row["weights_gb_bf16"])
