"""What a trainer computes in one forward pass: a token tree as flat arrays, and the terms of its loss.

Tokens stand in depth-first order, so the tokens that follow from one are a range: token j is seen
by token i exactly if `j <= i < ends[j]`. A row that shares nothing is a tree without branches, which
makes plain sequence packing the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polar.errors import InvalidInput
from polar.models.completion import Ids, Logprobs, Versions
from polar.trajectory.packing.rows import Floats, Indices

PADDING = -1
"""The segment of tokens that only fill a batch up."""


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """One entry for each trained token of each row, in the order of the rows; all arrays have one length.

    A token that several rows train has one entry for each of them: advantages and sampled logprobs may
    differ, and no loss that clips a ratio could be computed from their sum.
    """

    targets: Indices
    """Index of the trained token in the batch."""
    rows: Indices
    """Whose token it is: index into the batch's `names`."""
    weights: Floats
    advantages: Floats
    logprobs: Logprobs
    versions: Versions

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One packed batch. Arrays over tokens have one length; `terms` are apart from them."""

    ids: Ids
    positions: NDArray[np.int32]
    """Depth in the tree, from 0: what positional embeddings take."""
    segments: NDArray[np.int32]
    """Which root the token stands under, from 0; PADDING for padding."""
    predecessors: NDArray[np.int32]
    """Index of the token before, whose logits predict this one; -1 at a root."""
    ends: NDArray[np.int32]
    """One past the last token that follows from this one."""
    terms: Terms
    names: tuple[str, ...]
    """The rows laid out here."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sources(self) -> Indices:
        """For each term, where in the batch the logits stand that predict its token."""
        return self.predecessors[self.terms.targets].astype(np.int64)

    @property
    def labels(self) -> Ids:
        """For each term, the token to predict."""
        return self.ids[self.terms.targets]

    @property
    def weights(self) -> Floats:
        """For each token the summed weight of its terms: enough for a loss that is linear in them (SFT)."""
        summed = np.bincount(self.terms.targets, self.terms.weights, minlength=len(self))
        return summed.astype(np.float32)

    def padded(self, length: int, id: int = 0) -> Batch:
        """The same batch with tokens at its end that see only themselves and that nobody sees."""
        count = length - len(self)
        if count < 0:
            raise InvalidInput(f"a batch of {len(self)} tokens cannot be padded to {length}")

        def fill(array: NDArray[np.int32], value: int) -> NDArray[np.int32]:
            return np.concatenate([array, np.full(count, value, np.int32)])

        own_ends = np.arange(len(self) + 1, length + 1, dtype=np.int32)
        return replace(
            self,
            ids=fill(self.ids, id),
            positions=fill(self.positions, 0),
            segments=fill(self.segments, PADDING),
            predecessors=fill(self.predecessors, -1),
            ends=np.concatenate([self.ends, own_ends]),
        )


@dataclass(frozen=True, slots=True)
class PackingStats:
    """What packing saved."""

    rows: int
    """Rows laid out; those over the budget are not among them."""
    row_tokens: int
    """Their lengths together: what computing each row apart would cost."""
    packed_tokens: int
    """Tokens in all batches."""
    repeated_tokens: int
    """Of these, shared tokens that stand in more than one place because their tree had to be split."""
    padding_tokens: int
    """Added if every batch is padded to the budget."""

    @property
    def unique_tokens(self) -> int:
        return self.packed_tokens - self.repeated_tokens

    @property
    def ratio(self) -> float:
        """How many times fewer tokens are computed than with every row apart."""
        return self.row_tokens / self.packed_tokens if self.packed_tokens else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """All rows that were given: each is in exactly one batch, or named as too long for any."""

    batches: tuple[Batch, ...]
    over_budget: tuple[str, ...]
    stats: PackingStats
