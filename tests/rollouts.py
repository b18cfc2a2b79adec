"""One task rolled out by a real harness through the whole chain, and what must hold of it afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from polar.client import AsyncClient
from polar.models.session import AgentEnd, SessionResult, SessionStatus
from polar.models.task import TaskSpec
from polar.recordings import recording
from polar.recordings.recording import Recording
from polar.trajectory.materialise import materialise
from tests.fakes.scripted_engine import logprob_of
from tests.sandboxes import require_runtime
from tests.systems import system

MAX_CONTEXT = 262_144
"""Enough for the prompt of any harness and an instruction of 300 KB."""

INSTRUCTION = "Write the word hello to hello.txt."
HUGE_INSTRUCTION = "--help me, " + "really " * 45_000 + "please"
"""Begins like a flag, and is too long for an argument."""


@dataclass(frozen=True)
class Rollout:
    result: SessionResult
    recording: Recording


def scripted_call(name: str, **arguments: Any) -> str:
    """The text with which the model calls one tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def harness_task(
    harness: str,
    runtime: str | dict[str, Any],
    instruction: str,
    options: Mapping[str, Any],
    **changes: Any,
) -> TaskSpec:
    """A task that is done once hello.txt holds that word."""
    return TaskSpec.model_validate(
        {
            "id": harness,
            "instruction": instruction,
            "harness": {"name": harness, "options": dict(options)},
            "runtime": runtime,
            "evaluator": {"name": "command", "options": {"command": "grep -qx hello hello.txt"}},
            **changes,
        }
    )


async def roll_out(
    data_dir: Path,
    harness: str,
    script: list[str],
    *,
    runtime: str | dict[str, Any] = "process",
    instruction: str = INSTRUCTION,
    options: dict[str, Any] | None = None,
    network_allow: tuple[str, ...] = (),
    **changes: Any,
) -> Rollout:
    """Have the harness follow the instruction of a changed task, with the model playing the script."""
    await require_runtime(runtime if isinstance(runtime, str) else runtime["name"])
    task = harness_task(harness, runtime, instruction, options or {}, **changes)
    async with system(data_dir, script, max_context=MAX_CONTEXT) as running:
        await running.client.submit(task)
        async with running.node(network_allow=network_allow):
            return await _rolled_out(running.client, harness)


async def roll_out_twice(data_dir: Path, harness: str, script: list[str], **options: Any) -> list[Rollout]:
    """As `roll_out`, and then a replay of the same session, which must not ask the engine."""
    await require_runtime("bubblewrap")
    task = harness_task(harness, "bubblewrap", INSTRUCTION, options)
    async with system(data_dir, script, max_context=MAX_CONTEXT) as running, running.node():
        await running.client.submit(task)
        first = await _rolled_out(running.client, harness)
        asked = len(running.engine.requests)
        view = await running.client.replay(first.result.session_id)
        second = await _rolled_out(running.client, view.task_id)
        assert len(running.engine.requests) == asked
    return [first, second]


async def _rolled_out(client: AsyncClient, task_id: str) -> Rollout:
    (result,) = await client.wait([task_id], timeout=180)
    assert result.has_recording, f"{task_id}: no model call was made: {result}"
    return Rollout(result, recording.decode(await client.recording(result.session_id)))


def assert_rolled_out(rollout: Rollout) -> None:
    """The task is done, and each turn extends the exact tokens of the one before."""
    result, completions = rollout.result, rollout.recording.completions
    assert (result.status, result.agent_end, result.exit_code) == (
        SessionStatus.COMPLETED,
        AgentEnd.EXITED,
        0,
    ), result
    assert result.reward == 1.0
    for completion in completions:
        assert len(completion.sampled_ids) > 0
        assert completion.logprobs.tolist() == [logprob_of(id) for id in completion.sampled_ids.tolist()]
    for before, after in pairwise(completions):
        assert after.parent == before.id
        seen = np.concatenate([before.prompt_ids, before.sampled_ids])
        assert np.array_equal(after.prompt_ids[: len(seen)], seen)
    assert_merged(rollout)


def assert_merged(rollout: Rollout) -> None:
    """Nearly all sampled tokens are trained in merged traces, and every one is accounted for."""
    stats, trajectory = rollout.result.stats, rollout.recording.trajectory
    made = [materialise(trajectory, ref) for ref in trajectory.traces]
    sampled = sum(len(completion.sampled_ids) for completion in rollout.recording.completions)
    trained = sum(int(trace.loss_mask.sum()) for trace in made)
    assert (stats.sampled_tokens, stats.trainable_tokens) == (sampled, trained)
    assert sampled == trained + sum(stats.excluded.values())
    merged = sum(int(trace.loss_mask.sum()) for trace in made if len(trace.completion_ids) > 1)
    assert merged >= 0.99 * sampled, stats
    assert not stats.faults
