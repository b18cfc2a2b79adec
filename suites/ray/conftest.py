"""A real Ray cluster of three raylets on this machine, in a directory of its own, gone after the test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from polar.runtimes.disk import unmount_below

RAYLETS = 3
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500}
"""A raylet that is killed is found dead in seconds instead of a quarter of a minute."""


@pytest.fixture(autouse=True)
def _nothing_stays_mounted(tmp_path: Path) -> Iterator[None]:
    """A node that the test killed has not unmounted its sandboxes' disks."""
    yield
    unmount_below(tmp_path)


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    # Not pytest's own directory: the paths of Ray's sockets have little room.
    directory = tempfile.mkdtemp(prefix="ray-")
    monkeypatch.setenv("RAY_TMPDIR", directory)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    machine = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(
        initialize_head=True, head_node_args={**machine, "include_dashboard": False, "_system_config": HEALTH}
    )
    try:
        for _ in range(RAYLETS - 1):
            cluster.add_node(**machine)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        started = psutil.Process().children(recursive=True)
        cluster.shutdown()
        _, left = psutil.wait_procs(started, timeout=20)
        for process in left:
            process.kill()
        shutil.rmtree(directory, ignore_errors=True)
    assert not left, left
