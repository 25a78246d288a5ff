"""Policies as a Ray Serve config, and what a new config would change. Pure; may not do I/O, read a clock or import Ray.

The text is stable: the same policies and shapes give the same config, and only a changed value changes it. Two things
are left out because Serve acts on their change. It resets a running target to `initial_replicas` whenever the config
of a deployment changes, so that is unset and no replica number is in it: targets come from the plan through
`serve_apps.serve_policy`. It restarts every replica when the policy's arguments change, so those hold nothing that a
limit or an SLO alters: the local rule in force is the last plan's, within the bounds of `autoscaling_config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Literal

from autoscaler.catalogue.shapes import CatalogueProblems, ShapeProblem
from autoscaler.core.beliefs import EMPTY
from autoscaler.core.capacity import capacity, mix_or_prior
from autoscaler.core.model import Plan, Route, Shape, Target
from autoscaler.core.publish import LOCAL_RULE_HOLD_S, LOCAL_RULE_LOAD, to_message
from policies.model import PolicySet, Service, Variant
from serve_apps.wire import (
    GATEWAY_APP,
    GATEWAY_DEPLOYMENT,
    LABEL_INSTANCE_TYPE,
    LABEL_MARKET,
    LABEL_ZONE,
    LLM_DEPLOYMENT,
    PROXY_MAX_S,
    LocalRule,
    Routes,
    app_name,
)

Engine = Literal["vllm", "sim"]
IMPORT_PATHS: dict[Engine, str] = {"vllm": "serve_apps.llm:build", "sim": "serve_apps.engine_sim:build"}
NODE_MARKETS = frozenset(("odcr", "block", "interruptible", "spot", "on_demand"))
LOOK_BACK_S = 10.5  # Serve warns below its metrics interval of 10 s
SHUTDOWN_MIN_S = 30.0
FIRST_REVISION = Service.model_fields["revision"].default
GATEWAY_REQUESTS = 10_000
FIRST_RULE_BATCH = 32  # a batch that engines of any size reach within common limits
UNBOUNDED_REPLICAS = 1000  # Serve clamps to autoscaling_config.max_replicas


class RenderProblems(CatalogueProblems):
    """Variants that exist but that this version cannot deploy."""


def serve_config(
    policy: PolicySet, shapes: tuple[Shape, ...], *, engine: Engine, http_port: int = 8000, time_scale: float = 1.0
) -> dict[str, Any]:
    """The body of ``PUT /api/serve/applications/`` (also a file for ``serve deploy``): the gateway, then every variant.

    `time_scale` is for the simulated engine: seconds of its timing law per real second. Raises RenderProblems.
    """
    problems = tuple(_undeployable(policy))
    if problems:
        raise RenderProblems(problems)
    by_key = {(shape.service, shape.variant): shape for shape in shapes}
    applications = [_gateway(_first_routes(policy, shapes))]
    for key, _, service in policy.services():
        for variant in service.variants:
            shape = by_key[key, variant.id]
            args = _engine_args(service, variant, shape, engine, time_scale)
            applications.append(_application(service, shape, IMPORT_PATHS[engine], args))
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": http_port, "request_timeout_s": PROXY_MAX_S},
        "applications": applications,
    }


def _undeployable(policy: PolicySet) -> Iterator[ShapeProblem]:
    for key, _, service in policy.services():
        for variant in service.variants:
            where = f"variants[{variant.id}]"
            if variant.nodes_per_replica > 1:
                text = "a replica cannot span nodes in this version; set 1, or raise tp"
                yield ShapeProblem(key, f"{where}.nodes_per_replica", text)
            if variant.role != "both":
                text = "prefill and decode cannot be separate in this version; set both"
                yield ShapeProblem(key, f"{where}.role", text)


def _first_routes(policy: PolicySet, shapes: tuple[Shape, ...]) -> Routes:
    """The gateway's routes until a plan arrives: those of a plan that keeps every floor on the first variant."""
    entries = {key: service for key, _, service in policy.services()}
    routes, targets = [], []
    for shape in shapes:
        entry = entries[shape.service]
        planned = capacity(shape.timing, mix_or_prior(0.0, 0.0, shape.timing), entry.slo, entry.goal)
        first = shape.variant == entry.variants[0].id
        floor = entry.min_replicas if first and not entry.scale_to_zero else 0
        routes.append(_route(shape, planned.batch, planned.rps))
        targets.append(Target(service=shape.service, variant=shape.variant, wanted=floor, replicas=floor, reasons=()))
    plan = Plan(
        id="render/0", at_s=0.0, demands=(), targets=tuple(targets), launches=(), drains=(), terminates=(),
        routes=tuple(routes), shortfalls=(),
    )  # fmt: skip
    message = to_message(plan, policy, replace(EMPTY, shapes=shapes), "render", 0, 0.0, 0.0)
    return Routes(services=message.services, keys=message.keys)


