"""Two servers and four nodes on one database: a task goes in at one and comes out at the other."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from polar.app.stack import join_server, serving
from polar.client import AsyncClient
from polar.config.settings import EngineSettings, NodeSettings, ServerSettings, Settings
from polar.models.session import SessionStatus
from tests.databases import KINDS, fresh_postgres
from tests.end_to_end import SAMPLES, TASKS, assert_everything_came, submit_everything
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import vllm_wire
from tests.systems import RUNTIMES, TOKEN

NODES = 4
ANSWER = "Together."


def silent(_step: str) -> None:
    """Nobody listens."""


def server_settings(tmp_path: Path, number: int, url: str | None) -> Settings:
    """On SQLite both work in one directory; on PostgreSQL they share only where the blobs are."""
    if url is None:
        return Settings(data_dir=tmp_path / "server", server=ServerSettings(port=0, token=TOKEN))
    server = ServerSettings(port=0, token=TOKEN, database_url=url, blobs_url=f"file://{tmp_path}/blobs")
    return Settings(data_dir=tmp_path / f"server-{number}", server=server)


@pytest.mark.parametrize("kind", KINDS)
async def test_two_servers_and_four_nodes(kind: str, tmp_path: Path) -> None:
    url = fresh_postgres() if kind == "postgres" else None
    gate = tmp_path / "gate"
    async with vllm_wire(Said(ANSWER)) as engine, AsyncExitStack() as parts:
        servers = [
            await parts.enter_async_context(serving(server_settings(tmp_path, number, url), silent))
            for number in range(2)
        ]
        work: list[asyncio.Task[None]] = []
        for number in range(NODES):
            settings = Settings(
                data_dir=tmp_path / f"node-{number}",
                engine=EngineSettings(url=engine.url, mode="chat"),
                node=NodeSettings(
                    name=f"n{number}",
                    run_slots=TASKS * SAMPLES // NODES,
                    ready_buffer=0,
                    runtimes=RUNTIMES,
                ),
            )
            server = servers[number % 2].url
            worker = await parts.enter_async_context(join_server(settings, server, TOKEN, silent))
            work.append(asyncio.create_task(worker.node.run()))
        clients = [await parts.enter_async_context(AsyncClient(server.url, TOKEN)) for server in servers]
        try:
            # Nobody may end before all have begun, so that every node gets its share.
            await submit_everything(clients[0], f"until [ -e {gate} ]; do sleep 0.1; done\n")
            async with asyncio.timeout(60):
                while (await clients[1].health()).sessions.get(SessionStatus.RUNNING, 0) < TASKS * SAMPLES:
                    continue
            gate.touch()
            await assert_everything_came(clients[1], ANSWER, {f"n{number}" for number in range(NODES)})
        finally:
            for task in work:
                task.cancel()
            await asyncio.wait(work)
    assert bool(list(tmp_path.glob("server*/polar.db"))) == (url is None)
