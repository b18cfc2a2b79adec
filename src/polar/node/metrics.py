"""What a node counts: how full its pools are, and how long sessions stay in each stage."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polar.models.session import SessionStatus
from polar.node.admission import Admission
from polar.node.pools import Pool, Pools

_STAGE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 1800, 3600, 14400)


class Metrics:
    """One registry a node, so that several nodes in one process do not count each other's sessions."""

    def __init__(self, pools: Pools) -> None:
        self.registry = CollectorRegistry()
        occupied = Gauge("polar_node_pool_occupied", "Sessions in a pool.", ["pool"], registry=self.registry)
        size = Gauge("polar_node_pool_size", "Places of a pool.", ["pool"], registry=self.registry)
        for pool in pools.all:
            occupied.labels(pool.name).set_function(partial(_sessions, pool))
            size.labels(pool.name).set(pool.size)
        self._stage_seconds = Histogram(
            "polar_node_stage_seconds",
            "How long a session stayed in a stage.",
            ["stage"],
            registry=self.registry,
            buckets=_STAGE_BUCKETS,
        )
        self._ended = Counter(
            "polar_node_sessions_ended", "Sessions that ended here.", ["status"], registry=self.registry
        )
        self._deliveries = Counter(
            "polar_node_deliveries", "Results taken to the server.", ["outcome"], registry=self.registry
        )
        self._taking = Gauge(
            "polar_node_takes_sessions",
            "1 while the node takes more sessions, 0 while its disk is short or everything fails on it.",
            registry=self.registry,
        )

    def watch(self, admission: Admission) -> None:
        self._taking.set_function(lambda: admission.trouble is None)

    def stage(self, stage: SessionStatus, seconds: float) -> None:
        self._stage_seconds.labels(stage.value).observe(seconds)

    def ended(self, status: SessionStatus) -> None:
        self._ended.labels(status.value).inc()

    def delivered(self, outcome: str) -> None:
        """stored; refused, because the lease had passed on; failed, with the capture kept here."""
        self._deliveries.labels(outcome).inc()


def _sessions(pool: Pool) -> float:
    return pool.sessions
