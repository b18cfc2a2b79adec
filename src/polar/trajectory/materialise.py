"""Converts a path through the forest to a trace's arrays."""

from __future__ import annotations

import numpy as np

from polar.models.completion import concatenate_routing
from polar.models.trace import Segment, Trace, TraceRef, Trajectory
from polar.recordings.tree import path


def materialise(trajectory: Trajectory, ref: TraceRef) -> Trace:
    """The tokens of a trace, whose prompt ends where its first trained segment begins."""
    indices = path(trajectory.segments, ref.trained[-1])
    segments = [trajectory.segments[index] for index in indices]
    split = indices.index(ref.trained[0])
    prompt = [segment.ids for segment in segments[:split]]
    trained = set(ref.trained)
    response = [(trajectory.segments[index], index in trained) for index in indices[split:]]
    return Trace(
        prompt_ids=np.concatenate(prompt) if prompt else np.empty(0, np.int32),
        response_ids=np.concatenate([segment.ids for segment, _ in response]),
        loss_mask=np.concatenate([np.full(len(s.ids), is_trained, np.uint8) for s, is_trained in response]),
        logprobs=np.concatenate([_logprobs(s, is_trained) for s, is_trained in response]),
        policy_versions=np.concatenate([_versions(s, is_trained) for s, is_trained in response]),
        reward=ref.reward,
        completion_ids=tuple(s.completion_id for s, is_trained in response if is_trained and s.completion_id),
        lineage=ref.lineage,
        parent=ref.parent,
        approximate_from=_approximate_from([segment for segment, _ in response]),
        share=ref.share,
        routing=concatenate_routing([(len(segment.ids), segment.routing) for segment in segments]),
    )


def _approximate_from(response: list[Segment]) -> int | None:
    start = 0
    for segment in response:
        if not segment.exact:
            return start
        start += len(segment.ids)
    return None


def _logprobs(segment: Segment, is_trained: bool) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    if is_trained and segment.logprobs is not None:
        return segment.logprobs
    return np.zeros(len(segment.ids), np.float32)


def _versions(segment: Segment, is_trained: bool) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    if is_trained and segment.policy_versions is not None:
        return segment.policy_versions
    return np.full(len(segment.ids), -1, np.int32)
