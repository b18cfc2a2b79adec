"""What the sessions of a node share: its directory, installed harnesses, pools and services."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polar.client import AsyncClient
from polar.config.settings import NodeSettings, environment_secret
from polar.engines.base import ModelInfo
from polar.errors import PolarError, retry_forever
from polar.evaluators.base import JudgeEndpoint
from polar.files import locked
from polar.gateway.server import Gateway
from polar.harnesses.base import Harness, Installation
from polar.models.session import Lease
from polar.node.admission import Admission
from polar.node.pools import Pools
from polar.node.sandboxes import SandboxPlace, Snapshots
from polar.node.worker_processes import WorkerProcesses
from polar.recordings.recording import Recording, decode
from polar.runtimes.base import Host

log = logging.getLogger(__name__)

_ORIGINS = 4
"""How many recordings that sessions begin with are kept in memory."""
_STAGE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 1800, 3600, 14400)


class Installations:
    """Harnesses, installed once a node; sessions that ask at once wait for one installation."""

    def __init__(self) -> None:
        self._done: dict[str, Installation] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, name: str, harness: Harness) -> Installation:
        if name in self._done:
            return self._done[name]
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._done:
                self._done[name] = await harness.install()
            return self._done[name]


class Origins:
    """The recordings that sessions begin with; branches that come together share one."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._read: dict[str, Recording] = {}
        self._turn = asyncio.Lock()

    async def get(self, lease: Lease, origin: str) -> Recording:
        """DamagedRecording or NotFound where it cannot be read."""
        async with self._turn:
            if origin not in self._read:
                fetch = self._client.origin
                data = await retry_forever("fetch a recording", fetch, lease.session_id, lease.key)
                self._read[origin] = await asyncio.to_thread(decode, data)
                if len(self._read) > _ORIGINS:
                    del self._read[next(iter(self._read))]
            return self._read[origin]


class NodeMetrics:
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


@dataclass(frozen=True, slots=True)
class NodeServices(SandboxPlace):
    """One a node; everything a session needs that is not its own."""

    pools: Pools
    gateway: Gateway
    client: AsyncClient
    model: ModelInfo
    metrics: NodeMetrics
    judges: Mapping[str, JudgeEndpoint]
    origins: Origins
    installations: Installations = field(default_factory=Installations)
    workers: WorkerProcesses = field(default_factory=WorkerProcesses)

    @classmethod
    def below(
        cls,
        data_dir: Path,
        settings: NodeSettings,
        gateway: Gateway,
        client: AsyncClient,
        model: ModelInfo,
    ) -> NodeServices:
        directory, pools = node_directory(data_dir, settings.name), Pools(settings)
        snapshots, judges = Snapshots(Host(directory)), judge_endpoints(settings)
        parts = (pools, gateway, client, model, NodeMetrics(pools), judges, Origins(client))
        return cls(settings, directory, snapshots, *parts)

    @property
    def captures_dir(self) -> Path:
        """One log a session, until its recording is stored; outside the sandboxes, which are reaped."""
        return self.directory / "captures"

    @property
    def kept_dir(self) -> Path:
        """What evaluators keep for people to look at, until it is stored with the artifacts."""
        return self.directory / "kept"

    @property
    def cache_dir(self) -> Path:
        """What evaluators remember from one session to the next."""
        return self.directory / "cache"


def judge_endpoints(settings: NodeSettings) -> dict[str, JudgeEndpoint]:
    """The models that tasks may name as judges on this node, with their keys."""
    endpoints = {}
    for name, judge in settings.judges.items():
        variable = judge.api_key_env
        key = environment_secret(variable, f"node.judges.{name}.api_key_env") if variable else None
        endpoints[name] = JudgeEndpoint(judge.url, judge.model, key)
    return endpoints


def node_directory(data_dir: Path, name: str) -> Path:
    """A node's own below the data directory."""
    return (data_dir / "nodes" / name).absolute()


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock a node's directory while the body runs: two processes in it would reap each other's sandboxes.

    The system releases it when the process dies.
    """
    taken = PolarError(
        f"a node called {directory.name} is running here already ({directory})",
        hint="a second `polar serve` needs another --data-dir, a second `polar node` another --name",
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "lock").touch()
    except OSError as error:
        raise PolarError(f"{directory} cannot be used: {error.strerror}") from None
    with locked(directory / "lock", busy=taken):
        yield


def remove_expired(services: NodeServices, at_work: Collection[str]) -> int:
    """Remove captures, logs and evaluators' files that are old and of no running lease; return how many."""
    before = time.time() - services.settings.keep_orphans_hours * 3600
    count = 0
    host = services.host
    for directory in (services.captures_dir, services.kept_dir, host.logs, host.sandboxes):
        for path in directory.glob("*"):
            # A session's sandboxes have names that begin with its lease's.
            if path.name.startswith(tuple(at_work)):
                continue
            try:
                count += _remove_if_expired(path, before)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("%s is old and could not be removed: %s", path, error.strerror)
    return count


def _remove_if_expired(path: Path, before: float) -> bool:
    # A sandbox that has not been closed is its runtime's to remove, with its processes and mounts.
    if path.lstat().st_mtime >= before or (path / "pids").exists():
        return False
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return True
