"""What a trainer computes in one forward pass: a token tree as flat arrays, and the terms of its loss.

Traces become rows, and packing lays rows out as batches. Tokens of a batch stand in depth-first order, so the
tokens that follow from one are a range: token j is seen by token i exactly if `j <= i < ends[j]`. A row that
shares nothing is a tree without branches, which makes plain sequence packing the same thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polar.errors import InvalidInput
from polar.models.completion import Ids, Logprobs, Routing, Versions, joined_routing
from polar.models.trace import Trace, Trajectory
from polar.trajectory.materialise import materialise

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The trained tokens of a row, in order; all arrays have one length."""

    depths: Indices
    """Where in the row each stands; never 0, since the first token is predicted from nothing."""
    weights: Floats
    """What the token's loss is multiplied with: any normalisation is expressed here."""
    advantages: Floats
    logprobs: Logprobs
    """As sampled: of the policy that the importance ratio is taken against."""
    versions: Versions


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """What packing takes."""

    name: str
    ids: Ids
    trained: Trained
    routing: Routing | None = None
    """Same length as ids; None: of none is it known."""


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
    routing: Routing | None = None
    """Of each token; None: of none is it known."""

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
            routing=joined_routing([(len(self), self.routing), (count, None)]),
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


def row(name: str, trace: Trace, weights: ArrayLike = 1.0, advantages: ArrayLike = 0.0) -> TrainingRow:
    """The trace as a row; weights and advantages are one number, or one for each response token."""
    at = np.flatnonzero(trace.loss_mask)
    depths = at + len(trace.prompt_ids)
    if len(depths) and depths[0] == 0:
        raise InvalidInput(
            f"trace {name}: its first token is trained, but there is nothing to predict it from"
        )
    return TrainingRow(
        name,
        np.concatenate([trace.prompt_ids, trace.response_ids]),
        Trained(
            depths,
            _for_each(name, "weights", weights, len(trace.response_ids))[at],
            _for_each(name, "advantages", advantages, len(trace.response_ids))[at],
            trace.logprobs[at],
            trace.policy_versions[at],
        ),
        trace.routing,
    )


def rows(
    name: str,
    trajectory: Trajectory,
    weights: Sequence[ArrayLike] | None = None,
    advantages: Sequence[ArrayLike] | None = None,
) -> Iterator[TrainingRow]:
    """A row for each trace, made one at a time: only one repeats the history they share at any moment.

    Weights and advantages are those of `row`, one entry a trace. Rows are named NAME/0, NAME/1, ….
    """
    for index, ref in enumerate(trajectory.traces):
        yield row(
            f"{name}/{index}",
            materialise(trajectory, ref),
            1.0 if weights is None else weights[index],
            0.0 if advantages is None else advantages[index],
        )


def _for_each(name: str, what: str, given: ArrayLike, length: int) -> Floats:
    values = np.asarray(given, np.float32)
    if values.shape not in ((), (length,)):
        raise InvalidInput(f"trace {name}: {what} of shape {values.shape} for {length} response tokens")
    if not np.isfinite(values).all():
        raise InvalidInput(f"trace {name}: {what} must be finite")
    return np.broadcast_to(values, (length,))
