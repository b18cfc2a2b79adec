"""Deals a step's batches to ranks, so that all compute equally long and equally often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polar.training.ranks import Ranks
from polar.trajectory.packing.batch import Batch, Floats, Terms

_ZERO, _ONE = np.zeros(1, np.int32), np.ones(1, np.int32)
_NO_INDICES, _NO_FLOATS = np.empty(0, np.int64), np.empty(0, np.float32)
_NO_TERMS = Terms(_NO_INDICES, _NO_INDICES, _NO_FLOATS, _NO_FLOATS, _NO_FLOATS, _ZERO[:0])
EMPTY = Batch(_ZERO, _ZERO, _ZERO, predecessors=-_ONE, ends=_ONE, terms=_NO_TERMS, names=())
"""One token that nothing is learnt from, for a rank that has no batch for a pass which the others make."""


class Dealt(NamedTuple):
    """A batch, and what rank 0 alone knows of its terms."""

    batch: Batch
    ages: NDArray[np.integer]
    """Updates between the policy that sampled a token and the trainer's."""
    scores: Floats | None = None
    """Logprobs under the teacher, if there is one."""


NOTHING = Dealt(EMPTY, _NO_INDICES)


@dataclass(frozen=True, slots=True)
class Deal:
    """What one rank has of each minibatch; of each, all ranks have the same number of batches."""

    minibatches: list[list[Dealt]]
    numbers: dict[str, float] = field(default_factory=dict)
    """How many passes are empty, and how well the others are balanced; nothing for one rank."""


def deal(minibatches: list[list[Dealt]], ranks: Ranks, pairs_per_token: float) -> Deal:
    """Return this rank's share of rank 0's batches.

    Ranks make their passes in lockstep, as they bring the weights together for each: a pass takes as long as
    its most costly batch. So one pass is made of batches that cost about the same.
    """
    if ranks.size == 1:
        return Deal(minibatches)
    found: Deal = ranks.scatter(_deals(minibatches, ranks.size, pairs_per_token) if ranks.leads else None)
    return found


def _deals(minibatches: Sequence[Sequence[Dealt]], size: int, pairs_per_token: float) -> list[Deal]:
    def cost_of(one: Dealt) -> float:
        return cost(one.batch, pairs_per_token)

    passes = [_passes(sorted(one, key=cost_of, reverse=True), size) for one in minibatches]
    costs = [[cost_of(one) for one in made] for part in passes for made in part]
    numbers = {
        "ranks": float(size),
        "empty_passes": float(sum(size - len(made) for made in costs)),
        "balance": sum(map(sum, costs)) / max(1.0, size * sum(map(max, costs))),
    }
    shares = (
        [[made[rank] if rank < len(made) else NOTHING for made in part] for part in passes]
        for rank in range(size)
    )
    return [Deal(share, numbers) for share in shares]


def _passes(ordered: Sequence[Dealt], size: int) -> list[Sequence[Dealt]]:
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def cost(batch: Batch, pairs_per_token: float) -> float:
    """What a batch costs, in tokens: those it has, and its pairs of tokens that attend to each other."""
    return len(batch) + float(batch.positions.sum(dtype=np.float64) + len(batch)) / pairs_per_token
