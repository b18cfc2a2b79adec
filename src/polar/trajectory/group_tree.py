"""The tree that a group's sessions make: where they part, what each stretch of it is worth and how it weighs.

A branch holds the completions that it was given again under the ids of the session that sampled them. So the
sessions that hold a completion are those that went on from it, in whatever order their calls ended and
however early a branch left its recording. docs/training.md has the formulas and their reasons.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from polar.models.completion import REPLAYED, Completion
from polar.recordings.tree import Continuation, TokenTree
from polar.trajectory.learnable import Advantage, EndedSession, differ

Holders = frozenset[int]
"""Sessions, by their places in the group."""


@dataclass(frozen=True, slots=True)
class TreeStretch:
    """The completions that the same sessions hold: from where these part from others to where they part."""

    holders: Holders
    parent: int | None
    children: tuple[int, ...]
    share: float
    """What part of its sample it is: a place where n sessions part leaves each of them an nth."""


class GroupTree:
    """The stretches of a group, parents before children; the first is the root, where all sessions begin."""

    def __init__(self, held: Sequence[Collection[str] | None]) -> None:
        """`held`: of each session the completions that it may share; None: where it stands is not known."""
        by_id: dict[str, set[int]] = defaultdict(set)
        for place, ids in enumerate(held):
            for id in ids or ():
                by_id[id].add(place)
        self._holders = {id: frozenset(places) for id, places in by_id.items()}
        placed = frozenset(place for place, ids in enumerate(held) if ids is not None)
        self.is_one_sample = len(placed) > 1 and placed in self._holders.values()
        """Whether all sessions have completions in common."""
        self.stretches = _stretches(_nested(placed, self._holders), self.is_one_sample)
        alone = ((one.holders, at) for at, one in enumerate(self.stretches) if len(one.holders) == 1)
        self._leaves = {place: at for (place,), at in alone}

    @property
    def samples(self) -> int:
        """How many sessions sampled from the very beginning; those that branch off are parts of these."""
        return 1 if self.is_one_sample else max(1, len(self.stretches[0].children))

    def sample_of(self, session: int) -> int:
        """The first session of the sample that a session is, or is a branch of."""
        return min(self.stretches[self._top(self._leaves[session])].holders)

    def stretch_of(self, session: int, completion_id: str) -> int:
        """The stretch in which a session sampled a completion."""
        holders = self._holders.get(completion_id, frozenset((session,)))
        at = self._leaves[session]
        while (up := self.stretches[at].parent) is not None and self.stretches[up].holders <= holders:
            at = up
        return at

    def values(self, rewards: Sequence[float]) -> list[float]:
        """What each stretch is worth: the mean over what it parts into, each counted once."""
        found = [0.0] * len(self.stretches)
        for session, at in self._leaves.items():
            found[at] = rewards[session]
        for at in reversed(range(len(found))):
            if children := self.stretches[at].children:
                found[at] = fmean(found[child] for child in children)
        return found

    def advantages(
        self, rewards: Sequence[float], kind: Advantage, min_std: float | None = None
    ) -> list[float] | None:
        """Each stretch's advantage for the rewards of the group's sessions; None where no reward differs.

        With `min_std` it is divided by the standard deviation of the rewards, as far as that is larger.
        """
        if not differ([rewards[session] for session in self._leaves]):
            return None
        values = self.values(rewards)
        scale = 1.0 if min_std is None else max(self._std(rewards, values[0]), min_std)
        return [self._gain(at, values) * self._factor(at, kind) / scale for at in range(len(values))]

    def _gain(self, at: int, values: Sequence[float]) -> float:
        parent = self.stretches[at].parent
        return 0.0 if parent is None else values[at] - values[parent]

    def _factor(self, at: int, kind: Advantage) -> float:
        """What makes a mean that includes the stretch itself the mean of the others, at the root's scale."""
        parent = self.stretches[at].parent
        if kind is not Advantage.TREE or parent is None:
            return 1.0
        here, first = len(self.stretches[parent].children), len(self.stretches[0].children)
        return here * (first - 1) / ((here - 1) * first)

    def _std(self, rewards: Sequence[float], mean: float) -> float:
        """The standard deviation of the rewards, each weighted as it is in the root's value."""
        squares = (
            self.stretches[at].share * (rewards[session] - mean) ** 2 for session, at in self._leaves.items()
        )
        return math.sqrt(math.fsum(squares) / self.samples)

    def _top(self, at: int) -> int:
        """The first stretch of the sample that a stretch belongs to."""
        while (up := self.stretches[at].parent) is not None and (up or self.is_one_sample):
            at = up
        return at


