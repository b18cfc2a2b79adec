"""A session's token tree: which completion extends which, as it was proved when each was committed.

A completion adds two segments at most: what it was newly given, and what it sampled. Its link says which
segment they follow. Nothing here compares tokens: readers of a tree only choose paths through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from polar.models.completion import Completion, Routing
from polar.models.session import Fault
from polar.models.trace import DriftPolicy, Segment


class Continuation(StrEnum):
    """How a prompt holds the context of the completion that it continues."""

    CLEAN = "clean"
    """Token for token."""
    DRIFT = "drift"
    """It first differs in what the policy sampled: the same answer in other tokens, or a part of it."""
    REWRITTEN = "rewritten"
    """It first differs in what the policy was given, or ends before: the history is another one."""


@dataclass(frozen=True, slots=True)
class Link:
    """Position of a completion's tokens in the tree; completions are named by their index in the session."""

    after: int | None = None
    """The completion whose tokens the new ones follow; None: they begin a context."""
    past_answer: bool = False
    """Whether they follow its answer; else they follow its prompt."""
    given: int = 0
    """Number of new tokens at the end of the prompt."""
    continues: int | None = None
    """The completion whose conversation this one goes on with, if any."""
    kind: Continuation | None = None
    """None exactly where it continues nothing."""
    resumes: int | None = None
    """End of the answer in a drifted prompt, which contains it in other tokens; None if unknown."""

    @property
    def twin(self) -> int | None:
        """The first completion with the same prompt, if this is not it."""
        return self.after if not self.given and not self.past_answer else None


@dataclass(frozen=True, slots=True)
class Forest:
    """Segments in the order they were recorded: a segment stands after the one it follows."""

    segments: tuple[Segment, ...]
    sampled: tuple[int | None, ...]
    """Completion → the segment it sampled; None if it sampled nothing."""
    replaced: dict[int, list[int]]
    """With `realign`: the first segments of prompts with other tokens for each sampled segment."""

    @property
    def completion_of(self) -> dict[int, int]:
        """Sampled segment → the completion that sampled it."""
        return {segment: place for place, segment in enumerate(self.sampled) if segment is not None}


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """A session's completions with their links, in the order they were committed."""

    completions: tuple[Completion, ...] = ()
    """One whose context is lost is untrainable and has no prompt ids."""
    links: tuple[Link, ...] = ()
    faults: tuple[Fault, ...] = ()
    """Unsound parts of the file that the tree was read from."""

    def forest(self, drift: DriftPolicy = DriftPolicy.FORK) -> Forest:
        """The tree as segments.

        With `approximate` alone a drifted prompt is joined behind the answer as sampled, and everything
        from there on is marked as not exact.
        """
        growth = _Growth(drift)
        for completion, link in zip(self.completions, self.links, strict=True):
            twin = link.twin
            lacking = 0 if twin is None else lacking_experts(self.completions[twin], self.links[twin])
            growth.add(completion, link, lacking)
        return Forest(tuple(growth.segments), tuple(growth.sampled), growth.replaced)


def lacking_experts(completion: Completion, link: Link) -> int:
    """Number of new prompt tokens without experts: all or none."""
    return link.given if completion.routing is None else 0


def path(segments: Sequence[Segment], leaf: int) -> list[int]:
    """Indices from the root to `leaf`."""
    indices = []
    while leaf >= 0:
        indices.append(leaf)
        leaf = segments[leaf].parent
    return indices[::-1]


