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
from tests.fakes.noting_builder import install_noting_builder
from tests.systems import ASK, shell_task, system


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


async def test_a_session_is_built_and_packed_by_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_noting_builder(tmp_path, monkeypatch)
    notes = tmp_path / "notes"
    builder = {"name": "noting", "options": {"notes": str(notes)}}
    async with system(tmp_path / "data", ["An answer."]) as running, running.node():
        await running.client.submit(shell_task("t", ASK, builder=builder, artifacts=["answer.txt"]))
        (result,) = await running.client.wait(["t"], timeout=60)
    assert (result.reward, result.has_recording, result.has_artifacts) == (1.0, True, True), result.error
    done = [line.split() for line in notes.read_text().splitlines()]
    assert [what for _, what in done] == ["build", "pack"]
    assert str(os.getpid()) not in {process for process, _ in done}
