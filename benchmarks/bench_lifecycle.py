"""A node's lifecycle: how busy its run slots are, what a waiting session costs, what scheduling costs."""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.hostile_sessions import memory_row
from benchmarks.lifecycle_gap import measure as measure_gaps
from benchmarks.lifecycle_start import measure as measure_start
from benchmarks.report import Row, at_most, report
from polar.models.session import SessionStatus
from polar.models.task import TaskSpec
from polar.node.node import Node
from polar.store.store import Store
from tests.systems import System, shell_task, system

SLOTS = 8
INIT_SECONDS, RUN_SECONDS = 1.5, 2.0
"""Preparing is a little quicker than running, with what a sandbox and a lease take of their own on top."""
ROUNDS = 6
IDLE_SESSIONS = 1_000
QUEUES = (100, 5_000)
CLAIMS = 60


def main() -> None:
    rows = [
        *start_rows(),
        *asyncio.run(busy_rows()),
        *asyncio.run(idle_rows()),
        asyncio.run(scheduling_row()),
        memory_row(),
        asyncio.run(gap_row()),
    ]
    report("lifecycle", rows)


def start_rows() -> list[Row]:
    measured = measure_start()
    bare = measured["bare process"]
    return [
        Row("sandbox and `true`: bubblewrap, as a whole", measured["bubblewrap ready"], "ms", bare),
        at_most("the same, beyond a bare process", measured["bubblewrap ready"] - bare, "ms", 50.0),
        at_most(
            "a command among 300 sandboxes, against 16",
            *(measured["among 300"], "ms", 1.5 * measured["among 16"], measured["among 16"]),
        ),
    ]


async def busy_rows() -> list[Row]:
    """The share of run slots in which an agent is at work, while there is work."""
    with_buffer = await busy_share(ready_buffer=SLOTS, init_workers=SLOTS)
    without = await busy_share(ready_buffer=0, init_workers=SLOTS)
    goal = "≥ 95"
    return [
        Row(
            f"run slots busy, init {INIT_SECONDS:g} s, run {RUN_SECONDS:g} s (peer: no READY buffer)",
            100 * with_buffer,
            "%",
            100 * without,
            goal,
            with_buffer >= 0.95,
        )
    ]


async def busy_share(**sizes: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        async with system(Path(directory), ["unused"]) as running:
            task = shell_task(
                "busy",
                f"sleep {RUN_SECONDS:g}",
                samples=SLOTS * ROUNDS,
                prepare=[{"exec": f"sleep {INIT_SECONDS:g}"}],
            )
            await running.client.submit(task)
            async with running.node(run_slots=SLOTS, postrun_workers=SLOTS, **sizes) as node:
                return await share_while_queued(running, node)


async def share_while_queued(running: System, node: Node) -> float:
    """Sampled from the first full house until the queue is empty."""
    at_work: list[int] = []
    is_full = False
    while (await running.client.health()).sessions.get(SessionStatus.QUEUED, 0):
        agents = sum(run.status is SessionStatus.RUNNING for run in node._runs.values())
        is_full |= agents == SLOTS
        if is_full:
            at_work.append(agents)
        await asyncio.sleep(0.05)
    return sum(at_work) / len(at_work) / SLOTS


async def idle_rows() -> list[Row]:
    """The node's own memory for a session whose agent waits; the agents' processes are not the node's."""
    with tempfile.TemporaryDirectory() as directory:
        async with system(Path(directory), ["unused"]) as running:
            await running.client.submit(shell_task("idle", "sleep 600", samples=IDLE_SESSIONS))
            gc.collect()
            before = psutil.Process().memory_info().rss
            marks = [time.perf_counter()]
            async with running.node(
                run_slots=IDLE_SESSIONS, ready_buffer=16, init_workers=16, postrun_workers=16
            ) as node:
                await all_running(node, IDLE_SESSIONS)
                marks.append(time.perf_counter())
                used = (psutil.Process().memory_info().rss - before) / IDLE_SESSIONS
                await running.client.cancel("idle")
                await running.client.wait(["idle"], timeout=300)
                marks.append(time.perf_counter())
        left = list(Path(directory).glob("nodes/*/sessions/*"))
    began, ended = (after - before for before, after in pairwise(marks))
    return [
        at_most(f"node memory a session, {IDLE_SESSIONS:,} agents waiting", used / 2**20, "MB", 1.0),
        Row("starting so many, a session", 1000 * began / IDLE_SESSIONS, "ms"),
        Row("cancelling them, a session", 1000 * ended / IDLE_SESSIONS, "ms"),
        at_most("directories that are left of them", len(left), "", 0),
    ]


async def all_running(node: Node, count: int) -> None:
    while sum(run.status is SessionStatus.RUNNING for run in node._runs.values()) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.5)


async def scheduling_row() -> Row:
    """Both queues are asked in turn, so that a busy moment strikes both."""
    times: dict[int, list[float]] = {queued: [] for queued in QUEUES}
    async with AsyncExitStack() as stack:
        stores = {queued: await stack.enter_async_context(queue_of(queued)) for queued in QUEUES}
        for _ in range(CLAIMS):
            for queued, store in stores.items():
                times[queued].append(await claim_milliseconds(store))
    small, large = (statistics.median(times[queued]) for queued in QUEUES)
    return Row(
        f"claiming a session with {QUEUES[1]:,} queued (peer: with {QUEUES[0]})",
        large,
        "ms",
        small,
        "≤ 1.3 × peer",
        large <= 1.3 * small,
    )


async def gap_row() -> Row:
    """One event loop carries all streams: what one session leaves behind must not hold up the others."""
    gaps = await measure_gaps()
    return at_most(
        "longest gap in a stream while a session ends with 500 MB of capture, 32 MiB of artifacts"
        " (peer: while none does)",
        gaps["while ending"],
        "ms",
        50.0,
        gaps["while quiet"],
    )


@asynccontextmanager
async def queue_of(queued: int) -> AsyncIterator[Store]:
    with tempfile.TemporaryDirectory() as directory:
        async with Store.open(Path(directory)) as store:
            for number in range(queued // 10):
                await store.tasks.submit(_idle(number))
            yield store


async def claim_milliseconds(store: Store) -> float:
    began = time.perf_counter()
    (lease,) = await store.leases.claim("node", limit=1, runtimes=["process"], seconds=60)
    took = time.perf_counter() - began
    await store.leases.release(lease.session_id, lease.key)
    return 1000 * took


def _idle(number: int) -> TaskSpec:
    return shell_task(f"queued-{number}", "true", samples=10)


if __name__ == "__main__":
    main()
