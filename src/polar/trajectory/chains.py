"""Partitions the trainable segments of a forest into chains, and keeps them within a trainer's lengths.

A chain is a list of segments on one path; each trainable segment is in exactly one. Chains are cut between
whole turns, and what is left of them keeps its exact context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from polar.models.trace import Segment


def realigned(
    segments: Sequence[Segment], trainable: Sequence[bool], replaced: Mapping[int, Sequence[int]]
) -> set[int]:
    """The trainable segments that only stand in a conversation that went on with other tokens for them.

    One that something else trainable still follows exactly is not among them.
    """
    found: set[int] = set()
    alive = list(trainable)
    """Whether anything that is trained stands at or below a segment."""
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


def chains(segments: Sequence[Segment], trainable: Sequence[bool]) -> list[list[int]]:
    """Every trainable segment in exactly one chain.

    Where a context was continued more than once, the part in common is trained with the continuation
    in which most was sampled (the earliest of equals); for the others it is context.
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
    """How many trainable tokens stand at or below each segment, and which child holds most of them."""
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


class Overlong(StrEnum):
    """What becomes of a trace that is too long."""

    SPLIT = "split"
    """A turn that makes the response too long begins a trace of its own, after its whole context."""
    TRUNCATE = "truncate"
    """The trace ends with the last turn that fits."""
    DROP = "drop"
    """The whole trace is left out."""


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """How long a trace may be; None: as long as it is."""

    max_tokens: int | None = None
    """Prompt and response together: what the model must hold. No split can keep a turn that ends beyond
    it, because the policy saw everything before that turn."""
    max_response_tokens: int | None = None
    """From the first trained token to the last."""
    on_overlong: Overlong = Overlong.SPLIT

    def fit(
        self, segments: Sequence[Segment], ends: Sequence[int], chain: Sequence[int]
    ) -> tuple[list[list[int]], list[int]]:
        """A chain's traces as lists of its segments, and the segments that fit into none.

        `ends` says for every segment of the forest how many tokens its path has up to its end.
        """
        pieces: list[list[int]] = []
        left_out: list[int] = []
        start = 0
        for place, index in enumerate(chain):
            begin = ends[index] - len(segments[index].ids)
            if self._exceeds(self.max_tokens, ends[index]):
                left_out += chain[place:]
                break
            if pieces and not self._exceeds(self.max_response_tokens, ends[index] - start):
                pieces[-1].append(index)
            elif pieces and self.on_overlong is not Overlong.SPLIT:
                left_out += chain[place:]
                break
            elif self._exceeds(self.max_response_tokens, len(segments[index].ids)):
                left_out.append(index)
            else:
                pieces.append([index])
                start = begin
        if left_out and self.on_overlong is Overlong.DROP:
            return [], list(chain)
        return pieces, left_out

    @staticmethod
    def _exceeds(limit: int | None, length: int) -> bool:
        return limit is not None and length > limit
