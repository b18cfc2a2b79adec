"""What a trainer computes in one forward pass: a token tree as flat arrays, and the terms of its loss.

Traces become rows, and packing lays rows out as batches. Tokens of a batch stand in depth-first order, so the
tokens that follow from one are a range: token j is seen by token i exactly if `j <= i < ends[j]`. A row that
shares nothing is a tree without branches, which makes plain sequence packing the same thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polar.errors import InvalidInput
from polar.models.completion import Ids, Logprobs, Routing, Versions, joined_routing
from polar.models.trace import Trace, Trajectory
from polar.trajectory.materialise import materialise

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

BLOCK = 128
"""FlexAttention's own block size."""


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


def dense_mask(batch: Batch) -> NDArray[np.bool_]:
    """[tokens, tokens]: whether token i sees token j. Quadratic, so for small batches only."""
    index = np.arange(len(batch))
    return (index[None, :] <= index[:, None]) & (index[:, None] < batch.ends[None, :])


def mask_mod(batch: Batch, device: torch.device | str = "cpu") -> Any:
    """The mask as the function of indices that FlexAttention compiles."""
    import torch

    return _seen_by(torch.as_tensor(batch.ends, device=device))


def _seen_by(ends: torch.Tensor) -> Any:
    def is_seen(_b: Any, _h: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < ends[key])

    return is_seen


def block_mask(batch: Batch, device: torch.device | str = "cpu", block: int = BLOCK) -> BlockMask:
    """The block mask of a batch, made where it is used."""
    import torch

    return block_mask_of(torch.as_tensor(batch.ends, device=device), block)


def block_mask_of(ends: torch.Tensor, block: int = BLOCK) -> BlockMask:
    """The same from a batch's `ends`, on their device and without waiting for it.

    It is made from the blocks' smallest and largest ends: the dense mask is never there.
    """
    from torch.nn.attention.flex_attention import BlockMask

    partial, full = blocks(ends, block)
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=block,
        mask_mod=_seen_by(ends),
        seq_lengths=(len(ends), len(ends)),
    )


def blocks(ends: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[query blocks, key blocks]: which pairs are seen in part, and which wholly.

    A block of keys before a block of queries is seen in part if any key's subtree reaches the first
    query, and wholly if every key's subtree covers the last one.
    """
    import torch

    length = len(ends)
    count = -(-length // block)
    index = torch.arange(count, device=ends.device)
    firsts, lasts = index * block, (index * block + block).clamp(max=length) - 1
    # A last block that is not full is filled up with what changes neither.
    filled = torch.nn.functional.pad(ends, (0, count * block - length), value=-1).view(count, block)
    reach = filled.amax(1)
    cover = torch.where(filled < 0, length, filled).amin(1)
    before = index[None, :] < index[:, None]
    full = before & (cover[None, :] > lasts[:, None])
    seen = before & (reach[None, :] > firsts[:, None])
    return (seen & ~full) | torch.eye(count, dtype=torch.bool, device=ends.device), full


def _listed(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query block how many key blocks it sees, and their indices with those first."""
    import torch

    order = torch.argsort(seen.int(), dim=1, descending=True, stable=True)
    return seen.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]
