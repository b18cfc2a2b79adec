"""Grows the forest of token segments from a session's completions, each token held once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar.models.completion import Completion
from polar.models.trace import Segment


@dataclass(frozen=True, slots=True)
class Forest:
    segments: tuple[Segment, ...]
    sampled: dict[str, int]
    """Completion id → index of the segment it sampled; completions that sampled nothing are absent."""


def grow(completions: Sequence[Completion]) -> Forest:
    """One segment for what each completion was newly given and one for what it sampled.

    A completion is joined to its parent only after comparing every token: a claim that does not
    hold starts a context of its own, so that no token ever stands after tokens it was not sampled after.
    """
    segments: list[Segment] = []
    tips: dict[str, int] = {}
    contexts: dict[str, Completion] = {}
    sampled: dict[str, int] = {}
    for completion in completions:
        parent, start = -1, 0
        before = contexts.get(completion.parent or "")
        if before is not None and _extends(completion, before):
            parent, start = tips[before.id], len(before.prompt_ids) + len(before.sampled_ids)
        given = completion.prompt_ids[start:]
        if len(given):
            segments.append(Segment(parent=parent, ids=given))
            parent = len(segments) - 1
        if len(completion.sampled_ids):
            segments.append(_sampled_segment(completion, parent))
            parent = sampled[completion.id] = len(segments) - 1
        tips[completion.id] = parent
        contexts[completion.id] = completion
    return Forest(tuple(segments), sampled)


def path(segments: Sequence[Segment], leaf: int) -> list[int]:
    """Indices from the root to `leaf`."""
    indices = []
    while leaf >= 0:
        indices.append(leaf)
        leaf = segments[leaf].parent
    return indices[::-1]


def _extends(completion: Completion, before: Completion) -> bool:
    prompt, middle = len(before.prompt_ids), len(before.prompt_ids) + len(before.sampled_ids)
    ids = completion.prompt_ids
    return (
        len(ids) >= middle
        and np.array_equal(ids[:prompt], before.prompt_ids)
        and np.array_equal(ids[prompt:middle], before.sampled_ids)
    )


def _sampled_segment(completion: Completion, parent: int) -> Segment:
    count = len(completion.sampled_ids)
    aligned = len(completion.logprobs) == count == len(completion.policy_versions)
    return Segment(
        parent=parent,
        ids=completion.sampled_ids,
        logprobs=completion.logprobs if aligned else None,
        policy_versions=completion.policy_versions if aligned else None,
        completion_id=completion.id,
    )
