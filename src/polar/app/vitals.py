"""The state of a running system: two snapshots of its server, and what happened between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from polar.client import Client
from polar.models.component import Frozen
from polar.models.dashboard import NodeOverview, Overview
from polar.models.session import SessionStatus

RECENT_MINUTES = 10


class Samples:
    """A metrics page, queried by name and label."""

    def __init__(self, page: str) -> None:
        self._found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                self._found.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(self, name: str) -> float:
        """Return the sum over all labels; 0 if the page lacks the metric."""
        return sum(value for _, value in self._found.get(name, ()))

    def by(self, name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for labels, value in self._found.get(name, ()):
            if label in labels:
                found[labels[label]] = found.get(labels[label], 0.0) + value
        return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    at: float
    """The time in monotonic seconds."""
    overview: Overview
    samples: Samples

    @classmethod
    def of_server(cls, client: Client) -> Self:
        overview, page = client.overview(), client.metrics()
        return cls(time.monotonic(), overview, Samples(page))


class PoolSigns(Frozen):
    """A pool of the node in the server's process."""

    name: str
    occupied: int
    size: int


class EngineSigns(Frozen):
    """An engine of that node; None for values it does not report."""

    url: str
    is_up: bool
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """The fraction of the KV cache in use, from 0 to 1."""
    prefix_hits: float | None = None
    """The fraction of prompt tokens that came from its prefix cache, from 0 to 1."""


class Vitals(Frozen):
    """What `polar top` shows, with rates since the previous snapshot, as the server's process counts them."""

    sessions: dict[SessionStatus, int]
    policy_version: int
    is_paused: bool
    sessions_per_second: float
    sampled_tokens_per_second: float
    completions_per_second: float
    first_token_p50: float | None
    first_token_p95: float | None
    """Seconds, over the completions since the previous snapshot; None if there were none."""
    mean_reward: float | None
    """The mean over sessions that ended in the last minutes."""
    usable_share: float | None
    """The fraction of these sessions that a trainer can use."""
    nodes: tuple[NodeOverview, ...]
    pools: tuple[PoolSigns, ...]
    engines: tuple[EngineSigns, ...]

    @classmethod
    def between(cls, before: Snapshot, now: Snapshot) -> Self:
        overview, seconds = now.overview, max(now.at - before.at, 1e-3)

        def rate(name: str) -> float:
            # A counter that decreased was reset by a restart.
            return max(now.samples.total(name) - before.samples.total(name), 0.0) / seconds

        recent = [minute for minute in overview.minutes[-RECENT_MINUTES:] if minute.ended]
        ended = sum(minute.ended for minute in recent)
        rewarded = [(minute.mean_reward, minute.ended) for minute in recent if minute.mean_reward is not None]
        weight = sum(count for _, count in rewarded)
        buckets = _new_buckets(before.samples, now.samples)
        return cls(
            sessions=overview.sessions,
            policy_version=overview.policy.version,
            is_paused=overview.policy.is_paused,
            sessions_per_second=rate("polar_server_results_total"),
            sampled_tokens_per_second=rate("polar_gateway_sampled_tokens_total"),
            completions_per_second=rate("polar_gateway_completions_total"),
            first_token_p50=quantile(buckets, 0.5),
            first_token_p95=quantile(buckets, 0.95),
            mean_reward=sum(mean * count for mean, count in rewarded) / weight if weight else None,
            usable_share=sum(minute.usable for minute in recent) / ended if ended else None,
            nodes=overview.nodes,
            pools=tuple(_pools(now.samples)),
            engines=tuple(_engines(now.samples)),
        )


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return the quantile of a histogram, whose buckets map an upper bound to the count up to it."""
    bounds = sorted(buckets.items())
    if not bounds or not bounds[-1][1]:
        return None
    wanted, lower, below = share * bounds[-1][1], 0.0, 0.0
    for bound, count in bounds:
        if count >= wanted:
            if bound == float("inf"):
                return lower
            # Rounding may exceed the bucket's end.
            return min(bound, lower + (bound - lower) * (wanted - below) / max(count - below, 1e-9))
        lower, below = bound, count
    return None


def _new_buckets(before: Samples, now: Samples) -> dict[float, float]:
    name = "polar_gateway_first_token_seconds_bucket"
    then = before.by(name, "le")
    return {float(le): count - then.get(le, 0.0) for le, count in now.by(name, "le").items()}


def _pools(samples: Samples) -> Iterator[PoolSigns]:
    occupied = samples.by("polar_node_pool_occupied", "pool")
    for name, size in samples.by("polar_node_pool_size", "pool").items():
        yield PoolSigns(name=name, occupied=int(occupied.get(name, 0)), size=int(size))


def _engines(samples: Samples) -> Iterator[EngineSigns]:
    def reading(name: str) -> dict[str, float]:
        return samples.by(f"polar_engine_{name}", "engine")

    running, waiting, usage = map(reading, ("requests_running", "requests_waiting", "kv_usage_ratio"))
    prompts, cached = map(reading, ("prompt_tokens_total", "cached_tokens_total"))
    for url, up in reading("up").items():
        yield EngineSigns(
            url=url,
            is_up=bool(up),
            running=running.get(url),
            waiting=waiting.get(url),
            kv_usage=usage.get(url),
            prefix_hits=cached[url] / prompts[url] if prompts.get(url) and url in cached else None,
        )
