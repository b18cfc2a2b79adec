"""Grows the forest of token segments from a session's completions, each token held once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar.models.chat import FinishReason
from polar.models.completion import Completion, Ids
from polar.models.session import Fault
from polar.models.trace import DriftPolicy, Segment
from polar.trajectory.relation import (
    GENERATION_PROMPT,
    Continuation,
    Relation,
    Relations,
    context_length,
)


@dataclass(frozen=True, slots=True)
class Forest:
    """Segments in the order they were recorded: a segment stands after the one it follows."""

    segments: tuple[Segment, ...]
    sampled: dict[str, int]
    """Completion id → index of the segment it sampled; completions that sampled nothing are absent."""
    relations: tuple[Relation, ...]
    """How each completion stands to those before it."""
    replaced: dict[int, list[int]]
    """With `realign`: sampled segment → first segments of the prompts that hold it in other tokens."""
    faults: tuple[Fault, ...]


def grow(completions: Sequence[Completion], drift: DriftPolicy = DriftPolicy.FORK) -> Forest:
    """One segment for what each completion was newly given and one for what it sampled.

    A completion is joined to another only where every token before the join is the same: a claim that
    does not hold starts a context of its own, so that no token ever stands after tokens it was not
    sampled after. With `approximate` alone a drifted prompt is joined behind the answer as sampled, and
    everything from there on is marked as not exact.
    """
    relations = Relations(completions)
    growth = _Growth(completions, relations.found, drift)
    for place in range(len(completions)):
        growth.add(place)
    return Forest(
        tuple(growth.segments),
        growth.sampled,
        tuple(relations.found),
        growth.replaced,
        tuple(relations.faults),
    )


def path(segments: Sequence[Segment], leaf: int) -> list[int]:
    """Indices from the root to `leaf`."""
    indices = []
    while leaf >= 0:
        indices.append(leaf)
        leaf = segments[leaf].parent
    return indices[::-1]


@dataclass(frozen=True, slots=True)
class _Join:
    """Where a completion's prompt leaves what is known of it."""

    segment: int
    """The last segment shared, -1 if none is."""
    start: int
    """How many tokens of the prompt are already held."""
    exact: bool


class _Growth:
    """The forest while completions are added to it."""

    def __init__(
        self, completions: Sequence[Completion], relations: Sequence[Relation], drift: DriftPolicy
    ) -> None:
        self.segments: list[Segment] = []
        self.sampled: dict[str, int] = {}
        self.replaced: dict[int, list[int]] = {}
        self._completions = completions
        self._relations = relations
        self._drift = drift
        self._given_tips: list[int] = []
        """The last segment of each completion's prompt."""
        self._tips: list[int] = []
        """The last segment of each completion's context."""

    def add(self, place: int) -> None:
        completion, relation = self._completions[place], self._relations[place]
        if relation.twin is not None:
            tip = self._given_tips[relation.twin]
            exact = tip < 0 or self.segments[tip].exact
        else:
            join = self._join(completion, relation)
            tip, exact = join.segment, join.exact
            given = completion.prompt_ids[join.start :]
            if len(given):
                self.segments.append(Segment(parent=tip, ids=given, exact=exact))
                tip = len(self.segments) - 1
            if self._drift is DriftPolicy.REALIGN and relation.kind is Continuation.DRIFT:
                self._replace(relation, join.segment, first=tip)
        self._given_tips.append(tip)
        if len(completion.sampled_ids):
            self.segments.append(_sampled_segment(completion, tip, exact))
            tip = self.sampled[completion.id] = len(self.segments) - 1
        self._tips.append(tip)

    def _join(self, completion: Completion, relation: Relation) -> _Join:
        if relation.base is None:
            return _Join(-1, 0, True)
        before, tip = self._completions[relation.base], self._tips[relation.base]
        exact = self.segments[tip].exact
        if relation.kind is Continuation.CLEAN:
            return _Join(tip, relation.shared, exact)
        if self._drift is DriftPolicy.APPROXIMATE and relation.kind is Continuation.DRIFT:
            end = _end_of_answer(completion.prompt_ids, relation.shared, before)
            if end is not None:
                return _Join(tip, end, False)
        if not exact:
            # The path of the base is not what the policy saw, so no part of it may be shared.
            return _Join(-1, 0, True)
        segment, end = tip, context_length(before)
        while end > relation.shared:
            end -= len(self.segments[segment].ids)
            segment = self.segments[segment].parent
        return _Join(segment, end, True)

    def _replace(self, relation: Relation, joined: int, first: int) -> None:
        """Note the sampled segments of the base's context that stand in this prompt in other tokens."""
        assert relation.base is not None
        segment = self._tips[relation.base]
        while segment > joined:
            if self.segments[segment].completion_id is not None:
                self.replaced.setdefault(segment, []).append(first)
            segment = self.segments[segment].parent


def _end_of_answer(prompt: Ids, shared: int, before: Completion) -> int | None:
    """Where in the prompt the re-tokenised answer ends, or None if that cannot be told.

    An answer that ended by itself ends with the token that ends a turn, which it holds only once; its
    other tokenisation is taken to be at most twice as long.
    """
    start, answer = len(before.prompt_ids), before.sampled_ids
    ended = before.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
    if shared < start - GENERATION_PROMPT or not ended or np.count_nonzero(answer == answer[-1:]) != 1:
        return None
    window = prompt[shared : start + 2 * len(answer) + GENERATION_PROMPT]
    ends = np.flatnonzero(window == answer[-1])
    return shared + int(ends[0]) + 1 if len(ends) else None


def _sampled_segment(completion: Completion, parent: int, exact: bool) -> Segment:
    count = len(completion.sampled_ids)
    aligned = len(completion.logprobs) == count == len(completion.policy_versions)
    return Segment(
        parent=parent,
        ids=completion.sampled_ids,
        logprobs=completion.logprobs if aligned else None,
        policy_versions=completion.policy_versions if aligned else None,
        completion_id=completion.id,
        exact=exact,
    )
