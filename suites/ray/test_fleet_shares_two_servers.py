"""The same end-to-end test as on SQLite: two servers on PostgreSQL, and a node on each of three raylets."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml
from ray.cluster_utils import Cluster

from polar.app.fleet import control
from polar.app.stack import serving
from polar.client import AsyncClient
from polar.config.settings import ServerSettings, Settings
from polar.models.session import SessionStatus
from tests.databases import fresh_postgres
from tests.end_to_end import SAMPLES, TASKS, assert_everything_came, submit_everything
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import vllm_wire
from tests.systems import TOKEN

NODES = 3
ANSWER = "Together."


async def fleet(directory: Path, *arguments: str) -> str:
    """`polar fleet` as a user calls it; what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "polar", "fleet", *arguments),
        cwd=directory,
        env={**os.environ, "POLAR_TOKEN": TOKEN},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


@pytest.mark.timeout(240)
async def test_two_servers_and_three_raylets(ray_cluster: Cluster, tmp_path: Path) -> None:
    url, gate = fresh_postgres(), tmp_path / "gate"
    shared = {"port": 0, "token": TOKEN, "database_url": url, "blobs_url": f"file://{tmp_path}/blobs"}
    async with vllm_wire(Said(ANSWER)) as engine, AsyncExitStack() as parts:
        parts.enter_context(control.connected(ray_cluster.address))
        clients: list[AsyncClient] = []
        for number in range(2):
            settings = Settings(
                data_dir=tmp_path / f"server-{number}", server=ServerSettings.model_validate(shared)
            )
            server = await parts.enter_async_context(serving(settings, lambda _step: None))
            clients.append(await parts.enter_async_context(AsyncClient(server.url, TOKEN)))
        settled = {
            "engine": {"url": engine.url, "mode": "chat"},
            "node": {
                "server": clients[0].server,
                "run_slots": TASKS * SAMPLES // NODES,
                "ready_buffer": 0,
            },
            "fleet": {"nodes": str(NODES), "data_dir": str(tmp_path / "nodes")},
        }
        (tmp_path / "polar.yaml").write_text(yaml.safe_dump(settled))
        await fleet(tmp_path, "up", "--address", ray_cluster.address)
        # Nobody may end before all have begun, so that every node gets its share.
        await submit_everything(clients[1], f"until [ -e {gate} ]; do sleep 0.1; done\n")
        async with asyncio.timeout(90):
            while (await clients[1].health()).sessions.get(SessionStatus.RUNNING, 0) < TASKS * SAMPLES:
                continue
        gate.touch()
        nodes = {node.name for node in control.status().nodes}
        assert len(nodes) == NODES
        await assert_everything_came(clients[1], ANSWER, nodes)
        await fleet(tmp_path, "down", "--address", ray_cluster.address)
