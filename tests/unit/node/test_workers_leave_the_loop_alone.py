"""Long work is done in processes of its own: the event loop goes on, and nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from polar.errors import PolarError
from polar.node.worker_processes import WorkerEnded, WorkerProcesses
from polar.recordings.capture import parse_capture


@pytest.fixture
def workers() -> Iterator[WorkerProcesses]:
    made = WorkerProcesses()
    yield made
    made.close()


async def test_the_loop_goes_on_while_a_worker_works(workers: WorkerProcesses, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = asyncio.create_task(workers.run(Path.read_text, pipe))
    # The worker ends only because this loop, which waits for it, has time to write what it reads.
    await asyncio.to_thread(pipe.write_text, "written meanwhile")
    assert await reading == "written meanwhile"


async def test_what_a_function_raises_is_told_and_its_worker_goes_on(
    workers: WorkerProcesses, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"no capture at all")
    with pytest.raises(PolarError, match="not a capture"):
        await workers.run(parse_capture, damaged.read_bytes())
    with pytest.raises(RuntimeError, match="ValueError"):
        await workers.run(int, "x")
    assert await workers.run(json.loads, "[1, 2]") == [1, 2]


async def test_a_worker_that_dies_costs_only_what_it_was_at(workers: WorkerProcesses) -> None:
    with pytest.raises(WorkerEnded, match="ended with 3"):
        await workers.run(os._exit, 3)
    assert await workers.run(abs, -1) == 1


async def test_nothing_is_left_of_workers_that_were_closed(workers: WorkerProcesses) -> None:
    pid = await workers.run(os.getpid)
    workers.close()
    assert not psutil.pid_exists(pid)
