"""The default builder: completions that extend each other's tokens become one trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import cast

from pydantic import Field

from polar.models.completion import SUPERSEDED
from polar.models.component import Frozen
from polar.models.trace import DriftPolicy, Lineage, Segment, TraceRef, Trajectory
from polar.recordings.tree import Link, TokenTree
from polar.trajectory.accounting import Exclusion, account, exclusion, path_ends
from polar.trajectory.base import Builder
from polar.trajectory.lineage import AGENT, Ancestry, trace_ancestry


class Credit(StrEnum):
    """The traces that get the session's reward."""

    OUTCOME = "outcome"
    """Every trace gets the whole reward."""
    DIVIDED = "divided"
    """Every trace gets an equal share, so that sessions count alike however many traces they have."""
    MAIN = "main"
    """Only the main line is rewarded: the main conversation, its summaries and successors."""


class Overlong(StrEnum):
    """How to treat a trace that is too long."""

    SPLIT = "split"
    """A turn that exceeds the limit begins another trace, after its whole context."""
    TRUNCATE = "truncate"
    """The trace ends with the last turn that fits."""
    DROP = "drop"
    """The whole trace is left out."""


_MAIN_LINE = (Lineage.MAIN, Lineage.COMPACTED, Lineage.SUMMARY)


class PrefixMerging(Builder):
    """Each chain of completions is one trace: what was sampled is trained, what came between is context.

    The forest says what stands after what; side calls, retries and unsound completions are put aside by
    name; what is left is partitioned into chains, lists of segments on one path; chains are cut to length
    between whole turns, so that what is left keeps its exact context, and become traces.
    """

    class Options(Frozen):
        drift: DriftPolicy = DriftPolicy.FORK
        credit: Credit = Credit.OUTCOME
        include_auxiliary: bool = False
        """Train side calls too."""
        max_tokens: int | None = Field(default=None, ge=1)
        """Maximum length of a trace. A turn that ends beyond it cannot be split off, as the policy saw
        everything before it."""
        max_response_tokens: int | None = Field(default=None, ge=1)
        """Maximum length from the first trained token."""
        on_overlong: Overlong = Overlong.SPLIT

    def build(self, tree: TokenTree) -> Trajectory:
        options = cast(PrefixMerging.Options, self.options)
        forest = tree.forest(options.drift)
        ancestry = trace_ancestry(tree)
        reasons = dict(_reasons(tree, ancestry, options))
        place_of = forest.completion_of
        trainable = [
            index in place_of and place_of[index] not in reasons for index in range(len(forest.segments))
        ]
        for index in _realigned(forest.segments, trainable, forest.replaced):
            reasons[place_of[index]] = Exclusion.REALIGNED
            trainable[index] = False
        ends = path_ends(forest.segments)
        found = _chains(forest.segments, trainable)
        kept: list[list[int]] = []
        for chain in found:
            pieces, left_out = _fit(options, forest.segments, ends, chain)
            kept += pieces
            reasons.update((place_of[index], Exclusion.OVER_LENGTH) for index in left_out)
        share = 1 / len(kept) if kept and options.credit is Credit.DIVIDED else 1.0
        traces = _traces(kept, place_of, tree.links, ancestry, share)
        stats = account(tree, forest.segments, ancestry, traces, reasons, len(found))
        return Trajectory(forest.segments, traces, stats, options.drift)


def _reasons(
    tree: TokenTree, ancestry: Ancestry, options: PrefixMerging.Options
) -> Iterator[tuple[int, Exclusion]]:
    """The completions excluded for what they are, whatever surrounds them."""
    superseded = _superseded(tree)
    for place, completion in enumerate(tree.completions):
        reason = exclusion(completion)
        if reason is None and ancestry.rules[place] is not None and not options.include_auxiliary:
            reason = Exclusion.AUXILIARY
        if reason is None and place in superseded:
            reason = Exclusion.RETRY_SUPERSEDED
        if reason is None and options.credit is Credit.MAIN and ancestry.lineage(place) not in _MAIN_LINE:
            reason = Exclusion.UNCREDITED
        if reason is not None:
            yield place, reason


def _superseded(tree: TokenTree) -> set[int]:
    """Answers that were not continued although another answer to the same agent's same prompt was.

    If none was continued, nothing shows which one the harness used: they are alternatives, and all stay.
    """
    both = zip(tree.completions, tree.links, strict=True)
    continued = {link.continues for completion, link in both if SUPERSEDED not in completion.extra}
    answers: dict[tuple[int, str | None], list[int]] = {}
    for place, (completion, link) in enumerate(zip(tree.completions, tree.links, strict=True)):
        first = place if link.twin is None else link.twin
        answers.setdefault((first, completion.extra.get(AGENT)), []).append(place)
    return {
        place
        for places in answers.values()
        if not continued.isdisjoint(places)
        for place in places
        if place not in continued
    }


