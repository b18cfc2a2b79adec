"""The simplest builder: one trace for each completion."""

from __future__ import annotations

from polar.models.trace import TraceRef, Trajectory
from polar.recordings.tree import TokenTree
from polar.trajectory.accounting import account, exclusion
from polar.trajectory.base import Builder
from polar.trajectory.lineage import trace_ancestry


class PerRequest(Builder):
    """Each completion's sampled tokens are trained after exactly its own prompt."""

    def build(self, tree: TokenTree) -> Trajectory:
        forest = tree.forest()
        ancestry = trace_ancestry(tree)
        reasons = {
            place: reason
            for place, completion in enumerate(tree.completions)
            if (reason := exclusion(completion)) is not None
        }
        traces = tuple(
            TraceRef((segment,), lineage=ancestry.lineage(place))
            for place, segment in enumerate(forest.sampled)
            if place not in reasons and segment is not None
        )
        stats = account(tree, forest.segments, ancestry, traces, reasons, chains=len(traces))
        return Trajectory(forest.segments, traces, stats)
