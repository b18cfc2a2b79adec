"""Trouble that is none of the agent's is never scored: the session is run again, and fails in the end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from polar.engines.base import EngineDown
from polar.models.dashboard import NodeOverview
from polar.models.session import FailureReason, SessionResult, SessionStatus
from polar.models.views import Join
from polar.node import admission
from tests.fakes.scripted_engine import Script
from tests.sandboxes import require_runtime
from tests.systems import ASK, System, shell_task, system
from tests.waiting import eventually

ASK_ANYWHERE = ASK.replace(sys.executable, "python3", 1)
WAIT_IF_TOLD = ASK_ANYWHERE + "if grep -q Wait answer.txt; then mkfifo p; touch waits; read forever < p; fi"
"""Asks once and, if the answer says so, never ends: opening a pipe that nobody writes to takes for ever."""


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[System]:
    async with system(tmp_path / "data", ["A fine answer."]) as running:
        yield running


async def outcome(running: System, task_id: str, command: Any, **changes: Any) -> SessionResult:
    changes = {"allow_no_model_calls": False, **changes}
    await running.client.submit(shell_task(task_id, command, **changes))
    async with running.node(runtimes=("process", "bubblewrap")):
        (result,) = await running.client.wait([task_id], timeout=120)
    return result


def assert_never_scored(result: SessionResult) -> None:
    assert (result.status, result.failure) == (SessionStatus.FAILED, FailureReason.INFRASTRUCTURE)
    assert (result.attempt, result.verdict) == (3, None)


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
async def test_an_agent_whose_program_is_missing_is_no_verdict(small: System, runtime: str) -> None:
    await require_runtime(runtime)
    result = await outcome(small, "missing", ["polar-no-such-program"], runtime=runtime)
    assert_never_scored(result)
    assert "polar-no-such-program" in (result.error or "")


async def test_an_agent_that_never_reaches_the_model_is_no_verdict(small: System) -> None:
    result = await outcome(small, "idle", "echo 'connection refused' >&2; touch answer.txt")
    assert_never_scored(result)
    assert "without a model call (exit code 0: connection refused)" in (result.error or "")
    assert result.has_artifacts


async def test_a_task_may_say_that_it_needs_no_model_call(small: System) -> None:
    result = await outcome(small, "plain", "echo done > answer.txt", allow_no_model_calls=True)
    assert (result.status, result.reward, result.attempt) == (SessionStatus.COMPLETED, 1.0, 1)


async def test_a_budget_that_leaves_no_model_call_is_the_task_s_own_failure(small: System) -> None:
    result = await outcome(small, "tight", ASK + "sleep 600", budgets={"max_context_tokens": 1})
    assert (result.status, result.failure, result.attempt) == (SessionStatus.FAILED, FailureReason.TASK, 1)


async def test_an_agent_that_the_engine_left_alone_is_no_verdict(tmp_path: Path) -> None:
    script: list[Script] = ["An answer.", EngineDown("no engine"), "An answer.", "The last answer."]
    async with system(tmp_path / "data", script) as running:
        result = await outcome(running, "alone", ASK + ASK)
    assert (result.status, result.reward, result.attempt) == (SessionStatus.COMPLETED, 1.0, 2)
    assert result.stats.completions == 2


async def test_an_agent_that_got_over_an_outage_is_scored(tmp_path: Path) -> None:
    script: list[Script] = [EngineDown("no engine"), "An answer."]
    async with system(tmp_path / "data", script) as running:
        result = await outcome(running, "patient", ASK + ASK)
    assert (result.status, result.reward, result.attempt) == (SessionStatus.COMPLETED, 1.0, 1)


async def children_of_waiting_agent(sessions: Path) -> list[psutil.Process]:
    """What the supervisor of the agent has started, once the agent waits."""
    await eventually(lambda: list(sessions.glob("*/files/workspace/waits")))
    (pid_file,) = sessions.glob("*/pids/*.json")
    return list(psutil.Process(int(pid_file.stem)).children())


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
async def test_an_agent_killed_from_outside_is_run_again(tmp_path: Path, runtime: str) -> None:
    await require_runtime(runtime)
    async with system(tmp_path / "data", ["Wait.", "Go on."]) as running:
        await running.client.submit(shell_task("killed", WAIT_IF_TOLD, runtime=runtime))
        async with running.node(runtimes=(runtime,)):
            for child in await children_of_waiting_agent(tmp_path / "data/nodes/local/sessions"):
                os.kill(child.pid, signal.SIGKILL)
            (result,) = await running.client.wait(["killed"], timeout=120)
        events = await running.client.session_events("killed.0")
    assert (result.status, result.reward, result.attempt) == (SessionStatus.COMPLETED, 1.0, 2)
    assert any("killed from outside" in (event.detail or "") for event in events)


async def test_an_agent_in_a_closed_sandbox_cannot_escape_its_verdict_by_killing_itself(
    small: System,
) -> None:
    await require_runtime("bubblewrap")
    result = await outcome(small, "escaping", ASK_ANYWHERE + "kill -KILL $$", runtime="bubblewrap")
    assert (result.status, result.reward, result.attempt) == (SessionStatus.COMPLETED, 1.0, 1)
    assert result.exit_code == -signal.SIGKILL


async def troubled(running: System) -> NodeOverview | None:
    return next((node for node in await running.client.nodes() if node.trouble), None)


async def test_a_node_short_of_disk_space_leaves_sessions_in_the_queue_and_says_why(small: System) -> None:
    await small.client.join("local", Join(version="test", runtimes=("process",)))
    await small.client.submit(shell_task("queued", ASK))
    async with small.node(disk_reserve_bytes=1 << 60):
        node = await eventually(partial(troubled, small))
        assert (node.state, (await small.client.session("queued.0")).status) == ("troubled", "queued")
    assert "less than node.disk_reserve_bytes" in str(node.trouble)


async def test_broken_tasks_do_not_keep_a_node_from_sound_ones(small: System) -> None:
    for task_id in ("broken", "broken-too"):
        task = shell_task(task_id, "polar-no-such-program", samples=2, allow_no_model_calls=False)
        await small.client.submit(task)
    await small.client.submit(shell_task("sound", ASK, allow_no_model_calls=False))
    async with small.node(run_slots=1, ready_buffer=0, breaker_failures=2, breaker_seconds=0.2):
        (result,) = await small.client.wait(["sound"], timeout=120)
    events = (await small.client.events()).events
    begun = [event.task_id for event in events if event.status is SessionStatus.INIT]
    assert result.reward == 1.0
    assert begun.index("sound") < 12, "it came after all attempts at the broken ones"


async def test_a_node_whose_disk_fills_while_all_places_are_taken_takes_nothing_more(
    small: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task_id in ("first", "second"):
        command = "touch started; until test -e go; do sleep 0.02; done; echo done > answer.txt"
        await small.client.submit(shell_task(task_id, command))
    async with small.node(run_slots=1, ready_buffer=0):
        begun = await eventually(lambda: list(small.data_dir.rglob("workspace/started")))
        monkeypatch.setattr(admission, "free_bytes", lambda _directory: 0)
        (begun[0].parent / "go").touch()
        await small.client.wait(["first"], timeout=60)
        assert (await small.client.session("second.0")).status is SessionStatus.QUEUED


async def test_a_node_whose_engine_came_back_goes_on_with_what_waited(tmp_path: Path) -> None:
    down = EngineDown("no engine")
    script: list[Script] = [down, down, down, "Back again."]
    async with system(tmp_path / "data", script) as running:
        for task_id in ("one", "two", "three"):
            await running.client.submit(shell_task(task_id, ASK, allow_no_model_calls=False))
        async with running.node(run_slots=1, ready_buffer=0, breaker_failures=2, breaker_seconds=0.2):
            results = await running.client.wait(["one", "two", "three"], timeout=120)
    assert [(result.status, result.reward) for result in results] == [(SessionStatus.COMPLETED, 1.0)] * 3
    assert sum(result.attempt for result in results) == 6
