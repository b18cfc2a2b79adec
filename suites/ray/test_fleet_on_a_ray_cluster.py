"""A fleet on a real Ray cluster: scaled with the queue, struck in the midst of work, and nothing lost."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml
from ray.cluster_utils import Cluster

from polar.app.fleet import control
from polar.app.fleet.planning import FleetView, NodeState
from polar.app.stack import serving
from polar.client import AsyncClient
from polar.config.settings import ServerSettings, Settings
from polar.models.session import SessionStatus
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import vllm_wire
from tests.systems import ASK, TOKEN, shell_task
from tests.waiting import eventually

TASKS = 6
SAMPLES = 2
RUN_SLOTS = 2
PATIENCE_SECONDS = 40.0


class Fleet:
    """`polar fleet` as a user calls it."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self._directory = directory

    async def call(self, *arguments: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "polar", "fleet", *arguments, "--address", self._address),
            cwd=self._directory,
            env={**os.environ, "POLAR_TOKEN": TOKEN},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate()
        return process.returncode or 0, out.decode(), errors.decode()


async def until(is_so: Callable[[FleetView], bool]) -> FleetView:
    def seen() -> FleetView | None:
        view = control.status()
        return view if is_so(view) else None

    return await eventually(partial(asyncio.to_thread, seen), PATIENCE_SECONDS, every=0.2)


def ready(view: FleetView) -> list[str]:
    return [node.name for node in view.nodes if node.state is NodeState.READY]


def node_processes() -> list[psutil.Process]:
    """Every `polar node` that runs below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[1:4] == ["-m", "polar", "node"]:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def all_at_work(client: AsyncClient) -> Counter[str | None]:
    """How many agents each node runs, once every run slot is taken."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            views = [view async for view in client.sessions(status=SessionStatus.RUNNING)]
            if len(views) == 3 * RUN_SLOTS:
                return Counter(view.node for view in views)


@asynccontextmanager
async def connected_to_ray(address: str) -> AsyncIterator[None]:
    with control.connected(address):
        yield


@pytest.mark.timeout(180)
async def test_sessions_end_once_though_machines_and_nodes_die(ray_cluster: Cluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    settings = Settings(
        data_dir=tmp_path / "server", server=ServerSettings(port=0, token=TOKEN, lease_seconds=3)
    )
    async with (
        connected_to_ray(ray_cluster.address),
        vllm_wire(Said("Hello.")) as engine,
        serving(settings, lambda _step: None) as server,
        AsyncClient(server.url, TOKEN) as client,
    ):
        written = {
            "engine": {"url": engine.url, "mode": "chat"},
            "node": {
                "server": server.url,
                "run_slots": RUN_SLOTS,
                "ready_buffer": 0,
                "drain_seconds": 10,
                "runtimes": ["process"],
            },
            "fleet": {
                "nodes": "1..3",
                "sessions_per_node": 2,
                "idle_seconds": 1.0,
                "watch_seconds": 0.5,
                "data_dir": str(tmp_path / "nodes"),
            },
        }
        (tmp_path / "polar.yaml").write_text(yaml.safe_dump(written))
        fleet = Fleet(ray_cluster.address, tmp_path)
        # An idle queue wants the least.
        code, out, errors = await fleet.call("up", "--json")
        assert code == 0, errors
        assert len(ready(FleetView.model_validate_json(out))) == 1

        waiting = f"until [ -e {gate} ]; do sleep 0.1; done\n"
        for number in range(TASKS):
            await client.submit(shell_task(f"t{number}", waiting + ASK, samples=SAMPLES))
        view = await until(lambda view: len(ready(view)) == 3)
        assert view.wanted == 3
        assert set(await all_at_work(client)) == set(ready(view))

        processes = node_processes()
        assert len(processes) == 3
        assert not any(TOKEN in " ".join(process.cmdline()) for process in processes)
        struck = ray_cluster.worker_nodes.copy().pop()
        await asyncio.to_thread(ray_cluster.remove_node, struck, False)
        gone, left = await asyncio.to_thread(psutil.wait_procs, processes, 20)
        assert len(gone) == 1, "the machine's node ends with its raylet"
        left[0].kill()
        gate.touch()

        results = await client.wait([f"t{number}" for number in range(TASKS)], timeout=PATIENCE_SECONDS)
        assert sorted(result.session_id for result in results) == sorted(
            f"t{number}.{sample}" for number in range(TASKS) for sample in range(SAMPLES)
        )
        assert {result.status for result in results} == {SessionStatus.COMPLETED}
        assert all(result.reward == 1.0 and result.stats.trainable_tokens > 0 for result in results)
        assert max(result.attempt for result in results) > 1, "nothing was struck in the midst of work"

        # Work is done: what is not needed is drained, what died stays replaced.
        await until(lambda view: len(view.nodes) == len(ready(view)) == view.wanted == 1)
        code, _, errors = await fleet.call("down")
        assert code == 0, errors
        assert "the fleet is down" in errors
        assert not node_processes()
        code, _, errors = await fleet.call("status")
        assert code == 1
        assert "no fleet is running" in errors
    logs = sorted((tmp_path / "nodes/logs").iterdir())
    assert len(logs) == 3
    assert not any(TOKEN in file.read_text() for file in logs)
