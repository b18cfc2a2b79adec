"""Scored sessions of several turns, sampled by a real policy or scripted: what a trainer learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from polar.models.chat import FinishReason, Message, Role, Sampling, ToolDefinition
from polar.models.completion import REPLAYED, Completion
from polar.models.session import AgentEnd, SessionResult, SessionStatus, Verdict
from polar.recordings.recording import Recording
from polar.trajectory.base import Builder
from polar.trajectory.learnable import EndedSession, Group
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow
from tests.fakes.recordings import encoded

TOOLS = (ToolDefinition("shell"),)
RESULT = (7, 8)
MERGING = PrefixMerging(PrefixMerging.Options())


def turns(
    prompt: Sequence[int],
    answers: Sequence[Sequence[int]],
    *,
    logprob: float = -2.0,
    version: int = 0,
    name: str = "c",
    before: Sequence[Completion] = (),
) -> tuple[Completion, ...]:
    """A conversation in which every answer is followed by a result of two tokens.

    Ids of completions are the name with a number; `before` are the first of them, where they are there.
    """
    made = list(before)
    messages: tuple[Message, ...] = (Message(Role.USER, "go"),)
    context = list(prompt)
    for one in before:
        context += [*one.sampled_ids.tolist(), *RESULT]
        messages = (*messages, one.response, Message(Role.TOOL, "ok", tool_call_id="t"))
    for index, answer in enumerate(answers, len(made)):
        response = Message(Role.ASSISTANT, f"answer {index} {list(answer)}")
        made.append(
            Completion(
                id=f"{name}{index}",
                index=index,
                prompt_ids=np.array(context, np.int32),
                sampled_ids=np.array(answer, np.int32),
                logprobs=np.full(len(answer), logprob, np.float32),
                policy_versions=np.full(len(answer), version, np.int32),
                messages=messages,
                response=response,
                finish_reason=FinishReason.STOP,
                parent=made[-1].id if made else None,
                tools=TOOLS,
                used=Sampling(temperature=1.0),
            )
        )
        context += [*answer, *RESULT]
        messages = (*messages, response, Message(Role.TOOL, "ok", tool_call_id="t"))
    return tuple(made)


def replayed(completions: Sequence[Completion], origin: str = "task-0") -> tuple[Completion, ...]:
    """The completions as a branch of the session that sampled them holds them."""
    return tuple(replace(one, extra={**one.extra, REPLAYED: origin}) for one in completions)


def sample(
    completions: tuple[Completion, ...],
    reward: float | None,
    *,
    task_id: str = "task",
    number: int = 0,
    builder: Builder = MERGING,
) -> EndedSession:
    """The session with these completions; without a reward it failed."""
    tree = grow(completions)
    trajectory = builder.build(tree)
    if reward is not None:
        trajectory = trajectory.with_reward(reward)
    versions = [int(one.policy_versions.max()) for one in completions if len(one.policy_versions)]
    result = SessionResult(
        session_id=f"{task_id}-{number}",
        task_id=task_id,
        sample=number,
        attempt=1,
        status=SessionStatus.FAILED if reward is None else SessionStatus.COMPLETED,
        agent_end=AgentEnd.EXITED,
        verdict=None if reward is None else Verdict(reward=reward),
        stats=trajectory.stats,
        policy_version_min=min(versions, default=None),
        policy_version_max=max(versions, default=None),
        has_recording=True,
    )
    return EndedSession(result, Recording(tree, trajectory, result))


def group(
    answers: Sequence[Sequence[Sequence[int]]],
    rewards: Sequence[float | None],
    *,
    task_id: str = "task",
    prompt: Sequence[int] = (1, 2, 3),
    builder: Builder = MERGING,
    logprob: float = -2.0,
    version: int = 0,
) -> Group:
    """One session for each list of answers."""
    samples = tuple(
        sample(
            turns(prompt, one, logprob=logprob, version=version),
            reward,
            task_id=task_id,
            number=number,
            builder=builder,
        )
        for number, (one, reward) in enumerate(zip(answers, rewards, strict=True))
    )
    return Group(task_id, samples)


def with_completions(one: EndedSession, **changed: Any) -> EndedSession:
    """The same session with something else recorded of every completion."""
    assert one.recording is not None
    completions = tuple(replace(c, **changed) for c in one.recording.completions)
    return replace(one, recording=replace(one.recording, tree=grow(completions)))


def write_recordings(groups: Sequence[Group], directory: Path) -> Path:
    """The files that a server keeps of these sessions."""
    directory.mkdir(parents=True, exist_ok=True)
    for one in groups:
        for each in one.samples:
            assert each.recording is not None
            (directory / each.result.session_id).write_bytes(encoded(each.recording))
    return directory
