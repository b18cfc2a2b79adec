"""Where a batch forks: what layers that carry a state from token to token need to know of its tree.

A stretch is a chain of tokens between two forks. It lies side by side in a batch, and what it carries on from
is its parent's last token, wherever that lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polar.trajectory.packing.batch import PADDING, Batch, Indices


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """All stretches of a batch in the order of its tokens, without padding; arrays have one length."""

    starts: Indices
    """Position of the first token."""
    lengths: Indices
    parents: Indices
    """Index of the stretch that this one follows; -1 at a root."""
    levels: Indices
    """Number of forks on the way from the root; a parent's is one less."""


def stretches(batch: Batch) -> Stretches:
    """Cut the batch at its forks."""
    before, size = batch.predecessors, _real_tokens(batch)
    children = np.bincount(before[before >= 0], minlength=len(batch))
    follows = (before >= 0) & (before == np.arange(-1, len(batch) - 1))
    follows[follows] = children[before[follows]] == 1
    starts = np.flatnonzero(~follows[:size])
    number = np.cumsum(~follows) - 1
    parents = np.where(before[starts] < 0, -1, number[before[starts]])
    return Stretches(starts, np.diff(starts, append=size), parents, _levels(parents))


def windows(batch: Batch, width: int) -> tuple[Indices, Indices]:
    """Tokens whose last `width` tokens in their row are not the last `width` of the batch.

    Returns their positions, and [tokens, width] the positions of the tokens that they follow and their own,
    with -1 before a root.
    """
    index = np.arange(len(batch))
    steps = [index]
    for _ in range(width - 1):
        steps.append(np.where(steps[-1] < 0, -1, batch.predecessors[steps[-1]]))
    own = np.stack(steps[::-1], 1)
    beside = np.maximum(index[:, None] + np.arange(1 - width, 1), -1)
    moved = np.flatnonzero((own != beside).any(1)[: _real_tokens(batch)])
    return moved, own[moved]


def _real_tokens(batch: Batch) -> int:
    return int(np.count_nonzero(batch.segments != PADDING))


def _levels(parents: Indices) -> Indices:
    found = np.zeros(len(parents), np.int64)
    for stretch, parent in enumerate(parents.tolist()):
        if parent >= 0:
            found[stretch] = found[parent] + 1
    return found
