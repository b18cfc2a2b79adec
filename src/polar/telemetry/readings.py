"""An engine's load and cache use, under the same names for every engine.

vLLM, SGLang and `polar engine` each have metrics with names of their own. A node reads the ones they have in
common and shows them as `polar_engine_…`, so that one query covers a mixed fleet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True)
class Readings:
    """What an engine reports; None if it does not report a value. Token counts are since its start."""

    requests_running: float | None = None
    requests_waiting: float | None = None
    kv_usage_ratio: float | None = None
    prompt_tokens: float | None = None
    """Prompt tokens looked up in the prefix cache."""
    cached_tokens: float | None = None
    """Prompt tokens found in the prefix cache and not computed again."""
    sampled_tokens: float | None = None


_COUNTERS = frozenset({"prompt_tokens", "cached_tokens", "sampled_tokens"})
_SOURCES = {
    "requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "prompt_tokens": ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total"),
    "cached_tokens": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "sampled_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
}
_FIELDS = {name: field for field, names in _SOURCES.items() for name in names}
_FIELDS |= {f"polar_engine_{field}{'_total' if field in _COUNTERS else ''}": field for field in _SOURCES}

_SAMPLE = re.compile(rf"^({'|'.join(map(re.escape, _FIELDS))})(?:\{{.*\}})? (\S+)", re.MULTILINE)
"""Matches one sample of interest; most of an engine's thousands of lines are histogram buckets."""

_HELP = {
    "requests_running": "Requests that the engine is decoding.",
    "requests_waiting": "Requests waiting in the engine.",
    "kv_usage_ratio": "Fraction of the engine's KV cache in use, from 0 to 1.",
    "prompt_tokens": "Prompt tokens looked up in the engine's prefix cache.",
    "cached_tokens": "Prompt tokens found in the engine's prefix cache.",
    "sampled_tokens": "Tokens sampled by the engine.",
}


def read(page: str) -> Readings:
    """Parse an engine's metrics page; counts of several ranks are added up, ratios averaged."""
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(page):
        with suppress(ValueError):
            number = float(value)
            found.setdefault(_FIELDS[name], []).append(number)
    return Readings(
        **{
            field: sum(values) / (len(values) if field.endswith("_ratio") else 1)
            for field, values in found.items()
        }
    )


def families(readings: Mapping[str, Readings | None]) -> Iterable[Metric]:
    """Return metrics for engines' readings by URL; None stands for an engine that could not be read."""
    up = GaugeMetricFamily("polar_engine_up", "Whether the engine could be read.", labels=["engine"])
    for url, found in readings.items():
        up.add_metric([without_credentials(url)], 0.0 if found is None else 1.0)
    yield up
    for field, help in _HELP.items():
        family = _kind(field)(f"polar_engine_{field}", help, labels=["engine"])
        for url, found in readings.items():
            if (value := getattr(found, field, None)) is not None:
                family.add_metric([without_credentials(url)], value)
        yield family


def own_families(readings: Readings) -> Iterable[Metric]:
    """Return metrics for the engine that serves this page itself."""
    for field, help in _HELP.items():
        yield _kind(field)(f"polar_engine_{field}", help, value=getattr(readings, field) or 0.0)


def _kind(field: str) -> type[CounterMetricFamily] | type[GaugeMetricFamily]:
    return CounterMetricFamily if field in _COUNTERS else GaugeMetricFamily


def without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
