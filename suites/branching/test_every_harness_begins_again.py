"""Sessions of real harnesses with a loop of tools are replayed, branched and resumed, token for token."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.app.verification import verify
from polar.engines.base import GenerateRequest
from polar.models.completion import REPLAYED, RESUMED, Completion
from polar.models.session import AgentEnd, SessionResult, SessionStatus
from polar.models.task import TaskSpec
from polar.recordings.capture import parse_capture
from polar.recordings.recording import Recording, decode
from polar.trajectory.accounting import Exclusion
from polar.trajectory.materialise import materialise
from suites.branching.conftest import Room
from suites.branching.policy import COMMANDS, FAILING, MIDDLE, Policy
from tests.fakes.scripted_engine import Answer
from tests.rollouts import INSTRUCTION, MAX_CONTEXT, harness_task
from tests.systems import RUNTIMES, TOKEN, System, system
from tests.teaching import AGENTS
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(900)

REPOSITORY = Path(__file__).parents[2]
SESSION_SECONDS = 300
LATER = 3
"""The model calls after which `polar branch` leaves."""
IN_CONTAINERS = ("pi", "codex")
"""Harnesses that need of an image what the one of `make test-containers` has."""


@asynccontextmanager
async def at_work(directory: Path, harness: str, room: Room) -> AsyncIterator[System]:
    async with system(directory, [], max_context=MAX_CONTEXT) as running:
        running.engine.script.append(Policy(running.engine, harness).answer)
        async with running.node(runtimes=(*RUNTIMES, room.name)):
            yield running


def task(harness: str, room: Room, **changes: Any) -> TaskSpec:
    whole = harness_task(harness, room.component, INSTRUCTION, AGENTS[harness].options or {})
    return TaskSpec.model_validate({**whole.model_dump(), **changes})


async def ended(running: System, task_id: str) -> dict[str, tuple[SessionResult, Recording]]:
    """Each session of a task with its recording, in which everything adds up."""
    found = {}
    for result in await running.client.wait([task_id], timeout=SESSION_SECONDS):
        id = result.session_id
        assert (result.status, result.agent_end) == (SessionStatus.COMPLETED, AgentEnd.EXITED), result
        found[id] = result, decode(await running.client.recording(id))
        assert not (await verify(id, found[id][1], None, None, print)).problems
    return found


async def polar(running: System, *arguments: str) -> None:
    """A command of Polar that succeeds."""
    environment = os.environ | {"POLAR_SERVER": running.server.url, "POLAR_TOKEN": TOKEN}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "polar", *arguments, env=environment)
    assert await process.wait() == 0, arguments


def assert_same(given: Sequence[Completion], recorded: Sequence[Completion]) -> None:
    """What was given again is what was sampled, token for token."""
    for again, first in zip(given, recorded, strict=True):
        assert (again.id, again.response) == (first.id, first.response)
        for name in ("prompt_ids", "sampled_ids", "logprobs", "policy_versions"):
            assert np.array_equal(getattr(again, name), getattr(first, name)), name


def assert_branched(branch: tuple[SessionResult, Recording], parent: Recording, calls: int) -> int:
    """It began as its parent did and went on by itself; how many answers it sampled."""
    result, recording = branch
    begun, own = recording.completions[:calls], recording.completions[calls:]
    assert_same(begun, parent.completions[:calls])
    assert [REPLAYED in it.extra for it in recording.completions] == [True] * calls + [False] * len(own)
    shared = np.concatenate([begun[-1].prompt_ids, begun[-1].sampled_ids])
    assert np.array_equal(own[0].prompt_ids[: len(shared)], shared)
    assert result.stats.excluded == {Exclusion.REPLAYED: sum(it.sampled_tokens for it in begun)}
    assert result.stats.trainable_tokens == sum(it.sampled_tokens for it in own)
    trained = [materialise(recording.trajectory, ref) for ref in recording.trajectory.traces]
    assert {id for trace in trained for id in trace.completion_ids} == {it.id for it in own}
    assert result.replay is not None
    assert (result.replay.calls, result.replay.divergence_count) == (calls, 0), result.replay
    assert result.reward == 0.0, "what it sampled spoils the task"
    return len(own)


async def check_replays_and_branches(directory: Path, harness: str, room: Room) -> None:
    branching = {"at": {"name": "calls", "options": {"calls": [MIDDLE]}}}
    async with at_work(directory, harness, room) as running:
        asked = running.engine.requests
        await running.client.submit(task(harness, room, branching=branching))
        own = await ended(running, harness)
        result, recording = own[f"{harness}.0"]
        assert result.reward == 1.0
        assert {it.dialect for it in recording.completions} == {AGENTS[harness].dialect}
        assert len(recording.completions) > len(COMMANDS)
        sampled = assert_branched(own[f"{harness}.1"], recording, MIDDLE)
        assert len(asked) == len(recording.completions) + sampled

        before = len(asked)
        await polar(running, "branch", f"{harness}.0", "--at", str(LATER))
        branched = await ended(running, harness)
        assert len(asked) == before + assert_branched(branched[f"{harness}.2"], recording, LATER)

        before = len(asked)
        await polar(running, "replay", f"{harness}.0")
        (replay,) = [view async for view in running.client.tasks() if view.spec.id != harness]
        ((again, whole),) = (await ended(running, replay.spec.id)).values()
    assert len(asked) == before, "a replay samples nothing"
    assert_same(whole.completions, recording.completions)
    assert again.stats.excluded == {Exclusion.REPLAYED: result.stats.sampled_tokens}
    assert (again.reward, again.stats.trainable_tokens) == (1.0, 0)


async def check_strategy(
    directory: Path,
    room: Room,
    name: str,
    calls: int,
    commands: Sequence[str] = COMMANDS,
    doubted: str | None = None,
) -> None:
    """A session of Pi, in which the policy is uncertain of `doubted` alone, is branched after these calls."""
    async with system(directory, [], max_context=MAX_CONTEXT) as running:
        policy = Policy(running.engine, "pi", commands)

        def answer(request: GenerateRequest) -> Answer:
            said = policy.answer(request)
            return Answer(said, doubt=1.0 if said == doubted else 0.0)

        running.engine.script.append(answer)
        await running.client.submit(task("pi", room, branching={"at": name}))
        async with running.node(runtimes=(*RUNTIMES, room.name)):
            own = await ended(running, "pi")
    result, recording = own["pi.0"]
    assert (result.reward, result.branch_at) == (1.0, (calls,))
    assert_branched(own["pi.1"], recording, calls)


@asynccontextmanager
async def doomed_node(running: System, harness: str, room: Room) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that is a node, in the middle of an answer; it is gone after the block."""
    arguments = (running.server.url, f"{running.data_dir}/first", harness, room.name)
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "suites.branching.policy", *arguments),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert node.stdout is not None
        assert await asyncio.wait_for(node.stdout.readline(), SESSION_SECONDS) == b"in the middle\n"
        yield node
    finally:
        if node.returncode is None:
            node.kill()
        await node.wait()


