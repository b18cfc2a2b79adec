"""What a gateway counts: how long calls take, what they cost in tokens, and which were refused."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from polar.dialects.base import Refusal
from polar.models.chat import FinishReason
from polar.models.completion import Completion

_CALL_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600, 1800)
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_NAME = "polar_gateway"
_TOKENS = {
    "prompt_tokens": "Tokens of recorded completions' prompts.",
    "cached_tokens": "Prompt tokens that the engine says it took from its prefix cache.",
    "sampled_tokens": "Tokens that were sampled, whole completions or not.",
}


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a gateway is at this moment."""

    sessions: int
    calls: int
    is_paused: bool


class _Spread:
    """A histogram in plain numbers."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        bounds = map(floatToGoString, (*self._bounds, inf))
        return list(zip(bounds, accumulate(self._counts), strict=True))


class _Calls:
    """What is counted of the completions of one dialect."""

    def __init__(self) -> None:
        self.seconds = _Spread(_CALL_BUCKETS)
        self.first_token = _Spread(_FIRST_TOKEN_BUCKETS)
        self.ended: dict[FinishReason, int] = {}
        self.prompt_tokens = self.cached_tokens = self.sampled_tokens = 0

    def add(self, completion: Completion) -> None:
        self.seconds.add(max(completion.ended_at - completion.started_at, 0.0))
        if completion.first_token_at:
            self.first_token.add(max(completion.first_token_at - completion.started_at, 0.0))
        self.prompt_tokens += completion.prompt_tokens
        self.cached_tokens += completion.cached_tokens
        self.sampled_tokens += completion.sampled_tokens
        self.ended[completion.finish_reason] = self.ended.get(completion.finish_reason, 0) + 1


class _Completions(Collector):
    """Completions as families of metrics, made when somebody looks: far more often one is counted."""

    def __init__(self, calls: Mapping[str, _Calls]) -> None:
        self._calls = calls

    def collect(self) -> Iterator[Metric]:
        yield self._histogram(
            "call_seconds",
            "How long a recorded completion took, from the request to its last token.",
            lambda calls: calls.seconds,
        )
        yield self._histogram(
            "first_token_seconds",
            "How long a recorded completion's first token took, from the request.",
            lambda calls: calls.first_token,
        )
        completions = CounterMetricFamily(
            f"{_NAME}_completions", "Completions that were recorded.", labels=["dialect", "finish_reason"]
        )
        for dialect, calls in self._calls.items():
            for reason, count in calls.ended.items():
                completions.add_metric([dialect, reason.value], count)
        yield completions
        for name, text in _TOKENS.items():
            tokens = CounterMetricFamily(f"{_NAME}_{name}", text, labels=["dialect"])
            for dialect, calls in self._calls.items():
                tokens.add_metric([dialect], getattr(calls, name))
            yield tokens

    def _histogram(self, name: str, text: str, spread: Callable[[_Calls], _Spread]) -> Metric:
        family = HistogramMetricFamily(f"{_NAME}_{name}", text, labels=["dialect"])
        for dialect, calls in self._calls.items():
            family.add_metric([dialect], spread(calls).buckets, spread(calls).sum)
        return family


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
        self._calls: dict[str, _Calls] = {}
        registry.register(_Completions(self._calls))
        self._coalesced = Counter(
            "polar_gateway_coalesced",
            "Requests that were given the completion of an identical one instead of one of their own.",
            ["dialect"],
            registry=registry,
        )
        self._refused = Counter(
            "polar_gateway_refused", "Requests that were refused.", ["dialect", "reason"], registry=registry
        )

    def recorded(self, completion: Completion) -> None:
        calls = self._calls.get(completion.dialect)
        if calls is None:
            calls = self._calls[completion.dialect] = _Calls()
        calls.add(completion)

    def coalesced(self, dialect: str) -> None:
        self._coalesced.labels(dialect).inc()

    def refused(self, dialect: str, reason: Refusal) -> None:
        self._refused.labels(dialect, reason.value).inc()