def _realigned(
    segments: Sequence[Segment], trainable: Sequence[bool], replaced: Mapping[int, Sequence[int]]
) -> set[int]:
    """Trainable segments whose conversation continued with other tokens for them only.

    Segments that any other trainable one still follows exactly are not included.
    """
    found: set[int] = set()
    alive = list(trainable)
    """Whether the segment, or any below it, is trained."""
    followed = [False] * len(segments)
    for index in range(len(segments) - 1, -1, -1):
        is_stub = alive[index] and not followed[index]
        if is_stub and any(alive[copy] or followed[copy] for copy in replaced.get(index, ())):
            found.add(index)
            alive[index] = False
        parent = segments[index].parent
        if parent >= 0 and (alive[index] or followed[index]):
            followed[parent] = True
    return found


def _chains(segments: Sequence[Segment], trainable: Sequence[bool]) -> list[list[int]]:
    """Partition the trainable segments into chains.

    The shared part of several continuations is trained with the one with most sampled tokens (the earliest of
    equals); for the others it is context.
    """
    weights, heirs = _heaviest(segments, trainable)
    found: list[list[int]] = []
    chain_of = [-1] * len(segments)
    for index, segment in enumerate(segments):
        if not weights[index]:
            continue
        parent = segment.parent
        if parent >= 0 and heirs[parent] == index:
            chain_of[index] = chain_of[parent]
        else:
            chain_of[index] = len(found)
            found.append([])
        if trainable[index]:
            found[chain_of[index]].append(index)
    return found


def _heaviest(segments: Sequence[Segment], trainable: Sequence[bool]) -> tuple[list[int], list[int]]:
    """The number of trainable tokens at or below each segment, and the child with most of them."""
    weights = [
        len(segment.ids) if is_trained else 0 for segment, is_trained in zip(segments, trainable, strict=True)
    ]
    heirs = [-1] * len(segments)
    for index in range(len(segments) - 1, -1, -1):
        parent = segments[index].parent
        if parent < 0 or not weights[index]:
            continue
        heir = heirs[parent]
        if heir < 0 or weights[index] >= weights[heir]:
            heirs[parent] = index
        weights[parent] += weights[index]
    return weights, heirs


def _fit(
    options: PrefixMerging.Options, segments: Sequence[Segment], ends: Sequence[int], chain: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Split a chain into traces, as lists of segments, and those that fit into none.

    `ends` has the length of the path to the end of every segment of the forest.
    """
    longest = math.inf if options.max_tokens is None else options.max_tokens
    longest_response = math.inf if options.max_response_tokens is None else options.max_response_tokens
    pieces: list[list[int]] = []
    left_out: list[int] = []
    start = 0
    for place, index in enumerate(chain):
        if ends[index] > longest:
            left_out += chain[place:]
            break
        if pieces and ends[index] - start <= longest_response:
            pieces[-1].append(index)
        elif pieces and options.on_overlong is not Overlong.SPLIT:
            left_out += chain[place:]
            break
        elif len(segments[index].ids) > longest_response:
            left_out.append(index)
        else:
            pieces.append([index])
            start = ends[index] - len(segments[index].ids)
    if left_out and options.on_overlong is Overlong.DROP:
        return [], list(chain)
    return pieces, left_out


def _traces(
    kept: Sequence[Sequence[int]],
    place_of: Mapping[int, int],
    links: Sequence[Link],
    ancestry: Ancestry,
    share: float,
) -> tuple[TraceRef, ...]:
    """Build traces of these segments, with lineage and parent."""
    trace_of = {place_of[index]: trace for trace, piece in enumerate(kept) for index in piece}
    traces = []
    for piece in kept:
        first = place_of[piece[0]]
        traces.append(
            TraceRef(
                tuple(piece),
                share=share,
                lineage=ancestry.lineage(first),
                parent=_parent(first, trace_of, links, ancestry),
            )
        )
    return tuple(traces)


def _parent(first: int, trace_of: Mapping[int, int], links: Sequence[Link], ancestry: Ancestry) -> int | None:
    """The trace of the nearest earlier completion that this one continues or comes from."""
    before = links[first].continues
    while before is not None:
        if before in trace_of:
            return trace_of[before]
        before = links[before].continues
    origin = ancestry.conversations[ancestry.of[first]].parent
    if origin is None:
        return None
    members = ancestry.conversations[origin].members
    earlier = (place for place in reversed(members) if place < first and place in trace_of)
    return next((trace_of[place] for place in earlier), None)
