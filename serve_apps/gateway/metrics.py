"""The gateway's counters in Prometheus' format. Read-only views of what the board gets; may not change anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from .core import Gateway

_LABELS = ("service", "gateway")
_COUNTERS = {
    "arrivals": "Requests offered, counted before anything else is decided",
    "tasks": "Requests that began a task: the first with its X-Task-Id, and all without one",
    "completed": "Requests answered whole",
    "failed": "Requests that no replica could answer, or that broke after the first token",
    "shed": "Requests turned away with 429",
    "cold_start_waits": "Requests that waited because no replica was ready",
    "input_tokens": "Prompt tokens, as counted by the engine",
    "output_tokens": "Generated tokens",
    "met": "Answers within every limit of the service, the overflow endpoint's included",
    "overflowed": "Requests that the overflow endpoint answered whole",
    "overflow_tokens": "Tokens paid for at the overflow endpoint, prompts and probes included",
}
_GAUGES = {"queued": "Requests waiting for a slot", "running": "Requests in flight in engines"}


def registry(gateway: Gateway) -> CollectorRegistry:
    """A registry that shows this gateway only: two gateways in one process do not meet."""
    metrics = CollectorRegistry()
    metrics.register(_GatewayCollector(gateway))
    return metrics


class _GatewayCollector(Collector):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        rows = [
            ((service.policy.service, self._gateway.id), service.counters())
            for service in self._gateway.services.values()
        ]
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"qm_gateway_{name}", text, labels=_LABELS)
            for labels, row in rows:
                counter.add_metric(labels, getattr(row, name))
            yield counter
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"qm_gateway_{name}", text, labels=_LABELS)
            for labels, row in rows:
                gauge.add_metric(labels, getattr(row, name))
            yield gauge
        ttft = SummaryMetricFamily("qm_gateway_ttft_seconds", "Arrival to first token, of answers", labels=_LABELS)
        tpot = SummaryMetricFamily("qm_gateway_tpot_seconds", "Seconds per token after the first", labels=_LABELS)
        for labels, row in rows:
            ttft.add_metric(labels, count_value=row.completed, sum_value=row.ttft_sum_s)
            tpot.add_metric(labels, count_value=row.tpot_count, sum_value=row.tpot_sum_s)
        yield ttft
        yield tpot
        yield from self._tenants()

    def _tenants(self) -> Iterator[Metric]:
        """Tokens by tenant: as many series as there are keys, at most `service.MAX_TENANTS` a service."""
        labels = (*_LABELS, "tenant")
        inputs = CounterMetricFamily("qm_gateway_tenant_input_tokens", "Prompt tokens of a tenant", labels=labels)
        outputs = CounterMetricFamily("qm_gateway_tenant_output_tokens", "Generated tokens of a tenant", labels=labels)
        for service in self._gateway.services.values():
            for tenant, tokens in service.tenants.items():
                row = (service.policy.service, self._gateway.id, tenant)
                inputs.add_metric(row, tokens.input)
                outputs.add_metric(row, tokens.output)
        yield inputs
        yield outputs
