"""The simplest builder: one trace a completion."""

from __future__ import annotations

from collections.abc import Sequence

from polar.models.completion import Completion
from polar.models.trace import TraceRef, Trajectory
from polar.trajectory.accounting import account, path_ends
from polar.trajectory.base import Builder
from polar.trajectory.exclusion import exclusion
from polar.trajectory.forest import grow
from polar.trajectory.lineage import trace_ancestry


class PerRequest(Builder):
    """Each completion's sampled tokens are trained after exactly its own prompt."""

    def build(self, completions: Sequence[Completion]) -> Trajectory:
        forest = grow(completions)
        ancestry = trace_ancestry(completions, forest.relations)
        reasons = {
            place: reason
            for place, completion in enumerate(completions)
            if (reason := exclusion(completion)) is not None
        }
        traces = tuple(
            TraceRef((forest.sampled[completion.id],), lineage=ancestry.lineage(place))
            for place, completion in enumerate(completions)
            if place not in reasons and len(completion.sampled_ids)
        )
        ends = path_ends(forest.segments)
        stats = account(completions, forest, ancestry, traces, reasons, ends, chains=len(traces))
        return Trajectory(forest.segments, traces, stats)
