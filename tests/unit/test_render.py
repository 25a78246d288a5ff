"""The rendered Serve config: what Serve's own schema says of it, what must never be in it, and what a change shows."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policies
from autoscaler.catalogue import Resolved, resolve
from autoscaler.render import RenderProblems, differences, serve_config
from policies.model import ApiKey, Overflow, PolicySet
from serve_apps.engine_args import parse
from serve_apps.wire import PROXY_MAX_S, LocalRule, Routes, split_app

FOLDER = Path(policies.__file__).parent


def found(name: str = "local/sim") -> Resolved:
    return resolve(FOLDER / name)


def config(name: str = "local/sim", engine: Any = "sim", **more: Any) -> dict[str, Any]:
    resolved = found(name)
    return serve_config(resolved.policy, resolved.shapes, engine=engine, **more)


def llm(application: dict[str, Any]) -> dict[str, Any]:
    (deployment,) = application["deployments"]
    assert isinstance(deployment, dict)
    return deployment


def changed(resolved: Resolved, **changes: Any) -> PolicySet:
    """The policy with the first service of the unit `support` changed."""
    units = []
    for unit in resolved.policy.units:
        service = unit.services[0].model_copy(update=changes)
        units.append(unit.model_copy(update={"services": (service,)}) if unit.unit == "support" else unit)
    return PolicySet(units=tuple(units))


@pytest.mark.parametrize(("name", "engine"), [("local/sim", "sim"), ("local/vllm", "vllm"), ("units", "vllm")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*", "ignore::pydantic.warnings.PydanticDeprecatedSince20")
def test_serve_accepts_every_shipped_policy(name: str, engine: str) -> None:
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

    rendered = config(name, engine)
    assert json.loads(json.dumps(rendered)) == rendered
    read = ServeDeploySchema.model_validate(rendered)
    assert read.applications[0].name == "qm-gateway"
    for app in rendered["applications"][1:]:
        AutoscalingConfig.model_validate(llm(app)["autoscaling_config"])


def test_every_variant_is_an_application_behind_one_gateway() -> None:
    gateway, *apps = config()["applications"]
    assert (gateway["name"], gateway["route_prefix"], gateway["import_path"]) == (
        "qm-gateway",
        "/",
        "serve_apps.gateway:build",
    )
    assert [app["name"] for app in apps[:2]] == ["support.chat.g6-12x", "support.chat.g5-12x"]
    assert len(apps) == len(found().shapes)
    for app in apps:
        assert app["route_prefix"] is None
        assert split_app(app["name"]) == (app["args"]["service"], app["args"]["variant"])
        assert app["autoscaling_policy"]["policy_kwargs"]["app"] == app["name"]
        assert LocalRule.model_validate(app["autoscaling_policy"]["policy_kwargs"]["local_rule"]).max_replicas >= 1


def test_servers_listen_on_this_machine_only_and_at_the_port_asked_for() -> None:
    http = config(http_port=9123)["http_options"]
    assert http == {"host": "127.0.0.1", "port": 9123, "request_timeout_s": PROXY_MAX_S}
    assert config()["proxy_location"] == "HeadOnly"


def test_no_replica_number_is_in_the_config() -> None:
    """Serve resets a running target to `initial_replicas` or `num_replicas` when a deployment's config changes."""
    for app in config()["applications"][1:]:
        deployment = llm(app)
        assert "num_replicas" not in deployment
        bounds = deployment["autoscaling_config"]
        assert "initial_replicas" not in bounds
        assert bounds["min_replicas"] == 0
        assert {bounds[key] for key in bounds if "delay" in key} == {0.0}


def test_a_replica_goes_only_where_its_policy_allows() -> None:
    first = llm(config()["applications"][1])["ray_actor_options"]
    assert first["label_selector"] == {"qm-instance-type": "g6.12xlarge", "qm-market": "in(on_demand,spot)"}
    assert (first["num_cpus"], first["num_gpus"]) == (0, 1)
    assert first["fallback_strategy"] == [{"label_selector": first["label_selector"]}]
    resolved = found()
    one = serve_config(changed(resolved, markets=("spot", "overflow"), zones=("b", "a")), resolved.shapes, engine="sim")
    labels = llm(one["applications"][1])["ray_actor_options"]["label_selector"]
    assert labels == {"qm-instance-type": "g6.12xlarge", "qm-market": "spot", "qm-zone": "in(a,b)"}
    every = ("odcr", "block", "interruptible", "spot", "on_demand")
    free = serve_config(changed(resolved, markets=every), resolved.shapes, engine="sim")
    assert llm(free["applications"][1])["ray_actor_options"]["label_selector"] == {"qm-instance-type": "g6.12xlarge"}


