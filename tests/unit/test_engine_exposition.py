"""Engine gauges are read out of a node's whole exposition: the right series, of live replicas, real numbers only."""

from __future__ import annotations

import httpx
import pytest

from autoscaler.adapters.prometheus import EngineScraper, EngineStat, parse_engines
from autoscaler.core.model import Measured, Missing
from autoscaler.ports import Transient

PAGE = """# HELP ray_vllm_num_requests_running Number of requests in model execution batches.
# TYPE ray_vllm_num_requests_running gauge
ray_vllm_num_requests_running{Component="core_worker",ReplicaId="abc",engine="0",model_name="tiny"} 3.0
ray_vllm_num_requests_running{ReplicaId="dead",engine="0",model_name="a}b\\"c"} 9.0
ray_vllm_num_requests_waiting{ReplicaId="abc",engine="0"} NaN
ray_vllm_num_requests_waiting{ReplicaId="new",engine="0"} 2.0 1700000000
ray_vllm_kv_cache_usage_perc{ReplicaId="abc",engine="0"} 0.25
ray_vllm_kv_cache_usage_perc{ReplicaId="new",engine="0"} -1.0
ray_vllm_num_requests_running{engine="0"} 5.0
ray_vllm_prompt_tokens_total{ReplicaId="abc"} 100
ray_serve_num_requests_running{ReplicaId="abc"} 8.0
"""


def test_the_wanted_series_are_read_and_nonsense_is_dropped() -> None:
    assert parse_engines(PAGE) == {
        "abc": EngineStat(running=3.0, kv_fraction=0.25),
        "dead": EngineStat(running=9.0),
        "new": EngineStat(waiting=2.0),
    }


def test_only_answering_nodes_count() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "away":
            raise httpx.ConnectTimeout("away")
        return httpx.Response(200 if request.url.host == "good" else 500, text=PAGE)

    scraper = EngineScraper(lambda: ("http://away/metrics", "http://good/metrics", "http://ill/metrics"))
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        scraper.scrape_once(client)
    found = {engine.replica_id: engine for engine in scraper.engines(7.0)}
    assert set(found) == {"abc", "dead", "new"}
    assert found["abc"].running == Measured(value=3.0, at_s=7.0)
    assert found["abc"].kv_fraction == Measured(value=0.25, at_s=7.0)
    assert isinstance(found["abc"].waiting, Missing)


def test_stats_are_forgotten_when_the_cluster_cannot_be_asked() -> None:
    pages = [("http://good/metrics",)]

    def urls() -> tuple[str, ...]:
        if not pages:
            raise Transient("no Ray")
        return pages.pop()

    scraper = EngineScraper(urls)
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, text=PAGE))) as client:
        scraper.scrape_once(client)
        assert scraper.engines(7.0)
        scraper.scrape_once(client)
    with pytest.raises(Transient, match="no node's metrics endpoint"):
        scraper.engines(7.0)
