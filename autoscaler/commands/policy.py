"""`qm check`, `qm render`, `qm apply` and `qm schema`: what a person does with policy files.

May not start anything. Bad input leaves as BadInput or PolicyProblems; `apply_command` is the only one that changes
anything, through Serve's REST interface.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import yaml

from autoscaler.adapters.ray_auth import WANTS_TOKEN, auth_headers
from autoscaler.catalogue import Catalogue, CatalogueProblems, Resolved, located, resolve
from autoscaler.commands.outcome import BAD_INPUT, OK, BadInput, check_json, check_port, write_json
from autoscaler.commands.promises import broken_promises
from autoscaler.render import Engine, differences, serve_config
from policies.load import Origin, PolicyProblems, origins
from policies.problems import Problem, Problems
from serve_apps.wire import GATEWAY_APP, split_app

APPLICATIONS_PATH = "/api/serve/applications/"
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
HEADER = "# Made by qm render; change the policies instead. Deploy with: qm apply, or serve deploy FILE\n"
Schema = Callable[[], dict[str, Any]]


def check_command(folder: Path, resolved: bool = False, json_out: str | None = None) -> int:
    """Reads everything in `folder` and prints what is wrong, or with `resolved` every value in force and its origin.

    Everything: the units, the catalogue's overrides, and ``cloud/ec2.yaml`` where there is one.
    """
    check_json(json_out)
    try:
        found = _checked(folder)
    except Problems as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        _write(json_out, {"problems": [asdict(problem) for problem in error.problems], "violations": []})
        return BAD_INPUT
    values = origins(folder) if resolved else ()
    if json_out != "-":
        _print_summary(found, values)
    _write(json_out, _summary(found, values))
    return OK


def render_command(folder: Path, engine: Engine, out: str | None = None, http_port: int = 8000) -> int:
    """Writes the Serve config for `folder` to the file `out`, or to standard output."""
    _, config = _rendered(folder, engine, http_port)
    text = HEADER + yaml.safe_dump(config, sort_keys=False)
    if out in (None, "-"):
        print(text, end="")
        return OK
    try:
        Path(str(out)).write_text(text)
    except OSError as error:
        raise BadInput(f"--out {out}: {error.strerror}; give a file that can be written") from error
    return OK


def apply_command(
    folder: Path, engine: Engine, dashboard_url: str, dry_run: bool = False, yes: bool = False, http_port: int = 8000
) -> int:
    """Shows what `folder` changes in the Serve config that runs at `dashboard_url`, and after a yes puts it in force.

    Applications that are not Quartermaster's stay as they are, and so does every running target.
    """
    _, config = _rendered(folder, engine, http_port)
    with httpx.Client(base_url=dashboard_url, timeout=TIMEOUT, headers=auth_headers(), trust_env=False) as client:
        current = _deployed(client, dashboard_url)
        config["applications"] += [app for app in current["applications"] if not _is_ours(app["name"])]
        lines = differences(current, config)
        print("\n".join(lines) if lines else "nothing to change")
        if not lines or dry_run:
            return OK
        if not yes:
            _ask(len(lines))
        _call(client, dashboard_url, "PUT", config)
    print(f"accepted: {len(lines)} changes; running targets are kept")
    return OK


def schema_command(name: str, extra: Mapping[str, Schema] | None = None) -> int:
    """Prints the JSON Schema of one format. `extra` adds formats of packages that this one may not import."""
    known = {**SCHEMAS, **(extra or {})}
    if name not in known:
        raise BadInput(f"schema {name}: is not a format; choose one of {', '.join(sorted(known))}")
    print(json.dumps(known[name](), indent=2))
    return OK


def _checked(folder: Path) -> Resolved:
    """Everything in `folder`. Raises Problems with those of the policies and of the cloud's file together."""
    problems: list[Problem] = []
    try:
        found, _ = _rendered(folder, "vllm")
        if broken := broken_promises(found):
            raise located(folder, CatalogueProblems(broken))
    except PolicyProblems as error:
        problems += error.problems
    problems += _cloud_problems(folder / "cloud" / "ec2.yaml")
    if problems:
        raise Problems(problems)
    return found


def _cloud_problems(path: Path) -> tuple[Problem, ...]:
    """What is wrong with the cloud's file at `path`; nothing where there is none. A link that leads nowhere is one."""
    if not path.exists() and not path.is_symlink():
        return ()
    from autoscaler.adapters.ec2.load import load_ec2  # costs time that a folder without a cloud need not spend

    try:
        load_ec2(path.parent.parent)
    except Problems as error:
        return error.problems
    return ()