def _stretches(nested: Sequence[Holders], is_one_sample: bool) -> list[TreeStretch]:
    parents = [_parent(nested, at) for at in range(len(nested))]
    children = [tuple(at for at, parent in enumerate(parents) if parent == up) for up in range(len(nested))]
    found: list[TreeStretch] = []
    for holders, up, below in zip(nested, parents, children, strict=True):
        # Samples are whole: only what branches leave is parted.
        is_part = up is not None and (up > 0 or is_one_sample)
        share = found[up].share / len(children[up]) if up is not None and is_part else 1.0
        found.append(TreeStretch(holders, up, below, share))
    return found


def _parent(nested: Sequence[Holders], at: int) -> int | None:
    """The smallest that holds all of it, which is the last one."""
    return next((up for up in reversed(range(at)) if nested[at] < nested[up]), None)


def _nested(placed: Holders, by_id: Mapping[str, Holders]) -> list[Holders]:
    """All sessions, those that go on together, and each alone: no two overlap in part, larger ones first.

    Two branches that left a recording at different calls may each hold one that the other lacks. Of what
    overlaps then, that counts which most sessions hold, and of equals that with most completions.
    """
    ids: dict[Holders, list[str]] = defaultdict(list)
    for id, holders in by_id.items():
        ids[holders].append(id)
    alone = {frozenset((place,)) for place in placed}
    together = sorted(ids.keys() - alone, key=lambda one: (-len(one), -len(ids[one]), min(ids[one])))
    taken = [placed]
    for one in together:
        if one != placed and all(one <= other or one.isdisjoint(other) for other in taken):
            taken.append(one)
    return taken if len(placed) < 2 else [*taken, *sorted(alone, key=min)]


def group_tree(sessions: Sequence[EndedSession]) -> GroupTree:
    """The tree of these sessions of a group.

    A completion is shared where a session says that it was given it again, unless what it sampled itself goes
    on from it after other tokens. A branch without its recording has
    no place: nobody knows where it parted. Any other session without one is a sample of its own.
    """
    recorded = [TokenTree() if one.recording is None else one.recording.tree for one in sessions]
    replayed = {it.id for tree in recorded for it in tree.completions if REPLAYED in it.extra}
    return GroupTree(
        [
            None
            if one.recording is None and one.is_branch
            # The answer to another request has an id, but no context, in common with others.
            else {it.id for it in _went_on_from(tree) if it.id in replayed and it.untrainable is None}
            for one, tree in zip(sessions, recorded, strict=True)
        ]
    )


def _went_on_from(tree: TokenTree) -> list[Completion]:
    """The session's completions without those that it was given again, and whose conversation it went on with
    after other tokens."""
    places = {it.id: place for place, it in enumerate(tree.completions)}
    follows = [places.get(it.follows or "") for it in tree.completions]
    followed, stands_after = set[int](), set[int]()
    for place, link in enumerate(tree.links):
        if REPLAYED not in tree.completions[place].extra:
            context = link.continues
            if link.kind is Continuation.REWRITTEN:
                context = link.after if link.past_answer or link.after is None else follows[link.after]
            for found, at in ((followed, follows[place]), (stands_after, context)):
                while at is not None and at not in found:
                    found.add(at)
                    at = follows[at]
    apart = {place for place in followed - stands_after if REPLAYED in tree.completions[place].extra}
    return [it for place, it in enumerate(tree.completions) if place not in apart]