async def check_resumes(directory: Path, harness: str, room: Room) -> None:
    async with system(directory, [], max_context=MAX_CONTEXT) as running:
        running.engine.script.append(Policy(running.engine, harness).answer)
        await running.client.submit(task(harness, room))

        async def had() -> tuple[Completion, ...] | None:
            captured = parse_capture(await running.captured(f"{harness}.0")).completions
            return captured if len(captured) >= MIDDLE else None

        async with doomed_node(running, harness, room) as node:
            await eventually(had)
            node.kill()
        captured = await had()
        assert captured is not None
        await running.lose_leases()
        async with running.node(name="second", runtimes=(*RUNTIMES, room.name)):
            ((result, recording),) = (await ended(running, harness)).values()
    assert (result.reward, result.replay and result.replay.origin) == (1.0, f"{harness}.0")
    assert result.replay is not None
    assert (result.replay.calls, result.replay.divergence_count) == (len(captured), 0), result.replay
    assert_same(recording.completions[: len(captured)], captured)
    own = [it for it in recording.completions if RESUMED not in it.extra]
    assert (
        len(recording.completions) == len(captured) + len(own) == len({it.id for it in recording.completions})
    )
    assert len(running.engine.requests) == len(own), "what was captured is not sampled again"
    assert result.stats.excluded == {}
    assert result.stats.trainable_tokens == sum(it.sampled_tokens for it in recording.completions)


@pytest.mark.parametrize("harness", AGENTS)
async def test_a_session_replays_to_its_end_and_branches_in_its_middle(
    tmp_path: Path, harness: str, bubblewrap: Room
) -> None:
    await check_replays_and_branches(tmp_path, harness, bubblewrap)


async def test_branches_leave_before_the_turn_that_was_uncertain(tmp_path: Path, bubblewrap: Room) -> None:
    doubted = AGENTS["pi"].shell(COMMANDS[LATER])
    await check_strategy(tmp_path, bubblewrap, "entropy", LATER, doubted=doubted)


async def test_branches_leave_before_the_command_that_failed(tmp_path: Path, bubblewrap: Room) -> None:
    await check_strategy(tmp_path, bubblewrap, "first_failure", MIDDLE, FAILING)


@pytest.mark.parametrize("harness", AGENTS)
async def test_a_session_goes_on_after_its_node_was_killed(
    tmp_path: Path, harness: str, bubblewrap: Room
) -> None:
    await check_resumes(tmp_path, harness, bubblewrap)


@pytest.mark.parametrize("harness", IN_CONTAINERS)
async def test_sessions_begin_again_in_containers(tmp_path: Path, harness: str, container: Room) -> None:
    await check_replays_and_branches(tmp_path / "one", harness, container)
    await check_resumes(tmp_path / "other", harness, container)
