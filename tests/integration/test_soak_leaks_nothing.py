"""Three hundred short sessions that are cancelled, time out and crash at random leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import psutil
import pytest

from polar.models.session import SessionStatus
from polar.models.task import TaskSpec
from tests.sandboxes import require_runtime
from tests.systems import ASK, seats_taken, shell_task, system

SESSIONS = 300

AGENTS = (
    "true",
    ASK,
    "kill -SEGV $$",
    "exit 7",
    "sleep 60",
    "setsid sleep 60 & disown; true",
    "sh -c 'sleep 60' & sh -c 'sleep 60' & wait",
)
"""Honest, crashing, failing, hanging, and leaving processes behind."""


def tasks(seed: int, runtime: str, count: int) -> list[TaskSpec]:
    chance = random.Random(seed)
    return [
        shell_task(
            f"{runtime}-{number}",
            chance.choice(AGENTS),
            runtime=runtime,
            samples=2,
            priority=chance.randrange(101),
            budgets={"run_seconds": chance.choice([0.3, 1.0])},
            early_stop=chance.choice([None, 1]),
        )
        for number in range(count // 2)
    ]


def processes() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mounts_below(directory: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(directory) in line]


@pytest.mark.sandbox
async def test_a_soak_leaks_no_process_mount_directory_seat_or_descriptor(tmp_path: Path) -> None:
    await require_runtime("bubblewrap")
    chance = random.Random(7)
    submitted = [*tasks(1, "process", SESSIONS // 2), *tasks(2, "bubblewrap", SESSIONS // 2)]
    async with system(tmp_path / "data", ["A fine answer."]) as running:
        await running.client.health()
        before, open_before = processes(), descriptors()
        async with running.node(run_slots=8, ready_buffer=4, init_workers=4, postrun_workers=4) as node:
            for task in submitted:
                await running.client.submit(task)
            waiting = asyncio.create_task(running.client.wait([task.id for task in submitted], timeout=240))
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=chance.uniform(0.1, 0.6))
                await running.client.cancel_session(f"{chance.choice(submitted).id}.{chance.randrange(2)}")
            results = await waiting
        # A session that was cancelled has its result before the node has ended it.
        seats = await seats_taken(node)
        assert len(results) == len({result.session_id for result in results}) == SESSIONS
        kinds = Counter(result.status for result in results)
        assert kinds[SessionStatus.COMPLETED] > 0
        assert kinds[SessionStatus.CANCELLED] > 0
        assert kinds[SessionStatus.FAILED] == 0, [result.error for result in results if result.error][:5]
        assert seats == 0
        assert processes() <= before
        # Connections that the client keeps open for reuse are not leaks; one a session would be.
        assert descriptors() <= open_before + 20
    assert mounts_below(tmp_path) == []
    assert not list((tmp_path / "data/nodes/local/sessions").iterdir())
    assert not list((tmp_path / "data/nodes/local/captures").iterdir())
    assert not list((tmp_path / "data/nodes/local/logs").iterdir())
