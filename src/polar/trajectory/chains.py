"""Partitions the trainable segments of a forest into chains: paths that train each segment once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    """Every trainable segment in exactly one chain, which is a list of segments on one path.

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
