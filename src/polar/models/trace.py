"""Trainer-ready token sequences, stored as a forest of segments so that no token is kept twice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from polar.models.completion import Ids, Logprobs, Versions
from polar.models.session import TrajectoryStats


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One token sequence as a trainer takes it.

    len(response_ids) == len(loss_mask) == len(logprobs) == len(policy_versions); where the mask
    is 0 the logprob is 0.0 and the version -1.
    """

    prompt_ids: Ids
    response_ids: Ids
    loss_mask: NDArray[np.uint8]
    logprobs: Logprobs
    policy_versions: Versions
    reward: float | None
    completion_ids: tuple[str, ...]
    """The completions whose sampled tokens are trained here, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens that were either all sampled by one completion or all given to it."""

    parent: int
    """Index of the segment these tokens follow, -1 at the start of a context."""
    ids: Ids
    logprobs: Logprobs | None = None
    """Only on sampled segments, same length as ids."""
    policy_versions: Versions | None = None
    """Only on sampled segments, same length as ids."""
    completion_id: str | None = None
    """Only on sampled segments: who sampled them."""


@dataclass(frozen=True, slots=True)
class TraceRef:
    """A trace as a path through the forest: from a root to the last of its trained segments."""

    trained: tuple[int, ...]
    """Indices of the sampled segments on the path that carry loss, in order; never empty."""
    reward: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """All traces of a session over the tokens they share."""

    segments: tuple[Segment, ...]
    traces: tuple[TraceRef, ...]
    stats: TrajectoryStats = field(default_factory=TrajectoryStats)

    def with_reward(self, reward: float) -> Trajectory:
        """The same traces, each credited with the session's reward."""
        return replace(self, traces=tuple(replace(ref, reward=reward) for ref in self.traces))
