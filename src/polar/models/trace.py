"""Trainer-ready token sequences, stored as a forest of segments so that no token is kept twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from polar.models.completion import Ids, Logprobs, Routing, Versions
from polar.models.session import TrajectoryStats


class Lineage(StrEnum):
    """Role of a trace in the session."""

    MAIN = "main"
    """The conversation that follows the task's instruction."""
    SUBAGENT = "subagent"
    """A conversation started by another."""
    COMPACTED = "compacted"
    """A context that replaced an earlier one: its history was summarised or rewritten."""
    SUMMARY = "summary"
    """A summary with which a later context begins."""
    AUXILIARY = "auxiliary"
    """A side call of the harness; only trained when asked for."""


class DriftPolicy(StrEnum):
    """How to treat a sampled answer that the next prompt contains in other tokens."""

    FORK = "fork"
    """Both sides are trained, each after exactly what the policy saw."""
    REALIGN = "realign"
    """One trace with the next prompt's tokens; the answer stands in it untrained and is counted."""
    APPROXIMATE = "approximate"
    """One trace with the sampled tokens; later ones follow other tokens than the policy saw."""


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
    lineage: Lineage = Lineage.MAIN
    parent: int | None = None
    """Index of the trace it came from; None for the session's first."""
    approximate_from: int | None = None
    """Position in the response from which tokens follow others than the policy saw."""
    share: float = 1.0
    """Share of the session's reward."""
    routing: Routing | None = None
    """Experts of every token of prompt and response; None if all are unknown."""

    @property
    def unrouted_tokens(self) -> int:
        """Number of tokens without routing; the last needs none."""
        if self.routing is None:
            return max(len(self.prompt_ids) + len(self.response_ids) - 1, 0)
        return int(np.count_nonzero(~self.routing[:-1].any((1, 2))))


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens that were either all sampled by one completion or all given to it."""

    parent: int
    """Index of the segment these tokens follow, -1 at the start of a context; always less than their own."""
    ids: Ids
    logprobs: Logprobs | None = None
    """Only on sampled segments, same length as ids."""
    policy_versions: Versions | None = None
    """Only on sampled segments, same length as ids."""
    completion_id: str | None = None
    """Only on sampled segments: the completion that sampled them."""
    exact: bool = True
    """Whether the policy saw exactly this path; False only with `approximate`."""
    routing: Routing | None = None
    """Same length as ids; None if unknown."""


@dataclass(frozen=True, slots=True)
class TraceRef:
    """A trace as a path through the forest: from a root to the last of its trained segments."""

    trained: tuple[int, ...]
    """Indices of the sampled segments on the path that carry loss, in order; never empty."""
    reward: float | None = None
    share: float = 1.0
    """Share of the session's reward."""
    lineage: Lineage = Lineage.MAIN
    parent: int | None = None
    """Index of the trace it came from; None for the session's first."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """All traces of a session over the tokens they share."""

    segments: tuple[Segment, ...]
    traces: tuple[TraceRef, ...]
    stats: TrajectoryStats = field(default_factory=TrajectoryStats)
    drift: DriftPolicy = DriftPolicy.FORK
    """The drift policy of the segments."""

    def with_reward(self, reward: float, trace_rewards: Mapping[str, float] | None = None) -> Trajectory:
        """The same traces, each credited with its share of the session's reward or with one of its own.

        `trace_rewards` names completions; of several that one trace trains, the last decides.
        """
        own = self.own_rewards(trace_rewards or {})
        traces = (
            replace(ref, reward=reward * ref.share if named is None else named)
            for ref, named in zip(self.traces, own, strict=True)
        )
        return replace(self, traces=tuple(traces))

    def own_rewards(self, trace_rewards: Mapping[str, float]) -> list[float | None]:
        """The own reward of each trace; None if it has a share of the session's."""
        return [self._named(ref, trace_rewards) for ref in self.traces]

    def _named(self, ref: TraceRef, trace_rewards: Mapping[str, float]) -> float | None:
        names = (self.segments[index].completion_id or "" for index in reversed(ref.trained))
        return next((trace_rewards[name] for name in names if name in trace_rewards), None)
