"""Two servers on one PostgreSQL: nodes and trainers may talk to either, and either may die."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from polar.client import AsyncClient
from polar.client.uploader import ResultUploader
from polar.errors import Conflict, Unavailable
from polar.models.delivery import Delivery
from polar.models.session import Lease
from polar.models.views import LeaseRequest
from tests.databases import fresh_postgres
from tests.fakes.control_plane import result_of
from tests.waiting import still_waits

TOKEN = "a token for tests only"

SERVE = """
import asyncio, sys
from pathlib import Path
from polar.config.settings import ServerSettings
from polar.rollout.server import RolloutServer
from polar.store.store import Store

async def main(data_dir, url, token):
    async with Store.open(data_dir, database_url=url, blobs_url=f"file://{data_dir}/blobs") as store:
        async with RolloutServer(store, token, ServerSettings(port=0, lease_seconds=2)) as server:
            print(server.url, flush=True)
            await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""


class Server:
    def __init__(self, process: asyncio.subprocess.Process, client: AsyncClient) -> None:
        self.process = process
        self.client = client

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def server(data_dir: Path, url: str) -> AsyncIterator[Server]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, str(data_dir), url, TOKEN, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    async with AsyncClient(address, TOKEN) as client:
        try:
            yield Server(process, client)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def task(id: str, samples: int = 1) -> dict[str, object]:
    return {
        "id": id,
        "instruction": "say hello",
        "harness": {"name": "shell", "options": {"command": "true"}},
        "evaluator": {"name": "command", "options": {"command": "true"}},
        "runtime": "process",
        "samples": samples,
    }


def request(count: int, wait_seconds: float = 0.0) -> LeaseRequest:
    return LeaseRequest(max_sessions=count, runtimes=("process",), wait_seconds=wait_seconds)


def delivery(lease: Lease) -> Delivery:
    return Delivery(key=lease.key, result=result_of(lease, has_recording=True), recording=b"tokens")


async def test_what_one_server_stores_wakes_who_waits_at_the_other(tmp_path: Path) -> None:
    url = fresh_postgres()
    async with server(tmp_path, url) as one, server(tmp_path, url) as two:
        asking = asyncio.create_task(two.client.lease("node", request(1, wait_seconds=30)))
        assert await still_waits(asking)
        await one.client.submit(task("t"))
        async with asyncio.timeout(15):
            (lease,) = (await asking).leases
        reading = asyncio.create_task(one.client.wait(["t"], timeout=60))
        await ResultUploader(two.client, "node").deliver(delivery(lease))
        async with asyncio.timeout(15):
            assert [result.session_id for result in await reading] == ["t.0"]
        assert await one.client.recording("t.0") == b"tokens"


async def test_four_nodes_on_two_servers_end_every_session_once_though_one_server_dies(
    tmp_path: Path,
) -> None:
    url = fresh_postgres()
    samples, tasks = 10, 12
    async with server(tmp_path, url) as one, server(tmp_path, url) as two:
        async for _ in one.client.submit_all(task(f"t{n}", samples) for n in range(tasks)):
            pass
        delivered: list[str] = []
        refused: list[str] = []
        is_a_third_delivered = asyncio.Event()

        async def node(name: str, clients: list[AsyncClient]) -> None:
            """Goes to the other server when its own is gone."""
            while True:
                client = clients[0]
                try:
                    leases = (await client.lease(name, request(8))).leases
                    if not leases and not await left(client):
                        return
                    uploader = ResultUploader(client, name)
                    for lease in leases:
                        await uploader.deliver(delivery(lease))
                        delivered.append(lease.session_id)
                        if len(delivered) >= samples * tasks // 3:
                            is_a_third_delivered.set()
                except Conflict:
                    refused.append(name)
                except Unavailable:
                    clients.reverse()

        async def left(client: AsyncClient) -> int:
            counts = (await client.health()).sessions
            return sum(count for status, count in counts.items() if not status.ended)

        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            for number in range(4):
                order = [one.client, two.client] if number % 2 else [two.client, one.client]
                group.create_task(node(f"n{number}", order))
            await is_a_third_delivered.wait()
            await one.kill()
        found = [result.session_id async for result in two.client.results()]
        assert len(found) == len(set(found)) == samples * tasks
        assert set(delivered) <= set(found)