def test_tensor_parallel_replicas_take_their_gpus_on_one_node() -> None:
    apps = {app["name"]: app for app in config("units", "vllm")["applications"]}
    assert llm(apps["coding.agents.h100-fp8"])["ray_actor_options"]["num_gpus"] == 2
    assert apps["coding.agents.h100-fp8"]["args"]["tp"] == 2
    assert llm(apps["coding.agents.a100-40"])["ray_actor_options"]["num_gpus"] == 8


def test_a_replica_takes_more_requests_than_its_batch_and_has_time_to_finish_them() -> None:
    resolved = found()
    for app, shape in zip(config()["applications"][1:], resolved.shapes, strict=True):
        assert llm(app)["max_ongoing_requests"] > shape.timing.max_num_seqs
        assert llm(app)["graceful_shutdown_timeout_s"] == 30.0  # well below a notice of two minutes
    slo = resolved.policy.services()[0][2].slo.model_copy(update={"e2e_s": 300.0})
    slow = serve_config(changed(resolved, slo=slo), resolved.shapes, engine="sim")
    assert llm(slow["applications"][1])["graceful_shutdown_timeout_s"] == 300.0


@pytest.mark.parametrize(("name", "engine"), [("local/sim", "sim"), ("local/vllm", "vllm"), ("units", "vllm")])
def test_engines_and_gateway_understand_their_arguments(name: str, engine: str) -> None:
    gateway, *apps = config(name, engine)["applications"]
    for app, shape in zip(apps, found(name).shapes, strict=True):
        args = parse(app["args"])
        assert (args.max_num_seqs, args.max_model_len) == (shape.timing.max_num_seqs, shape.timing.max_model_len)
        assert (args.timing, args.load_s) == ((shape.timing, shape.load_prior_s) if engine == "sim" else (None, 0.0))
    routes = Routes.model_validate(llm(gateway)["user_config"])
    assert [route.service for route in routes.services] == [key for key, _, _ in found(name).policy.services()]


def test_before_any_plan_the_gateway_counts_on_the_floor_of_the_first_variant() -> None:
    routes = {route["service"]: route for route in llm(config()["applications"][0])["user_config"]["services"]}
    assert [v["target_replicas"] for v in routes["support/chat"]["variants"]] == [1, 0]
    assert [v["max_replicas"] for v in routes["support/chat"]["variants"]] == [28, 28]  # no cloud is known: as allowed
    assert [v["target_replicas"] for v in routes["research/nightly"]["variants"]] == [0, 0]
    assert all(v["capacity_rps_per_replica"] > 0 for route in routes.values() for v in route["variants"])


def test_time_scale_reaches_the_simulated_engine_only() -> None:
    assert config(time_scale=4.0)["applications"][1]["args"]["time_scale"] == 4.0
    assert "time_scale" not in config("local/vllm", "vllm", time_scale=4.0)["applications"][1]["args"]


def test_remeasured_constants_do_not_restart_vllm() -> None:
    resolved = found("local/vllm")
    before = serve_config(resolved.policy, resolved.shapes, engine="vllm")
    faster = tuple(replace(shape, timing=replace(shape.timing, a_s=shape.timing.a_s / 2)) for shape in resolved.shapes)
    after = serve_config(resolved.policy, faster, engine="vllm")
    assert before["applications"][1:] == after["applications"][1:]


@pytest.mark.parametrize("engine", ["sim", "vllm"])
def test_a_new_revision_replaces_the_replicas_of_its_service_and_of_no_other(engine: Any) -> None:
    resolved = found()
    old = serve_config(resolved.policy, resolved.shapes, engine=engine)
    new = serve_config(changed(resolved, revision="2026-12"), resolved.shapes, engine=engine)
    apps = [app["name"] for app in old["applications"] if app["name"].startswith("support.")]
    assert apps
    assert differences(old, new) == tuple(f"~ {app}: args.revision: unset -> 2026-12" for app in apps)


def test_a_new_limit_or_slo_restarts_no_replica() -> None:
    """Serve restarts an application's replicas when its arguments, import path or policy arguments change."""
    resolved = found()
    slo = resolved.policy.services()[0][2].slo.model_copy(update={"ttft_s": 9.0, "e2e_s": 200.0})
    edited = changed(resolved, min_replicas=3, max_replicas=30, priority=1, slo=slo, preemption_grace_s=9.0)
    rendered = (config(), serve_config(edited, resolved.shapes, engine="sim"))
    before, after = ({app["name"]: app for app in one["applications"][1:]} for one in rendered)
    for name, new in after.items():
        old = before[name]
        for key in ("args", "import_path", "autoscaling_policy"):
            assert old[key] == new[key]
        assert llm(old)["ray_actor_options"] == llm(new)["ray_actor_options"]
    assert llm(after["support.chat.g6-12x"])["autoscaling_config"]["max_replicas"] == 30


