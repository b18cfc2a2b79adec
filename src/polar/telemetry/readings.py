"""What an engine says of its load and its caches, in one vocabulary for all of them.

vLLM, SGLang and `polar engine` each show a page of metrics with names of their own; a node reads the few
of them that everyone has and shows them as `polar_engine_…`, so that one query covers a mixed fleet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True)
class Readings:
    """None: the engine does not say."""

    requests_running: float | None = None
    requests_waiting: float | None = None
    kv_usage_ratio: float | None = None
    """How much of the KV cache is taken, from 0 to 1."""
    prompt_tokens: float | None = None
    """Since its start, as the next two: prompt tokens that were looked for in the prefix cache."""
    cached_tokens: float | None = None
    """Of these, tokens that were found there and not computed again."""
    sampled_tokens: float | None = None


_NAMES: dict[str, tuple[str, ...]] = {
    "requests_running": (
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "polar_engine_requests_running",
    ),
    "requests_waiting": (
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "polar_engine_requests_waiting",
    ),
    "kv_usage_ratio": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "polar_engine_kv_usage_ratio",
    ),
    "prompt_tokens": (
        "vllm:prefix_cache_queries_total",
        "sglang:prompt_tokens_total",
        "polar_engine_prompt_tokens_total",
    ),
    "cached_tokens": (
        "vllm:prefix_cache_hits_total",
        "sglang:cached_tokens_total",
        "polar_engine_cached_tokens_total",
    ),
    "sampled_tokens": (
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "polar_engine_sampled_tokens_total",
    ),
}
_FIELDS = {name: field for field, names in _NAMES.items() for name in names}

_SAMPLE = re.compile(rf"^({'|'.join(map(re.escape, _FIELDS))})(?:\{{.*\}})? (\S+)", re.MULTILINE)
"""One sample of interest; an engine's page has thousands of lines, most of them buckets."""

_HELP = {
    "requests_running": "Requests that the engine decodes.",
    "requests_waiting": "Requests that wait in the engine.",
    "kv_usage_ratio": "How much of the engine's KV cache is taken, from 0 to 1.",
    "prompt_tokens": "Prompt tokens looked for in the engine's prefix cache.",
    "cached_tokens": "Prompt tokens found in the engine's prefix cache.",
    "sampled_tokens": "Tokens that the engine has sampled.",
}
_COUNTERS = frozenset({"prompt_tokens", "cached_tokens", "sampled_tokens"})


def read(page: str) -> Readings:
    """The readings on an engine's page of metrics; those of several ranks are added up, ratios averaged."""
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(page):
        try:
            number = float(value)
        except ValueError:
            continue
        found.setdefault(_FIELDS[name], []).append(number)
    return Readings(
        **{
            field: sum(values) / (len(values) if field.endswith("_ratio") else 1)
            for field, values in found.items()
        }
    )


def families(readings: Mapping[str, Readings | None]) -> Iterable[Metric]:
    """The readings of engines, by URL, as metrics; None: an engine that could not be asked."""
    up = GaugeMetricFamily("polar_engine_up", "Whether the engine could be asked.", labels=["engine"])
    for url, read_there in readings.items():
        up.add_metric([shown(url)], 0.0 if read_there is None else 1.0)
    yield up
    for field in fields(Readings):
        kind = CounterMetricFamily if field.name in _COUNTERS else GaugeMetricFamily
        family = kind(f"polar_engine_{field.name}", _HELP[field.name], labels=["engine"])
        for url, read_there in readings.items():
            value = None if read_there is None else getattr(read_there, field.name)
            if value is not None:
                family.add_metric([shown(url)], value)
        yield family


def own_families(readings: Readings) -> Iterable[Metric]:
    """The readings of the one engine that shows this page itself."""
    for field in fields(Readings):
        kind = CounterMetricFamily if field.name in _COUNTERS else GaugeMetricFamily
        value = getattr(readings, field.name)
        yield kind(f"polar_engine_{field.name}", _HELP[field.name], value=0.0 if value is None else value)


def shown(url: str) -> str:
    """The engine's address without a user's name and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
