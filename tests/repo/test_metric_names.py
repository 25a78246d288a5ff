"""docs/metrics.md and the code name the same metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Metric

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


@pytest.fixture(scope="module")
def documented() -> set[str]:
    """Metrics in the first columns of the page's tables."""
    rows = re.findall(r"^\| (`qm_[^|]*)\|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(qm_\w+)`", row)}


def test_every_metric_is_documented_and_every_documented_metric_exists(documented: set[str]) -> None:
    exported = {name for registry in registries().values() for name in names(registry.collect())}
    assert exported == documented


@pytest.mark.parametrize("prefix", sorted(registries()))
def test_metrics_carry_the_prefix_of_who_exports_them(prefix: str) -> None:
    assert all(name.startswith(prefix) for name in names(registries()[prefix].collect()))