@dataclass(slots=True)
class _Growth:
    """The forest while completions are added to it."""

    drift: DriftPolicy
    segments: list[Segment] = field(default_factory=list)
    sampled: list[int | None] = field(default_factory=list)
    replaced: dict[int, list[int]] = field(default_factory=dict)
    given_tips: list[int] = field(default_factory=list)
    """The last segment of each completion's prompt."""
    tips: list[int] = field(default_factory=list)
    """The last segment of each completion's context."""

    def add(self, completion: Completion, link: Link, lacking: int) -> None:
        """`lacking`: as `lacking_experts`, of the first completion with the same prompt."""
        joined, start, exact = self._join(completion, link)
        given, tip = completion.prompt_ids[start:], joined
        of_given = of_sampled = None
        if completion.routing is not None:
            of_given, of_sampled = self._routed(completion, len(given), joined if exact else -1, lacking)
        if len(given):
            tip = self._append(Segment(parent=joined, ids=given, exact=exact, routing=of_given))
        if self.drift is DriftPolicy.REALIGN and link.kind is Continuation.DRIFT and link.twin is None:
            self._replace(link, joined, first=tip)
        self.given_tips.append(tip)
        count = len(completion.sampled_ids)
        aligned = len(completion.logprobs) == count == len(completion.policy_versions)
        if count:
            tip = self._append(
                Segment(
                    parent=tip,
                    ids=completion.sampled_ids,
                    logprobs=completion.logprobs if aligned else None,
                    policy_versions=completion.policy_versions if aligned else None,
                    completion_id=completion.id,
                    exact=exact,
                    routing=of_sampled,
                )
            )
        self.sampled.append(tip if count else None)
        self.tips.append(tip)

    def _routed(
        self, completion: Completion, given: int, after: int, lacking: int
    ) -> tuple[Routing, Routing]:
        """The experts of what the completion was newly given, and of what it sampled.

        It was the first to compute the token before them, if that one was sampled: it tells its experts, too.
        Those of a prompt that was asked before it tells where the first who asked did not.
        """
        told, added, before = completion.routing, given + len(completion.sampled_ids), max(lacking, 1)
        assert told is not None
        end = before - 1 + added
        told = told[max(len(told) - end, 0) :]
        rows: Routing = np.zeros((before + added, *told.shape[1:]), told.dtype)
        rows[end - len(told) : end] = told
        if after >= 0 and (lacking or self.segments[after].routing is not None):
            self._tell(after, rows[:before])
        return rows[before : before + given], rows[before + given :]

    def _tell(self, place: int, rows: Routing) -> None:
        """Note the experts of a segment's last tokens, of those whose experts are not known yet."""
        segment = self.segments[place]
        known = segment.routing
        if known is None:
            known = np.zeros((len(segment.ids), *rows.shape[1:]), rows.dtype)
        known = known.astype(np.promote_types(known.dtype, rows.dtype), copy=False)
        rows = rows[-len(known) :]
        last = known[len(known) - len(rows) :]
        is_unknown = ~last.any((1, 2))
        last[is_unknown] = rows.reshape(last.shape)[is_unknown]
        self.segments[place] = replace(segment, routing=known)

    def _append(self, segment: Segment) -> int:
        self.segments.append(segment)
        return len(self.segments) - 1

    def _join(self, completion: Completion, link: Link) -> tuple[int, int, bool]:
        """The segment to follow, how many tokens of the prompt stand before, and whether all of them do."""
        if self.drift is DriftPolicy.APPROXIMATE and link.resumes is not None and link.twin is None:
            assert link.continues is not None
            return self.tips[link.continues], link.resumes, False
        if link.after is None:
            return -1, 0, True
        tip = self.tips[link.after] if link.past_answer else self.given_tips[link.after]
        exact = tip < 0 or self.segments[tip].exact
        if not exact and link.kind is not Continuation.CLEAN and link.twin is None:
            # The path is not what the policy saw, so no part of it may be shared.
            return -1, 0, True
        return tip, len(completion.prompt_ids) - link.given, exact

    def _replace(self, link: Link, joined: int, first: int) -> None:
        """Note the sampled segments of the continued context that stand in this prompt in other tokens."""
        assert link.continues is not None
        segment = self.tips[link.continues]
        while segment > joined:
            if self.segments[segment].completion_id is not None:
                self.replaced.setdefault(segment, []).append(first)
            segment = self.segments[segment].parent
