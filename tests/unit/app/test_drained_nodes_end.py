"""Nodes that are processes end when they are drained, also while one of them is being started again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polar.app.node_processes import NodeProcesses
from polar.config.settings import NodeSettings, Settings
from tests.fakes.dying_node import DyingNode


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> DyingNode:
    return DyingNode(monkeypatch)


def nodes(tmp_path: Path) -> NodeProcesses:
    return NodeProcesses(Settings(data_dir=tmp_path, node=NodeSettings(count=1, name="n")), lambda _: None)


async def test_a_node_that_is_being_started_again_is_drained_too(tmp_path: Path, dying: DyingNode) -> None:
    async with asyncio.timeout(10), nodes(tmp_path) as running:
        work = asyncio.create_task(running.run())
        await dying.starting.wait()
        running.drain()
        dying.gate.set()
        await work


async def test_a_machine_that_cannot_start_a_process_just_now_ends_no_other_node(
    tmp_path: Path, dying: DyingNode
) -> None:
    dying.failure = BlockingIOError("no process can be made")
    dying.gate.set()
    async with asyncio.timeout(10), nodes(tmp_path) as running:
        work = asyncio.create_task(running.run())
        while dying.starts < 3:
            assert not work.done()
            await asyncio.sleep(0)
        running.drain()
        await work
