"""What the control plane counts: sessions by status, leases, what nodes delivered, and webhooks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary
from prometheus_client.metrics_core import Metric

from polar.errors import PolarError
from polar.models.session import REPLAYED_TOKENS, SessionResult, SessionStatus
from polar.store.store import Store


class ServerMetrics:
    """One registry a server. What several servers share is read from the store when it is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.registry = CollectorRegistry()
        gauge = partial(Gauge, namespace="polar_server", registry=self.registry)
        counter = partial(Counter, namespace="polar_server", registry=self.registry)
        self._sessions = gauge("sessions", "Stored sessions by status.", ["status"])
        self._policy_version = gauge("policy_version", "The policy version that nodes are to sample with.")
        self._webhook_lag = gauge("webhook_lag", "Results not yet delivered to their webhooks.")
        self._webhook_lag_seconds = gauge("webhook_lag_seconds", "How long the oldest of these has waited.")
        self._webhooks_failing = gauge(
            "webhooks_failing", "Webhooks whose receiver did not take the last attempt."
        )
        self.captured_bytes = gauge(
            "captured_bytes", "What is kept of the captures of running sessions, counted once a minute."
        )
        self.webhook_attempts = counter(
            "webhook_attempts", "Attempts to deliver to a webhook, by how they ended.", ["outcome"]
        )
        for outcome in ("delivered", "failed"):
            self.webhook_attempts.labels(outcome)
        self.submitted = counter("tasks_submitted", "Tasks that were stored.")
        self.leased = counter("leases", "Sessions leased to nodes.")
        self.expired = counter(
            "leases_expired",
            "Leases that ran out because their node fell silent, by what became of the session.",
            ["outcome"],
        )
        self.given_back = counter(
            "leases_given_back", "Sessions that nodes gave back unfinished because they were stopped."
        )
        self._deliveries = counter("deliveries", "Results that nodes delivered.", ["outcome"])
        self._results = counter("results", "Results that were stored, by their status.", ["status"])
        self._reward = Summary("polar_server_reward", "Rewards of stored results.", registry=self.registry)
        self._sampled = counter("sampled_tokens", "Tokens sampled in delivered sessions.")
        self._trainable = counter("trainable_tokens", "Of these, tokens that a trainer can use.")
        self._excluded = counter(
            "excluded_tokens", "Of these, tokens left out of training, by the reason.", ["reason"]
        )

    async def families(self) -> Iterable[Metric]:
        """Everything, with what the store says now."""
        counts = await self._store.sessions.counts()
        for status in SessionStatus:
            self._sessions.labels(status.value).set(counts.get(status, 0))
        self._policy_version.set((await self._store.policy.wanted()).version)
        webhooks = await self._store.webhooks.all()
        self._webhook_lag.set(sum(view.lag for view in webhooks))
        self._webhook_lag_seconds.set(max((view.lag_seconds for view in webhooks), default=0.0))
        self._webhooks_failing.set(sum(view.error is not None for view in webhooks))
        return self.registry.collect()

    def delivered(self, result: SessionResult, outcome: bool | PolarError, *, is_retried: bool) -> None:
        """Whether a delivery was new; neither one that comes again nor one that is retried is a result."""
        if isinstance(outcome, PolarError):
            self._deliveries.labels("refused").inc()
            return
        taken = "retried" if is_retried else "stored"
        self._deliveries.labels(taken if outcome else "repeated").inc()
        if not outcome or is_retried:
            return
        self._results.labels(result.status.value).inc()
        if result.reward is not None:
            self._reward.observe(result.reward)
        self._sampled.inc(result.stats.new_tokens)
        self._trainable.inc(result.stats.trainable_tokens)
        for reason, tokens in result.stats.excluded.items():
            if reason != REPLAYED_TOKENS:
                self._excluded.labels(reason).inc(tokens)