def _rendered(folder: Path, engine: Engine, http_port: int = 8000) -> tuple[Resolved, dict[str, Any]]:
    """Everything in `folder` and its Serve config. Raises PolicyProblems, and BadInput for a port that is none."""
    check_port("--http-port", http_port)
    found = resolve(folder)
    try:
        return found, serve_config(found.policy, found.shapes, engine=engine, http_port=http_port)
    except CatalogueProblems as error:
        raise located(folder, error) from error


def _summary(found: Resolved, values: tuple[Origin, ...]) -> dict[str, Any]:
    return {
        "problems": [],
        "violations": [],
        "units": len(found.policy.units),
        "services": len(found.policy.services()),
        "variants": len(found.shapes),
        "resolved": [asdict(value) for value in values],
        "shapes": [asdict(shape) for shape in found.shapes],
    }


def _print_summary(found: Resolved, values: tuple[Origin, ...]) -> None:
    for value in values:
        print(f"{value.key} = {json.dumps(value.value)}  ({value.file}:{value.line})")
    for shape in found.shapes if values else ():
        kv = shape.timing.kv_capacity_tokens
        where = f"{shape.gpus} GPU of {shape.instance_type}, KV for {kv} tokens, loads in {shape.load_prior_s:.0f} s"
        print(f"{shape.service}.{shape.variant}: {where}  ({shape.source})")
    counts = len(found.policy.units), len(found.policy.services()), len(found.shapes)
    print("no problem: {} units, {} services, {} variants".format(*counts))


def _write(json_out: str | None, report: dict[str, Any]) -> None:
    if json_out is not None:
        write_json(json_out, json.dumps(report, indent=1).encode())


def _is_ours(app: str) -> bool:
    return app == GATEWAY_APP or split_app(app) is not None


def _deployed(client: httpx.Client, dashboard_url: str) -> dict[str, Any]:
    """The config in force, in the form of a Serve config: only the fields that somebody set."""
    details = _call(client, dashboard_url, "GET")
    applications = [app.get("deployed_app_config") for app in details.get("applications", {}).values()]
    running = bool(details.get("controller_info", {}).get("node_id"))
    head = {key: details[key] for key in ("proxy_location", "http_options") if running and details.get(key)}
    return {**head, "applications": [app for app in applications if app]}


def _call(client: httpx.Client, dashboard_url: str, method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Serve's answer. Raises BadInput when there is no Ray at the address, or it says no."""
    try:
        response = client.request(method, APPLICATIONS_PATH, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "start Ray with its dashboard, or correct --dashboard-url"
        raise BadInput(f"--dashboard-url {dashboard_url}: no Ray answers there ({error}); {remedy}") from error
    if response.status_code in (401, 403):
        raise BadInput(f"--dashboard-url {dashboard_url}: {WANTS_TOKEN}")
    if response.status_code != httpx.codes.OK:
        reason = " ".join(response.text.split())[:300]
        raise BadInput(f"--dashboard-url {dashboard_url}: answered {response.status_code} ({reason}); see Ray's log")
    try:
        answer = response.json() if method == "GET" else {}
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise BadInput(f"--dashboard-url {dashboard_url}: something else than Ray answers there; correct the address")
    return answer


def _ask(changes: int) -> None:
    if not sys.stdin.isatty():
        raise BadInput("--yes: is needed to apply changes when there is no terminal to ask; add --yes, or --dry-run")
    if input(f"apply {changes} changes? [y/N] ").strip().lower() not in ("y", "yes"):
        raise BadInput("apply: not confirmed; nothing was changed")


def _policy_schema() -> dict[str, Any]:
    from policies.model import Unit

    return Unit.model_json_schema()


def _plan_schema() -> dict[str, Any]:
    from autoscaler.core.events import PLAN

    return PLAN.json_schema()


def _journal_schema() -> dict[str, Any]:
    from autoscaler.core.events import RECORD

    return RECORD.json_schema()


def _board_schema() -> dict[str, Any]:
    from serve_apps.wire import PlanMessage

    return PlanMessage.model_json_schema()


SCHEMAS: Mapping[str, Schema] = {
    "policy": _policy_schema,
    "catalogue": Catalogue.model_json_schema,
    "plan": _plan_schema,
    "journal": _journal_schema,
    "board": _board_schema,
}