@pytest.mark.parametrize(("changes", "floor"), [({}, 1), ({"min_replicas": 0}, 0), ({"scale_to_zero": True}, 0)])
def test_before_any_plan_serve_keeps_one_replica_of_a_service_with_a_floor(changes: dict[str, Any], floor: int) -> None:
    resolved = found()
    apps = serve_config(changed(resolved, **changes), resolved.shapes, engine="sim")["applications"]
    rules = [app["autoscaling_policy"]["policy_kwargs"]["local_rule"]["min_replicas"] for app in apps[1:3]]
    assert rules == [floor, 0]


def test_the_same_policy_gives_the_same_bytes_whatever_the_order_of_its_lists() -> None:
    resolved = found()
    again = serve_config(changed(resolved, markets=("spot", "on_demand")), resolved.shapes, engine="sim")
    assert json.dumps(again) == json.dumps(config())


def test_what_cannot_be_deployed_is_said_for_every_variant() -> None:
    resolved = found()
    variants = resolved.policy.services()[0][2].variants
    spread = variants[0].model_copy(update={"nodes_per_replica": 2})
    split = variants[1].model_copy(update={"role": "prefill"})
    with pytest.raises(RenderProblems) as caught:
        serve_config(changed(resolved, variants=(spread, split)), resolved.shapes, engine="sim")
    assert [(problem.service, problem.key, problem.text) for problem in caught.value.details] == [
        (
            "support/chat",
            "variants[g6-12x].nodes_per_replica",
            "a replica cannot span nodes in this version; set 1, or raise tp",
        ),
        ("support/chat", "variants[g5-12x].role", "prefill and decode cannot be separate in this version; set both"),
    ]
    assert len(caught.value.problems) == 2


def test_differences_are_lines_of_application_field_and_both_values() -> None:
    wanted, current = config(), config()
    assert differences(current, wanted) == ()
    llm(current["applications"][1])["autoscaling_config"]["max_replicas"] = 8
    del current["applications"][2]["args"]["precision"]
    gone = current["applications"].pop()
    current["applications"].append({"name": "other", "import_path": "x:y"})
    current["http_options"]["port"] = 8001
    assert differences(current, wanted) == (
        f"+ {gone['name']}: new application",
        "- other: removed, with its replicas",
        "~ support.chat.g6-12x: deployments[LLM].autoscaling_config.max_replicas: 8 -> 28",
        "~ support.chat.g5-12x: args.precision: unset -> bf16",
        "~ serve: http_options.port: 8001 -> 8000 (needs a restart of Serve)",
    )


def test_with_nothing_deployed_everything_is_new() -> None:
    wanted = config()
    assert differences(None, wanted) == tuple(f"+ {app['name']}: new application" for app in wanted["applications"])


def test_differences_name_routes_by_service_and_application() -> None:
    wanted, current = config(), config()
    llm(current["applications"][0])["user_config"]["services"][0]["variants"][1]["target_replicas"] = 3
    path = "deployments[Gateway].user_config.services[support/chat].variants[support.chat.g5-12x].target_replicas"
    assert differences(current, wanted) == (f"~ qm-gateway: {path}: 3 -> 0",)


def test_a_changed_route_reaches_the_running_gateway_and_restarts_nothing() -> None:
    """Serve restarts an application's replicas when anything of it but these changes."""
    resolved = found()
    key = ApiKey(tenant="web", sha256="a" * 64, service="chat")
    given = Overflow(url="https://api.example.com/v1", usd_per_1m_tokens=2.0, rpm=60, key_env="KEY")
    policy = changed(resolved, priority=7, sacrifice=("queue", "overflow"), overflow=given)
    units = [u.model_copy(update={"api_keys": (key,)}) if u.unit == "support" else u for u in policy.units]
    wanted = serve_config(PolicySet(units=tuple(units)), resolved.shapes, engine="sim")
    lines = differences(config(), wanted)
    assert lines
    assert all(line.startswith("~ qm-gateway: deployments[Gateway].user_config.") for line in lines)
    routes = Routes.model_validate(llm(wanted["applications"][0])["user_config"])
    assert [(k.unit, k.tenant, k.service) for k in routes.keys] == [("support", "web", "support/chat")]
    chat = next(route for route in routes.services if route.service == "support/chat")
    assert chat.overflow is not None
    assert (chat.priority, chat.overflow.key_env, chat.overflow.rpm) == (7, "KEY", 60)


def test_the_order_of_applications_is_no_difference() -> None:
    wanted, current = config(), config()
    random.Random(1).shuffle(current["applications"])
    assert differences(current, wanted) == ()
