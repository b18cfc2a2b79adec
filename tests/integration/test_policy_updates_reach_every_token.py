"""A trainer replaces the policy while agents work: they see a slower answer, and every token its version."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar.cli.main import app
from polar.engines.base import WeightUpdate
from polar.errors import Unavailable
from polar.models.policy import PauseMode, PolicyOrder, PolicyReport
from polar.models.session import AgentEnd, SessionResult, SessionStatus
from polar.node import policy as following
from polar.recordings import recording
from tests.fakes.scripted_engine import Answer, Script
from tests.systems import ASK, TOKEN, System, shell_task, system
from tests.waiting import eventually, leap, turns


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[System]:
    async with system(tmp_path / "data", ["A fine answer."]) as running:
        yield running


async def ended(running: System, task_id: str) -> SessionResult:
    (result,) = await running.client.wait([task_id], timeout=60)
    assert (result.status, result.agent_end) == (SessionStatus.COMPLETED, AgentEnd.EXITED), result
    assert result.reward == 1.0
    return result


async def settled(running: System) -> None:
    """Return once the node follows the policy."""

    async def is_so() -> bool:
        view = await running.client.policy()
        return bool(view.nodes) and view.is_settled

    await eventually(is_so)


async def running_agent(running: System, task_id: str) -> None:
    """Return once the agent is at work."""

    async def is_so() -> bool:
        return [s.status async for s in running.client.sessions(task_id)] == [SessionStatus.RUNNING]

    await eventually(is_so)


def weights(running: System) -> Path:
    return running.data_dir / "weights" / "next"


async def test_a_pause_longer_than_the_budget_costs_the_agent_nothing(small: System) -> None:
    async with small.node():
        await settled(small)
        async with small.client.paused() as pause:
            await small.client.submit(shell_task("patient", ASK, budgets={"run_seconds": 2}))
            await running_agent(small, "patient")
            leap(2.1)
            await turns(2)
            assert small.engine.requests == []
            await pause.update(weights(small))
        result = await ended(small, "patient")
    assert (result.policy_version_min, result.policy_version_max) == (1, 1)


@pytest.mark.parametrize("mode", PauseMode)
async def test_a_completion_that_spans_an_update_carries_both_versions(
    tmp_path: Path, mode: PauseMode
) -> None:
    gate = asyncio.Event()
    script: list[Script] = [Answer("one two three four", gate=gate, gate_at=2), " more"]
    async with system(tmp_path / "data", script) as running, running.node():
        await running.client.submit(shell_task("spans", ASK))
        await asyncio.wait_for(running.engine.waiting.wait(), 30)
        async with running.client.paused(mode) as pause:
            gate.set()
            await pause.update(weights(running), version=5)
        result = await ended(running, "spans")
        kept = recording.decode(await running.client.recording(result.session_id))
    (completion,) = kept.completions
    versions = completion.policy_versions.tolist()
    assert versions == [0] * 2 + [5] * (len(versions) - 2)
    assert (result.policy_version_min, result.policy_version_max) == (0, 5)
    assert result.stats.trainable_tokens == len(versions)


async def test_a_pause_whose_holder_died_is_released(small: System) -> None:
    async with small.node():
        await settled(small)
        await small.client.pause_policy("dead", timeout_seconds=3.0)
        assert small.gateway.is_paused
        await small.client.submit(shell_task("freed", ASK))
        await ended(small, "freed")
    assert not small.gateway.is_paused


async def test_a_node_whose_server_is_gone_releases_the_pause_itself(
    small: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RETRY_SECONDS", 0.05)
    async with small.node():
        await settled(small)
        await small.client.pause_policy("dead", timeout_seconds=2.0)
        await small.server.close()
        await eventually(lambda: not small.gateway.is_paused)


async def test_weights_that_cannot_be_loaded_leave_the_old_version_in_use(small: System) -> None:
    small.engine.update_failure = "half a file"
    async with small.node():
        await settled(small)
        with pytest.raises(Unavailable, match="version 0 stays: local: half a file"):
            async with small.client.paused() as pause:
                await pause.update(weights(small))
        await small.client.submit(shell_task("goes-on", ASK))
        result = await ended(small, "goes-on")
    assert (result.policy_version_min, result.policy_version_max) == (0, 0)


async def test_weights_from_elsewhere_are_refused_by_the_node(small: System) -> None:
    async with small.node():
        await settled(small)
        for path in ("/etc", weights(small) / ".." / ".." / ".." / "x"):
            with pytest.raises(Unavailable, match="not below a directory that this node takes weights from"):
                await small.client.update_policy(path)
    assert small.engine.updates == []


async def test_a_node_that_starts_later_has_the_weights_before_it_samples(small: System) -> None:
    await small.client.update_policy(weights(small), version=9)
    await small.client.submit(shell_task("late", ASK))
    async with small.node():
        result = await ended(small, "late")
    assert (result.policy_version_min, result.policy_version_max) == (9, 9)


async def test_an_engine_that_another_system_left_at_the_same_number_gets_these_weights(
    small: System,
) -> None:
    """All count from 1: what an engine has of this number may be of an evaluation before."""
    small.engine.policy_version = 1
    await small.client.update_policy(weights(small))
    await small.client.submit(shell_task("mine", ASK))
    async with small.node():
        result = await ended(small, "mine")
    assert (result.policy_version_min, result.policy_version_max) == (1, 1)
    assert small.engine.updates == [WeightUpdate(1, str(weights(small)))]


async def test_an_update_on_one_machine_is_quick(small: System) -> None:
    """Beyond the load itself, which this engine does not have."""
    async with small.node():
        await settled(small)
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            async with small.client.paused() as pause:
                await pause.update(weights(small))
            times.append(time.perf_counter() - begun)
    assert min(times) < 0.5, times
    print(f"pause, update, resume: {1000 * min(times):.0f} ms")


async def test_the_command_line_shows_and_replaces_the_policy(small: System) -> None:
    environment = {"POLAR_SERVER": small.client.server, "POLAR_TOKEN": TOKEN}

    async def polar(*arguments: str) -> str:
        run = await asyncio.to_thread(CliRunner().invoke, app, ["policy", *arguments], env=environment)
        assert run.exit_code == 0, run.output
        return run.stdout

    async with small.node():
        await settled(small)
        assert "settled" in await polar()
        await polar("pause", "--mode", "drain")
        assert small.gateway.is_paused
        updated = json.loads(await polar("update", str(weights(small)), "--version", "4", "--json"))
        assert (updated["version"], updated["is_paused"]) == (4, True)
        assert "drain by command-line" in await polar()
        await polar("resume")
        assert not small.gateway.is_paused


async def test_a_node_is_waited_for_however_long_its_engine_takes(
    small: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "WAIT_SECONDS", 0.05)
    begun, drained = asyncio.Event(), asyncio.Event()
    reports: list[PolicyReport] = []
    pause, follow_policy = small.engine.pause, small.client.follow_policy

    async def slow_pause(mode: PauseMode) -> None:
        begun.set()
        await drained.wait()
        await pause(mode)

    async def told(node: str, report: PolicyReport) -> PolicyOrder:
        order = await follow_policy(node, report)
        if begun.is_set() and not drained.is_set():
            reports.append(report)
        return order

    async with small.node():
        await settled(small)
        monkeypatch.setattr(small.engine, "pause", slow_pause)
        monkeypatch.setattr(small.client, "follow_policy", told)
        pausing = asyncio.create_task(small.client.pause_policy("trainer", PauseMode.DRAIN))
        await begun.wait()
        # It is not one of those that fell silent, nor has it done what was asked.
        await eventually(lambda: len(reports) >= 3)
        assert not pausing.done()
        (node,) = (await small.client.policy()).nodes
        assert not node.is_settled
        drained.set()
        assert (await pausing).is_settled


async def test_a_node_that_stops_leaves_no_pause_behind(small: System) -> None:
    async with small.node():
        await settled(small)
        await small.client.pause_policy("trainer")
    assert not small.gateway.is_paused
    assert (await small.client.policy()).nodes == ()
