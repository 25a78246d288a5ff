"""Engine gauges are read out of a node's whole exposition: the right series, of live replicas, real numbers only."""

from __future__ import annotations

import httpx
import pytest

from autoscaler.adapters.prometheus import EngineScraper, EngineStat, parse_engines
from autoscaler.core.model import EngineLoad, Measured, Missing
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


def law(steps: float, tokens: float, seconds: float, kv: float, prefills: float = 0.0) -> str:
    """The exposition of one engine's law counters: `prefills` of 600 tokens and .2 s each."""
    values = {"steps": steps, "step_tokens": tokens, "token_seconds": seconds, "kv_token_steps": kv}
    values |= {"prefills": prefills, "prefill_tokens": 600 * prefills, "prefill_seconds": 0.2 * prefills}
    return "".join(f'ray_qm_engine_{key}_total{{ReplicaId="abc"}} {value}\n' for key, value in values.items())


def looks(*pages: str) -> list[EngineLoad]:
    """What the scraper says of engine abc after each of these pages; an empty page is no new scrape."""
    texts = list(pages)
    scraper = EngineScraper(lambda: ("http://good/metrics",))
    found: list[EngineLoad] = []
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, text=texts[0]))) as client:
        while texts:
            if texts[0]:
                scraper.scrape_once(client)
            found += scraper.engines(7.0)
            texts.pop(0)
    return found


def test_the_iteration_law_is_read_between_two_looks() -> None:
    first, second = looks(law(100, 300, 9.0, 5e5, 2), law(300, 1100, 41.0, 1.5e6, 7))
    assert (first.steps, first.samples, first.tpot_s) == (0.0, 0.0, Missing(why="nothing since the last look"))
    assert (second.steps, second.samples) == (200.0, 5.0)
    assert second.tpot_s == Measured(value=32.0 / 800.0, at_s=7.0)
    assert second.batch == Measured(value=4.0, at_s=7.0)
    assert second.kv_tokens == Measured(value=5000.0, at_s=7.0)
    assert second.input_tokens == Measured(value=600.0, at_s=7.0)
    assert isinstance(second.prefill_s, Measured)
    assert second.prefill_s.value == pytest.approx(0.2)


def test_between_scrapes_and_after_a_restart_there_is_nothing_to_read() -> None:
    page = law(100, 300, 9.0, 5e5)
    for one in looks(page, "", law(50, 60, 1.0, 9.0))[1:]:
        assert one.steps == 0.0
        assert isinstance(one.tpot_s, Missing)
        assert isinstance(one.batch, Missing)
