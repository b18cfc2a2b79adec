"""What a gateway counts: how long calls take, what they cost in tokens, and which were refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polar.dialects.base import Refusal
from polar.models.chat import FinishReason
from polar.models.completion import Completion

_CALL_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600, 1800)
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a gateway is at this moment."""

    sessions: int
    calls: int
    is_paused: bool


class GatewayMetrics:
    """One registry a gateway, so that several gateways in one process do not count each other's calls."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self.registry = registry = CollectorRegistry()
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("polar_gateway_open_sessions", "Sessions whose key opens the gateway.", lambda: load().sessions),
            ("polar_gateway_open_calls", "Model calls that are being answered.", lambda: load().calls),
            ("polar_gateway_paused", "1 while a policy update holds calls back.", lambda: load().is_paused),
        )
        for name, text, value in gauges:
            Gauge(name, text, registry=registry).set_function(value)
        seconds = Histogram(
            "polar_gateway_call_seconds",
            "How long a recorded completion took, from the request to its last token.",
            ["dialect"],
            registry=registry,
            buckets=_CALL_BUCKETS,
        )
        first_token = Histogram(
            "polar_gateway_first_token_seconds",
            "How long a recorded completion's first token took, from the request.",
            ["dialect"],
            registry=registry,
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        completions = Counter(
            "polar_gateway_completions",
            "Completions that were recorded.",
            ["dialect", "finish_reason"],
            registry=registry,
        )
        tokens = {
            name: Counter(f"polar_gateway_{name}_tokens", text, ["dialect"], registry=registry)
            for name, text in (
                ("prompt", "Tokens of recorded completions' prompts."),
                ("cached", "Prompt tokens that the engine says it took from its prefix cache."),
                ("sampled", "Tokens that were sampled, whole completions or not."),
            )
        }
        self._coalesced = Counter(
            "polar_gateway_coalesced",
            "Requests that were given the completion of an identical one instead of one of their own.",
            ["dialect"],
            registry=registry,
        )
        self._refused = Counter(
            "polar_gateway_refused", "Requests that were refused.", ["dialect", "reason"], registry=registry
        )

        # Finding a child by its labels costs as much as counting.
        @cache
        def observers(dialect: str) -> tuple[Callable[..., None], ...]:
            return (
                seconds.labels(dialect).observe,
                first_token.labels(dialect).observe,
                *(tokens[name].labels(dialect).inc for name in ("prompt", "cached", "sampled")),
            )

        @cache
        def ended(dialect: str, reason: FinishReason) -> Callable[..., None]:
            return completions.labels(dialect, reason.value).inc

        self._observers, self._ended = observers, ended

    def recorded(self, completion: Completion) -> None:
        seconds, first_token, prompt, cached, sampled = self._observers(completion.dialect)
        seconds(max(completion.ended_at - completion.started_at, 0.0))
        if completion.first_token_at:
            first_token(max(completion.first_token_at - completion.started_at, 0.0))
        prompt(completion.prompt_tokens)
        cached(completion.cached_tokens)
        sampled(completion.sampled_tokens)
        self._ended(completion.dialect, completion.finish_reason)()

    def coalesced(self, dialect: str) -> None:
        self._coalesced.labels(dialect).inc()

    def refused(self, dialect: str, reason: Refusal) -> None:
        self._refused.labels(dialect, reason.value).inc()
