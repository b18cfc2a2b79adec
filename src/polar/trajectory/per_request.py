"""The simplest builder: one trace a completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from polar.models.completion import Completion
from polar.models.session import TrajectoryStats
from polar.models.trace import TraceRef, Trajectory
from polar.trajectory.base import Builder
from polar.trajectory.exclusion import exclusion
from polar.trajectory.forest import grow


class PerRequest(Builder):
    """Each completion's sampled tokens are trained after exactly its own prompt."""

    def build(self, completions: Sequence[Completion]) -> Trajectory:
        forest = grow(completions)
        traces: list[TraceRef] = []
        excluded: Counter[str] = Counter()
        trainable = 0
        for completion in completions:
            count = len(completion.sampled_ids)
            if not count:
                continue
            reason = exclusion(completion)
            if reason is not None:
                excluded[reason] += count
                continue
            traces.append(TraceRef(trained=(forest.sampled[completion.id],)))
            trainable += count
        stats = TrajectoryStats(
            completions=len(completions),
            traces=len(traces),
            sampled_tokens=sum(len(completion.sampled_ids) for completion in completions),
            trainable_tokens=trainable,
            excluded=dict(excluded),
        )
        return Trajectory(forest.segments, tuple(traces), stats)
