"""What vLLM, SGLang and the embedded engine report ends up under the same names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest

from polar.engines.embedded.server import families as embedded_families
from polar.telemetry.readings import Readings, families, read, without_credentials

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a name with } and spaces"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1.25e+02
vllm:generation_tokens_total{engine="0",model_name="m"} 42.0
vllm:request_success_total{finished_reason="stop"} 7.0
"""

SGLANG = """
sglang:num_running_reqs{model_name="m",tp_rank="0"} 2.0
sglang:num_queue_reqs{model_name="m"} 5.0
sglang:token_usage{model_name="m"} 0.5
sglang:prompt_tokens_total{model_name="m"} 80.0
sglang:cached_tokens_total{cache_source="device"} 30.0
sglang:cached_tokens_total{cache_source="host"} 10.0
sglang:generation_tokens_total{model_name="m"} 20.0
"""


class Page(CollectorRegistry):
    def __init__(self, found: list[Metric]) -> None:
        super().__init__()
        self._found = found

    def collect(self) -> Iterator[Metric]:
        return iter(self._found)


def test_vllm_is_read_with_all_its_ranks() -> None:
    assert read(VLLM) == Readings(7.0, 1.0, 0.5, 1000.0, 125.0, 42.0)


def test_sglang_is_read() -> None:
    assert read(SGLANG) == Readings(2.0, 5.0, 0.5, 80.0, 40.0, 20.0)


def test_the_embedded_engine_s_own_page_reads_back() -> None:
    readings = Readings(1.0, 2.0, 0.125, 30.0, 10.0, 5.0)
    page = generate_latest(Page(list(embedded_families(readings, policy_version=4, is_paused=True))))
    assert read(page.decode()) == readings
    assert b"polar_engine_policy_version 4.0" in page
    assert b"polar_engine_paused 1.0" in page


@pytest.mark.parametrize(
    "page", ["", "not metrics\n", "vllm:num_requests_running\n", "sglang:token_usage x\n"]
)
def test_a_page_that_says_nothing_reads_as_nothing(page: str) -> None:
    assert read(page) == Readings()


def test_what_an_engine_does_not_say_is_absent_and_one_that_is_down_is_named() -> None:
    found = families({"http://a:1": Readings(requests_running=2.0), "http://user:pass@b:2": None})
    page = generate_latest(Page(list(found))).decode()
    assert 'polar_engine_up{engine="http://a:1"} 1.0' in page
    assert 'polar_engine_up{engine="http://b:2"} 0.0' in page
    assert 'polar_engine_requests_running{engine="http://a:1"} 2.0' in page
    assert "polar_engine_kv_usage_ratio{" not in page
    assert "pass" not in page


def test_an_address_is_shown_without_its_password() -> None:
    assert without_credentials("https://me:secret@engine:8000/v1") == "https://engine:8000"
