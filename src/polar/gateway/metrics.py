"""What a gateway counts: how long calls take, what they cost in tokens, and which were refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polar.dialects.base import Refusal
from polar.models.completion import Completion

_CALL_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600, 1800)
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class GatewayMetrics:
    """One registry a gateway, so that several gateways in one process do not count each other's calls."""

    def __init__(
        self, sessions: Callable[[], int], calls: Callable[[], int], is_paused: Callable[[], bool]
    ) -> None:
        self.registry = CollectorRegistry()
        gauge = partial(Gauge, namespace="polar_gateway", registry=self.registry)
        counter = partial(Counter, namespace="polar_gateway", registry=self.registry)
        seconds = partial(Histogram, namespace="polar_gateway", registry=self.registry)
        gauge("open_sessions", "Sessions whose key opens the gateway.").set_function(sessions)
        gauge("open_calls", "Model calls that are being answered.").set_function(calls)
        gauge("paused", "1 while a policy update holds calls back.").set_function(is_paused)
        self._call_seconds = seconds(
            "call_seconds",
            "How long a recorded model call took, from the request to its last token.",
            ["dialect"],
            buckets=_CALL_BUCKETS,
        )
        self._first_token_seconds = seconds(
            "first_token_seconds",
            "How long a recorded model call's first token took, from the request.",
            ["dialect"],
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self._completions = counter(
            "completions", "Model calls that were recorded.", ["dialect", "finish_reason"]
        )
        tokens = {
            "prompt_tokens": "Tokens of recorded model calls' prompts.",
            "cached_tokens": "Prompt tokens that the engine says it took from its prefix cache.",
            "sampled_tokens": "Tokens that were sampled, in whole answers or not.",
        }
        self._tokens = {name: counter(name, text, ["dialect"]) for name, text in tokens.items()}
        self._coalesced = counter(
            "coalesced",
            "Requests that were given the completion of an identical one instead of one of their own.",
            ["dialect"],
        )
        self._refused = counter("refused", "Requests that were refused.", ["dialect", "reason"])
        self._labelled: Callable[..., Any] = cache(lambda metric, *labels: metric.labels(*labels))

    def recorded(self, completion: Completion) -> None:
        labelled, dialect = self._labelled, completion.dialect
        started = completion.started_at
        labelled(self._call_seconds, dialect).observe(max(completion.ended_at - started, 0.0))
        if completion.first_token_at:
            first_seconds = max(completion.first_token_at - started, 0.0)
            labelled(self._first_token_seconds, dialect).observe(first_seconds)
        labelled(self._completions, dialect, completion.finish_reason.value).inc()
        for name, counter in self._tokens.items():
            labelled(counter, dialect).inc(getattr(completion, name))

    def coalesced(self, dialect: str) -> None:
        self._coalesced.labels(dialect).inc()

    def refused(self, dialect: str, reason: Refusal) -> None:
        self._refused.labels(dialect, reason.value).inc()
