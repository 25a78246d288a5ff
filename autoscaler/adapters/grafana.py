"""The Grafana dashboard over the controller's metrics, as data; `deploy/grafana/quartermaster.json` is what it prints:

    python -m autoscaler.adapters.grafana > deploy/grafana/quartermaster.json

Pure; may not read a metric. Every expression names series of `exposition`, `telemetry` or the recording rules in
`deploy/prometheus` only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

WIDTH, HEIGHT = 24, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}
MINE = 'service=~"$service"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: (expression, legend) pairs. `across` is how many fit in a row."""

    title: str
    rows: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    across: int = 3
    stacked: bool = False
    text: str = ""


PANELS: tuple[Panel, ...] = (
    Panel(title="Services short", rows=(("sum(qm_shortfall_replicas > bool 0)", ""),), kind="stat", across=6),
    Panel(title="Replicas lacking", rows=(("sum(qm_shortfall_replicas)", ""),), kind="stat", across=6),
    Panel(title="Ports not seen", rows=(("sum(qm_blind)", ""),), kind="stat", across=6),
    Panel(title="USD an hour", rows=(("qm_cost_usd_per_h", ""),), unit="currencyUSD", kind="stat", across=6),
    Panel(
        title="Error budget left, worst",
        rows=(("min(qm:slo_budget_left:ratio30d)", ""),),
        unit="percentunit",
        kind="stat",
        across=6,
    ),
    Panel(
        title="Journal entry of the plan",
        rows=(("qm_plan_seq", ""),),
        unit="none",
        kind="stat",
        across=6,
        text="The record of this number holds the plan with all its reasons.",
    ),
    Panel(
        title="Demand, forecast and what is ready",
        rows=(
            (f"qm_arrivals_rps{{{MINE}}}", "{{service}} arrives"),
            (f"qm_demand_rps{{{MINE}}}", "{{service}} planned for"),
            (f"qm_forecast_rps{{{MINE}}}", "{{service}} forecast {{level}}"),
            (f"sum by (service) (qm_ready_replicas{{{MINE}}} * qm_replica_capacity_rps)", "{{service}} ready carries"),
        ),
        unit="reqps",
        across=2,
    ),
    Panel(
        title="Replicas",
        rows=(
            (f"qm_needed_replicas{{{MINE}}}", "{{service}} needed"),
            (f"sum by (service) (qm_wanted_replicas{{{MINE}}})", "{{service}} with a place"),
            (f"sum by (service) (qm_target_replicas{{{MINE}}})", "{{service}} published"),
            (f"sum by (service) (qm_ready_replicas{{{MINE}}})", "{{service}} ready"),
            (f"sum by (service) (qm_coming_replicas{{{MINE}}})", "{{service}} coming"),
        ),
        across=2,
    ),
    Panel(
        title="Ready replicas by rung",
        rows=((f"sum by (market) (qm_rung_replicas{{{MINE}}})", "{{market}}"),),
        stacked=True,
    ),
    Panel(
        title="Requests that missed their limits",
        rows=(
            (f"qm:slo_miss:ratio_rate5m{{{MINE}}}", "{{service}} 5 min"),
            (f"qm:slo_miss:ratio_rate1h{{{MINE}}}", "{{service}} 1 h"),
            (f"1 - qm_slo_target_fraction{{{MINE}}}", "{{service}} allowed"),
        ),
        unit="percentunit",
    ),
    Panel(
        title="Error budget left", rows=((f"qm:slo_budget_left:ratio30d{{{MINE}}}", "{{service}}"),), unit="percentunit"
    ),
    Panel(title="Why", rows=((f"qm_reason{{{MINE}}}", "{{service}} {{code}}"),), kind="table"),
    Panel(
        title="Queued, KV cache",
        rows=(
            (f"qm_queued_requests{{{MINE}}}", "{{service}} queued"),
            (f"qm_kv_cache_fraction{{{MINE}}}", "{{service}} KV"),
        ),
    ),
    Panel(
        title="What covers and how long it takes",
        rows=(
            (f"qm_forecast_coverage_fraction{{{MINE}}}", "{{service}} coverage of .95"),
            (f"qm_lead_seconds{{{MINE}}}", "{{service}} lead, s"),
        ),
    ),
    Panel(title="Orders in force", rows=(("qm_orders", "orders"),)),
    Panel(title="Odds of a grant", rows=(("qm_pool_odds", "{{offering}}"),), unit="percentunit"),
    Panel(
        title="Rest left",
        rows=(
            ("clamp_min(qm_cooldown_until - time(), 0)", "{{offering}}"),
            ("clamp_min(qm_breaker_open_until - time(), 0)", "breaker {{instance_type}}"),
        ),
        unit="s",
    ),
    Panel(title="Refusals in a row", rows=(("qm_refusals_in_row > 0", "{{offering}}"),)),
    Panel(title="Launch calls", rows=(("sum by (outcome) (rate(qm_launches_total[5m]))", "{{outcome}}"),), unit="ops"),
    Panel(title="Refusals by class", rows=(("sum by (class) (rate(qm_refusals_total[5m]))", "{{class}}"),), unit="ops"),
    Panel(title="Instances", rows=(("qm_instances > 0", "{{offering}}"),), stacked=True),
    Panel(title="Starting", rows=(("qm_starting_instances > 0", "{{offering}}"),), stacked=True),
    Panel(
        title="Cost by unit and budget",
        rows=(("qm_unit_cost_usd_per_h", "{{unit}}"), ("qm_unit_budget_usd_per_h", "{{unit}} budget")),
        unit="currencyUSD",
    ),
    Panel(
        title="Month spent",
        rows=(("qm_unit_month_usd / qm_unit_budget_usd_per_month", "{{unit}}"),),
        unit="percentunit",
    ),
    Panel(title="GPUs and share", rows=(("qm_unit_gpus", "{{unit}}"), ("qm_unit_quota_gpus", "{{unit}} share"))),
    Panel(
        title="Idle reservations, USD an hour",
        rows=(("qm_idle_reserved_instances * qm_price_usd_per_h", "{{offering}}"),),
        unit="currencyUSD",
    ),
    Panel(title="Kept because it could not be had again", rows=((f"qm_kept_instances{{{MINE}}} > 0", "{{service}}"),)),
    Panel(
        title="Boot and load",
        rows=(
            ("qm_boot_seconds", "{{instance_type}} boot"),
            (f"qm_load_seconds{{{MINE}}}", "{{service}} {{variant}} load"),
        ),
        unit="s",
    ),
    Panel(
        title="Time of a tick, P99",
        rows=(("histogram_quantile(0.99, rate(qm_tick_seconds_bucket[5m]))", "tick"),),
        unit="s",
    ),
)


def expressions() -> Iterator[str]:
    """Every query of the dashboard."""
    return (expression for panel in PANELS for expression, _ in panel.rows)


def dashboard() -> dict[str, Any]:
    """Grafana's own JSON of all panels, laid out from left to right."""
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "service",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": "label_values(qm_demand_rps, service)", "refId": "service"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    return {
        "title": "Quartermaster",
        "uid": "quartermaster",
        "tags": ["quartermaster"],
        "schemaVersion": 39,
        "version": 1,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables},
        "panels": list(_placed()),
    }


def _placed() -> Iterator[dict[str, Any]]:
    x = y = high = 0
    for number, panel in enumerate(PANELS, start=1):
        width, height = WIDTH // panel.across, HEIGHT // 2 if panel.kind == "stat" else HEIGHT
        if x + width > WIDTH:
            x, y, high = 0, y + high, 0
        yield _panel(panel, number) | {"gridPos": {"x": x, "y": y, "w": width, "h": height}}
        x, high = x + width, max(high, height)


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stacked else {}
    instant = panel.kind != "timeseries"
    return {
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "type": panel.kind,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + n),
                "expr": expression,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
            }
            for n, (expression, legend) in enumerate(panel.rows)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