def _route(shape: Shape, batch: int, rps: float) -> Route:
    return Route(
        service=shape.service,
        variant=shape.variant,
        ready=0,
        max_concurrency_per_replica=batch,
        capacity_rps_per_replica=float(f"{rps:.6g}"),
    )


def _gateway(routes: Routes) -> dict[str, Any]:
    """The routes are its `user_config`, which Serve hands to the running replica; as `args` they would restart it."""
    return {
        "name": GATEWAY_APP,
        "route_prefix": "/",
        "import_path": "serve_apps.gateway:build",
        "deployments": [
            {
                "name": GATEWAY_DEPLOYMENT,
                "num_replicas": 1,
                "max_ongoing_requests": GATEWAY_REQUESTS,
                "user_config": routes.model_dump(mode="json"),
            }
        ],
    }


def _application(service: Service, shape: Shape, import_path: str, args: dict[str, Any]) -> dict[str, Any]:
    app = app_name(shape.service, shape.variant)
    rule = _first_rule(service, shape)
    # One more than the batch and a tenth: the next request is already there when a slot falls free.
    ongoing = shape.timing.max_num_seqs + 1 + shape.timing.max_num_seqs // 10
    return {
        "name": app,
        "route_prefix": None,
        "import_path": import_path,
        "args": args,
        "autoscaling_policy": {
            "policy_function": "serve_apps.serve_policy:PlanPolicy",
            "policy_kwargs": {"app": app, "local_rule": rule.model_dump(mode="json")},
        },
        "deployments": [
            {
                "name": LLM_DEPLOYMENT,
                "max_ongoing_requests": ongoing,
                "graceful_shutdown_timeout_s": _shutdown_s(service),
                "graceful_shutdown_wait_loop_s": 0.5,
                "ray_actor_options": _actor_options(service, shape),
                "autoscaling_config": _autoscaling(service, rule.target_ongoing_per_replica),
            }
        ],
    }


def _first_rule(service: Service, shape: Shape) -> LocalRule:
    """What Serve does before any plan: one replica of a service that keeps a floor, more for the requests in flight."""
    keeps_one = shape.variant == service.variants[0].id and service.min_replicas > 0 and not service.scale_to_zero
    return LocalRule(
        target_ongoing_per_replica=max(1.0, LOCAL_RULE_LOAD * min(shape.timing.max_num_seqs, FIRST_RULE_BATCH)),
        min_replicas=int(keeps_one),
        max_replicas=UNBOUNDED_REPLICAS,
        downscale_hold_s=LOCAL_RULE_HOLD_S,
    )


def _autoscaling(service: Service, target_ongoing: float) -> dict[str, Any]:
    """Bounds only; every delay is zero because the plan already holds where holding is right."""
    return {
        "min_replicas": 0,
        "max_replicas": service.max_replicas,
        "target_ongoing_requests": target_ongoing,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
        "look_back_period_s": LOOK_BACK_S,
    }


