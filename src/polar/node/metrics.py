"""What a node counts: how full its pools are, and how long sessions stay in each stage."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polar.node.admission import Admission
from polar.node.pools import Pools

_STAGE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 1800, 3600, 14400)


class Metrics:
    """One registry a node, so that several nodes in one process do not count each other's sessions."""

    def __init__(self, pools: Pools) -> None:
        self.registry = CollectorRegistry()
        gauge = partial(Gauge, namespace="polar_node", registry=self.registry)
        counter = partial(Counter, namespace="polar_node", registry=self.registry)
        occupied = gauge("pool_occupied", "Sessions in a pool.", ["pool"])
        size = gauge("pool_size", "Places of a pool.", ["pool"])
        for pool in pools.all:
            occupied.labels(pool.name).set_function(partial(getattr, pool, "sessions"))
            size.labels(pool.name).set(pool.size)
        self.stage_seconds = Histogram(
            "polar_node_stage_seconds",
            "How long a session stayed in a stage.",
            ["stage"],
            registry=self.registry,
            buckets=_STAGE_BUCKETS,
        )
        self.ended = counter("sessions_ended", "Sessions that ended here.", ["status"])
        self.deliveries = counter("deliveries", "Results taken to the server.", ["outcome"])
        """stored; refused, because the lease had passed on; failed, with the capture kept here."""
        self._taking = gauge(
            "takes_sessions",
            "1 while the node takes more sessions, 0 while its disk is short or everything fails on it.",
        )

    def watch(self, admission: Admission) -> None:
        self._taking.set_function(lambda: admission.trouble is None)
