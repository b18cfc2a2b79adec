"""A control plane killed without warning comes back with every task, lease and result it acknowledged."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from polar.client import AsyncClient
from polar.models.delivery import Delivery
from polar.models.session import SessionStatus
from polar.models.views import LeaseRequest
from polar.rollout.access import load_or_create_token
from tests.fakes.control_plane import result_of

SERVE = """
import asyncio, sys
from pathlib import Path
from polar.config.settings import ServerSettings
from polar.rollout.server import RolloutServer
from polar.rollout.access import load_or_create_token
from polar.store.store import Store

async def main(data_dir):
    async with Store.open(data_dir) as store:
        async with RolloutServer(store, load_or_create_token(data_dir), ServerSettings(port=0)) as server:
            print(server.url, flush=True)
            await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1])))
"""


class ServerProcess:
    """A control plane in a process of its own."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    async def __aenter__(self) -> AsyncClient:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVE, str(self._data_dir), stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        url = (await self._process.stdout.readline()).decode().strip()
        self._client = AsyncClient(url, load_or_create_token(self._data_dir))
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


async def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    tasks = 5
    request = LeaseRequest(max_sessions=2, runtimes=("process",))
    async with ServerProcess(tmp_path) as client:
        for number in range(tasks):
            await client.submit(
                {
                    "id": f"t{number}",
                    "instruction": "say hello",
                    "harness": {"name": "shell", "options": {"command": "true"}},
                    "evaluator": {"name": "command", "options": {"command": "true"}},
                    "runtime": "process",
                }
            )
        done, held = (await client.lease("node", request)).leases
        delivery = Delivery(key=done.key, result=result_of(done))
        assert await client.deliver("node", [delivery]) == [None]
    async with ServerProcess(tmp_path) as client:
        assert len([view async for view in client.tasks()]) == tasks
        assert (await client.health()).sessions == {
            SessionStatus.COMPLETED: 1,
            SessionStatus.INIT: 1,
            SessionStatus.QUEUED: tasks - 2,
        }
        # The node lives on: what it still held is its own, and a repeated delivery changes nothing.
        rest = Delivery(key=held.key, result=result_of(held))
        assert await client.deliver("node", [delivery, rest]) == [None, None]
        assert len([result async for result in client.results()]) == 2
