"""A command that is ended is asked nothing more: that its supervisor was killed as well is no error then."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from polar.runtimes.base import SandboxUnavailable
from polar.runtimes.supervision import Launch, Supervised
from tests.waiting import eventually


def started(directory: Path, command: str = "read forever", ports: tuple[int, ...] = ()) -> Supervised:
    pids = directory / "pids"
    pids.mkdir()
    launch = Launch(
        argv=("/bin/sh", "-c", command),
        env={},
        cwd=directory,
        stdin=None,
        stdout=directory / "stdout",
        stderr=directory / "stderr",
        output_limit=1024,
        closed_network_ports=ports,
    )
    return Supervised(launch, pids)


async def its_supervisor(directory: Path) -> int:
    named = await eventually(lambda: list((directory / "pids").glob("*.json")), every=0.001)
    return int(named[0].stem)


@pytest.fixture
async def complaints() -> list[dict[str, Any]]:
    """What asyncio has to say of tasks that nobody looked after."""
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: said.append(context))
    return said


async def test_a_command_that_is_killed_more_than_once_still_tells_how_it_ended(tmp_path: Path) -> None:
    """Its supervisor is gone before it has read them all."""
    command = started(tmp_path)
    await its_supervisor(tmp_path)
    for _ in range(9):
        command.kill()
    assert await command.ended == -signal.SIGKILL


async def test_the_end_of_a_command_whose_supervisor_was_killed_leaves_no_complaint(
    tmp_path: Path, complaints: list[dict[str, Any]]
) -> None:
    command = started(tmp_path)
    os.kill(await its_supervisor(tmp_path), signal.SIGKILL)
    await command.end()
    del command
    gc.collect()
    assert complaints == []


async def test_a_cancelled_call_whose_supervisor_was_killed_leaves_no_complaint(
    tmp_path: Path, complaints: list[dict[str, Any]]
) -> None:
    command = started(tmp_path)
    call = asyncio.create_task(command.run(60))
    supervisor = await its_supervisor(tmp_path)
    call.cancel()
    os.kill(supervisor, signal.SIGKILL)
    await asyncio.wait({call})
    assert call.cancelled()
    del command, call
    gc.collect()
    assert complaints == []


async def test_a_call_still_learns_that_its_supervisor_was_killed(tmp_path: Path) -> None:
    command = started(tmp_path)
    call = asyncio.create_task(command.run(60))
    os.kill(await its_supervisor(tmp_path), signal.SIGKILL)
    with pytest.raises(SandboxUnavailable, match="killed"):
        await call


async def test_a_command_that_ended_at_once_has_no_listeners_left_to_serve(tmp_path: Path) -> None:
    command = started(tmp_path, "exit 3", ports=(8080,))
    await asyncio.wait({command.ended})
    assert await command.listeners() == []
    assert await command.run(60) == (3, False)
