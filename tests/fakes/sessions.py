"""Random but self-consistent sessions: completions whose tokens are known, for trajectory tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from polar.models.chat import FinishReason, Message, Role
from polar.models.completion import Completion


def completion(
    index: int,
    prompt: list[int],
    sampled: list[int],
    *,
    parent: str | None = None,
    follows: str | None = None,
    finish_reason: FinishReason = FinishReason.STOP,
    untrainable: str | None = None,
    logprobs: list[float] | None = None,
) -> Completion:
    """A completion whose logprobs are a function of its sampled ids, so that misalignment shows."""
    values = [-(token % 97) / 100 for token in sampled] if logprobs is None else logprobs
    return Completion(
        id=f"c{index}",
        index=index,
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.array(values, np.float32),
        policy_versions=np.full(len(sampled), index, np.int32),
        messages=(Message(Role.USER, f"turn {index}"),),
        response=Message(Role.ASSISTANT, "answer"),
        finish_reason=finish_reason,
        parent=parent,
        follows=follows,
        untrainable=untrainable,
    )


tokens = st.lists(st.integers(0, 49_151), max_size=12)


@st.composite
def sessions(draw: st.DrawFn) -> list[Completion]:
    """Completions that extend, fork from, or ignore each other; some claim a parent they do not extend."""
    completions: list[Completion] = []
    for index in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from([None, *completions])) if completions else None
        context: list[int] = []
        if parent is not None and draw(st.integers(0, 9)) > 0:
            context = [*parent.prompt_ids.tolist(), *parent.sampled_ids.tolist()]
        sampled = draw(tokens)
        logprobs = None
        if draw(st.integers(0, 9)) == 0:
            logprobs = draw(st.sampled_from([[], [float("nan")] * len(sampled), [0.5] * len(sampled)]))
        completions.append(
            completion(
                index,
                [*context, *draw(tokens)],
                sampled,
                parent=parent.id if parent else None,
                finish_reason=draw(st.sampled_from(FinishReason)),
                untrainable=draw(st.sampled_from([None, None, None, "no logprobs"])),
                logprobs=logprobs,
            )
        )
    return completions
