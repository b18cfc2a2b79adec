"""What the control plane counts: sessions by status, leases, what nodes delivered, and webhooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary
from prometheus_client.metrics_core import Metric

from polar.errors import PolarError
from polar.models.session import SessionResult, SessionStatus
from polar.store.store import Store


class ServerMetrics:
    """One registry a server. What several servers share is read from the store when it is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._registry = registry = CollectorRegistry()
        self._sessions = Gauge(
            "polar_server_sessions", "Stored sessions by status.", ["status"], registry=registry
        )
        self._policy_version = Gauge(
            "polar_server_policy_version",
            "The policy version that nodes are to sample with.",
            registry=registry,
        )
        self._submitted = Counter(
            "polar_server_tasks_submitted", "Tasks that were stored.", registry=registry
        )
        self._leased = Counter("polar_server_leases", "Sessions leased to nodes.", registry=registry)
        self._expired = Counter(
            "polar_server_leases_expired",
            "Leases that ran out because their node fell silent, by what became of the session.",
            ["outcome"],
            registry=registry,
        )
        self._given_back = Counter(
            "polar_server_leases_given_back",
            "Sessions that nodes gave back unfinished because they were stopped.",
            registry=registry,
        )
        self._deliveries = Counter(
            "polar_server_deliveries", "Results that nodes delivered.", ["outcome"], registry=registry
        )
        self._results = Counter(
            "polar_server_results",
            "Results that were stored, by their status.",
            ["status"],
            registry=registry,
        )
        self._reward = Summary("polar_server_reward", "Rewards of stored results.", registry=registry)
        self._sampled = Counter(
            "polar_server_sampled_tokens", "Tokens sampled in delivered sessions.", registry=registry
        )
        self._trainable = Counter(
            "polar_server_trainable_tokens", "Of these, tokens that a trainer can use.", registry=registry
        )
        self._excluded = Counter(
            "polar_server_excluded_tokens",
            "Of these, tokens left out of training, by the reason.",
            ["reason"],
            registry=registry,
        )

        self._webhook_lag = Gauge(
            "polar_server_webhook_lag", "Results not yet delivered to their webhooks.", registry=registry
        )
        self._webhook_lag_seconds = Gauge(
            "polar_server_webhook_lag_seconds", "How long the oldest of these has waited.", registry=registry
        )
        self._webhooks_failing = Gauge(
            "polar_server_webhooks_failing",
            "Webhooks whose receiver did not take the last attempt.",
            registry=registry,
        )
        self._webhook_attempts = Counter(
            "polar_server_webhook_attempts",
            "Attempts to deliver to a webhook, by how they ended.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("delivered", "failed"):
            self._webhook_attempts.labels(outcome)

    async def families(self) -> Iterable[Metric]:
        """Everything, with what the store says now."""
        self.show(await self._store.sessions.counts(), (await self._store.policy.wanted()).version)
        webhooks = await self._store.webhooks.all()
        self._webhook_lag.set(sum(view.lag for view in webhooks))
        self._webhook_lag_seconds.set(max((view.lag_seconds for view in webhooks), default=0.0))
        self._webhooks_failing.set(sum(view.error is not None for view in webhooks))
        return self._registry.collect()

    def show(self, sessions: Mapping[SessionStatus, int], policy_version: int) -> None:
        for status in SessionStatus:
            self._sessions.labels(status.value).set(sessions.get(status, 0))
        self._policy_version.set(policy_version)

    def submitted(self, tasks: int) -> None:
        self._submitted.inc(tasks)

    def leased(self, sessions: int) -> None:
        self._leased.inc(sessions)

    def expired(self, *, requeued: int, ended: int) -> None:
        self._expired.labels("requeued").inc(requeued)
        self._expired.labels("ended").inc(ended)

    def given_back(self) -> None:
        self._given_back.inc()

    def sent(self, is_delivered: bool) -> None:
        self._webhook_attempts.labels("delivered" if is_delivered else "failed").inc()

    def delivered(self, result: SessionResult, outcome: bool | PolarError, *, is_retried: bool) -> None:
        """Whether a delivery was new; neither one that comes again nor one that is retried is a result."""
        if isinstance(outcome, PolarError):
            self._deliveries.labels("refused").inc()
            return
        taken = "retried" if is_retried else "stored"
        self._deliveries.labels(taken if outcome else "repeated").inc()
        if outcome and not is_retried:
            self._count(result)

    def _count(self, result: SessionResult) -> None:
        self._results.labels(result.status.value).inc()
        if result.reward is not None:
            self._reward.observe(result.reward)
        self._sampled.inc(result.stats.sampled_tokens)
        self._trainable.inc(result.stats.trainable_tokens)
        for reason, tokens in result.stats.excluded.items():
            self._excluded.labels(reason).inc(tokens)
