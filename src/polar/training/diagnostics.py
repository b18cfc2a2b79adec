"""Sums for metrics over some tokens of a batch: by how old they are, and by where they stand.

Each is a pair, of a sum and of the number of terms in it, so pairs of batches add up to those of the step.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from polar.training.head import to_device
from polar.trajectory.packing.batch import Batch

LOWER_TAILS, UPPER_TAILS = (0.5, 0.8), (1.25, 2.0)
"""Ratios of trainer to recorded policy beyond which tokens are counted."""
OLDEST = 3
"""Age in policy updates from which tokens are counted together."""
POSITIONS = (0, 1024, 4096, 16_384)
"""Where ranges of positions in a trace begin."""


def by_age(log_ratio: Tensor, ages: Tensor | None) -> dict[str, Tensor]:
    """The tails of the importance ratio's distribution, by age in policy updates."""
    if ages is None:
        return {}
    ratio = log_ratio.exp()
    tails = {f"under-{end:g}": ratio < end for end in LOWER_TAILS}
    tails |= {f"over-{end:g}": ratio > end for end in UPPER_TAILS}
    of_age = {f"importance/age-{age}": ages.clamp(0, OLDEST) == age for age in range(OLDEST + 1)}
    return {
        f"{name}/{tail}": pair(is_there, is_of_age)
        for name, is_of_age in of_age.items()
        for tail, is_there in tails.items()
    }


def by_position(log_ratio: Tensor, batch: Batch) -> dict[str, Tensor]:
    """How far the logprobs of trainer and engine are apart, by position in the trace."""
    positions = to_device(batch.positions[batch.terms.targets], log_ratio.device)
    # The last range has no end.
    return {
        f"mismatch/position-{first}": pair(
            log_ratio.abs(), (positions >= first) & ((positions < end) | (first == POSITIONS[-1]))
        )
        for first, end in pairwise((*POSITIONS, POSITIONS[-1]))
    }


def pair(values: Tensor, is_counted: Tensor) -> Tensor:
    """The sum over the counted terms, and their number."""
    return torch.stack([torch.where(is_counted, values, 0).sum(), is_counted.sum()]).double()
