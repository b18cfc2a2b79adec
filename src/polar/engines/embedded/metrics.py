"""What the embedded engine shows at `/metrics`: its load, its KV slots, and hits of its prefix cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from polar.telemetry.readings import Readings, own_families


@dataclass(slots=True)
class Counts:
    """Since the engine started; written by the thread that computes, read by the one that serves."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in a slot already."""
    sampled_tokens: int = 0


def families(readings: Readings, *, policy_version: int, is_paused: bool) -> Iterable[Metric]:
    yield from own_families(readings)
    yield GaugeMetricFamily(
        "polar_engine_policy_version", "The version of the weights it samples with.", value=policy_version
    )
    yield GaugeMetricFamily(
        "polar_engine_paused", "1 while it computes nothing because it was asked to.", value=is_paused
    )
