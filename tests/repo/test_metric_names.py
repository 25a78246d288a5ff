"""docs/operations.md, the rules, the dashboard and the code name the same metrics and alerts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from prometheus_client import CollectorRegistry, Metric

from autoscaler.adapters.exposition import SERIES
from autoscaler.adapters.grafana import dashboard, expressions
from autoscaler.adapters.telemetry import PrometheusTelemetry
from serve_apps.gateway import metrics as gateway_metrics
from tests.repo.tree import ROOT


def names(families: Iterable[Metric]) -> set[str]:
    """Names as a scrape shows them: a counter ends in _total."""
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def registries() -> dict[str, CollectorRegistry]:
    """The registries of a controller and of a gateway that serves nothing."""
    idle = cast(Any, SimpleNamespace(id="g", services={}))
    return {"qm_": PrometheusTelemetry().registry, "qm_gateway_": gateway_metrics.registry(idle)}


PAGE = ROOT / "docs" / "operations.md"
RULES = ROOT / "deploy" / "prometheus" / "quartermaster.rules.yaml"
LOGGED = {"qm_policy_refusals_total", "qm_telemetry_failures_total"}  # `qm run` tells each in its log
HISTOGRAMS = ("_bucket", "_count", "_sum")


def exported() -> set[str]:
    return {name for registry in registries().values() for name in names(registry.collect())}


def rules(kind: str) -> list[dict[str, Any]]:
    """The recording rules (`record`) or the alerts (`alert`)."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def used(expression: str) -> set[str]:
    """Series that an expression names; those of a histogram by its name."""
    found = set(re.findall(r"\bqm[_:][a-zA-Z0-9_:]*", expression))
    return {name.removesuffix(next((end for end in HISTOGRAMS if name.endswith(end)), "")) for name in found}


@pytest.fixture(scope="module")
def documented() -> set[str]:
    """Metrics in the first columns of the page's tables."""
    rows = re.findall(r"^\| (`qm_[^|]*)\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(qm_\w+)`", row)}


def test_every_metric_is_documented_and_every_documented_metric_exists(documented: set[str]) -> None:
    assert exported() == documented


@pytest.mark.parametrize("prefix", sorted(registries()))
def test_metrics_carry_the_prefix_of_who_exports_them(prefix: str) -> None:
    assert all(name.startswith(prefix) for name in names(registries()[prefix].collect()))


def test_labels_are_documented_as_they_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for series in SERIES:
        labels = ", ".join(f"`{label}`" for label in series.labels)
        assert f"| `{series.name}` | {labels}{' ' if labels else ''}|" in text, series.name


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    text = PAGE.read_text(encoding="utf-8")
    runbooks = dict(re.findall(r"^### (Qm\w+)\n\n\*\*(\w+)\.\*\*", text, re.MULTILINE))
    assert runbooks == {rule["alert"]: rule["labels"]["severity"] for rule in rules("alert")}


def test_rules_and_dashboard_name_only_what_exists() -> None:
    recorded = {rule["record"] for rule in rules("record")}
    asked = [rule["expr"] for kind in ("record", "alert") for rule in rules(kind)] + list(expressions())
    assert {name for expression in asked for name in used(expression)} <= exported() | recorded


def test_the_dashboard_is_what_the_code_makes_and_shows_every_metric_of_the_controller() -> None:
    path = ROOT / "deploy" / "grafana" / "quartermaster.json"
    assert json.loads(path.read_text(encoding="utf-8")) == dashboard()
    shown = {name for expression in expressions() for name in used(expression)}
    shown |= {name for rule in rules("record") for name in used(rule["expr"])}
    alone = {name for rule in rules("alert") for name in used(rule["expr"])}  # an alert tells it, when there is any
    assert names(registries()["qm_"].collect()) - shown - alone == LOGGED