def _actor_options(service: Service, shape: Shape) -> dict[str, Any]:
    """GPUs and place of a replica.

    The fallback repeats the selector, so it allows no other place. It is there because Serve runs the task that builds
    an application under the selector of its replicas unless there is a fallback: without it, an application whose
    instance type is not running yet stays DEPLOYING, and its first replica waits for the build and for the instance.
    """
    labels = _labels(service, shape)
    fallback = [{"label_selector": dict(labels)}]
    return {"num_cpus": 0, "num_gpus": shape.gpus, "label_selector": labels, "fallback_strategy": fallback}


def _labels(service: Service, shape: Shape) -> dict[str, str]:
    """Where a replica may run. A limit that allows everything is left out."""
    labels = {LABEL_INSTANCE_TYPE: shape.instance_type}
    markets = [market for market in service.markets if market in NODE_MARKETS]
    if set(markets) != NODE_MARKETS:
        labels[LABEL_MARKET] = _one_of(markets)
    if service.zones:
        labels[LABEL_ZONE] = _one_of(service.zones)
    return labels


def _one_of(values: list[Any] | tuple[str, ...]) -> str:
    """Ray's label selector for a set, in sorted order so that the order of a policy's list changes nothing."""
    return values[0] if len(values) == 1 else f"in({','.join(sorted(values))})"


def _shutdown_s(service: Service) -> float:
    """Time a replica has to finish what it runs before Serve kills it.

    Serve stops a replica on a draining node this long before the node's deadline, successor or not: as long as a
    reclaim notice, it would stop all of them as the notice comes.
    """
    return max(SHUTDOWN_MIN_S, service.slo.e2e_s or 0.0)


def _engine_args(service: Service, variant: Variant, shape: Shape, engine: Engine, time_scale: float) -> dict[str, Any]:
    """vLLM is told limits, not timing: re-measured constants must not restart its replicas, a new `revision` must."""
    args: dict[str, Any] = {
        "service": shape.service,
        "variant": shape.variant,
        "model": service.model,
        "tp": variant.tp,
        "precision": variant.precision,
        "max_num_seqs": shape.timing.max_num_seqs,
        "max_model_len": shape.timing.max_model_len,
    }
    if service.revision != FIRST_REVISION:  # what every application began with changes none of them
        args["revision"] = service.revision
    if engine == "sim":
        args |= {"timing": asdict(shape.timing), "load_s": shape.load_prior_s, "time_scale": time_scale}
    return args


def differences(current: dict[str, Any] | None, wanted: dict[str, Any]) -> tuple[str, ...]:
    """One line per application and field that `wanted` changes in `current` (None: nothing is deployed)."""
    old, new = _applications(current or {}), _applications(wanted)
    lines = [f"+ {name}: new application" for name in new if name not in old]
    lines += [f"- {name}: removed, with its replicas" for name in old if name not in new]
    for name in new:
        if name in old:
            lines += [f"~ {name}: {line}" for line in _changes(_flat(old[name]), _flat(new[name]))]
    known = [key for key in ("proxy_location", "http_options") if key in (current or {})]
    head = {key: leaf for name in known for key, leaf in _flat(wanted[name], name).items()}
    before = {key: leaf for name in known for key, leaf in _flat((current or {})[name], name).items() if key in head}
    lines += [f"~ serve: {line} (needs a restart of Serve)" for line in _changes(before, head)]
    return tuple(lines)


def _applications(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {application["name"]: application for application in config.get("applications", [])}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for key in (*new, *(key for key in old if key not in new)):
        before, after = old.get(key, "unset"), new.get(key, "unset")
        if before != after:
            yield f"{key}: {before} -> {after}"


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves by dotted path; items of a list by their name where they have one."""
    if isinstance(value, dict) and value:
        pairs = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        pairs = [(f"{path}[{_label(item, index)}]", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    return {key: leaf for name, item in pairs for key, leaf in _flat(item, name).items()}


def _label(item: Any, index: int) -> Any:
    names = (item.get(key) for key in ("name", "service", "app")) if isinstance(item, dict) else ()
    return next((name for name in names if name), index)
