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
from polar.models.completion import Ids, Logprobs, Routing, Versions, concatenate_routing
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
    """Position in the row; never 0, since the first token is not predicted."""
    weights: Floats
    """Weight of the token's loss, which can express any normalisation."""
    advantages: Floats
    logprobs: Logprobs
    """Logprobs as sampled, from the policy of the importance ratio."""
    versions: Versions


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """A row to pack."""

    name: str
    ids: Ids
    trained: Trained
    routing: Routing | None = None
    """Same length as ids; None if unknown."""


PADDING = -1
"""The segment index of padding tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """One entry for each trained token of each row, in the order of the rows; all arrays have one length.

    A token that several rows train has one entry for each of them: advantages and sampled logprobs may
    differ, and no loss that clips a ratio could be computed from their sum.
    """

    targets: Indices
    """Position of the trained token in the batch."""
    rows: Indices
    """Row of the token, as an index into the batch's `names`."""
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
    """Depth in the tree, from 0, for positional embeddings."""
    segments: NDArray[np.int32]
    """Number of the token's root, from 0; PADDING for padding."""
    predecessors: NDArray[np.int32]
    """Position of the previous token, whose logits predict this one; -1 at a root."""
    ends: NDArray[np.int32]
    """Position after the last token that follows from this one."""
    terms: Terms
    names: tuple[str, ...]
    """Names of the rows."""
    routing: Routing | None = None
    """Experts of each token; None if unknown."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sources(self) -> Indices:
        """For each term, the position of the logits that predict its token."""
        return self.predecessors[self.terms.targets].astype(np.int64)

    @property
    def labels(self) -> Ids:
        """For each term, the token to predict."""
        return self.ids[self.terms.targets]

    @property
    def weights(self) -> Floats:
        """The summed weight of each token's terms, enough for losses linear in them (SFT)."""
        summed = np.bincount(self.terms.targets, self.terms.weights, minlength=len(self))
        return summed.astype(np.float32)

    def padded(self, length: int, id: int = 0) -> Batch:
        """The batch with padding at its end, which attends only to itself."""
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
            routing=concatenate_routing([(len(self), self.routing), (count, None)]),
        )


@dataclass(frozen=True, slots=True)
class PackingStats:
    """Statistics of packing."""

    rows: int
    """Packed rows, without those over the budget."""
    row_tokens: int
    """Total length of the rows: the cost of computing each separately."""
    packed_tokens: int
    """Tokens in all batches."""
    repeated_tokens: int
    """Shared tokens repeated because their tree had to be split."""
    padding_tokens: int
    """Tokens added to pad every batch to the budget."""

    @property
    def unique_tokens(self) -> int:
        return self.packed_tokens - self.repeated_tokens

    @property
    def ratio(self) -> float:
        """How many times fewer tokens are computed than with separate rows."""
        return self.row_tokens / self.packed_tokens if self.packed_tokens else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Every given row, either in one batch or named as too long."""

    batches: tuple[Batch, ...]
    over_budget: tuple[str, ...]
    stats: PackingStats


def row(name: str, trace: Trace, weights: ArrayLike = 1.0, advantages: ArrayLike = 0.0) -> TrainingRow:
    """Convert a trace to a row; weights and advantages are one number, or one per response token."""
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
    """Yield a row for each trace, one at a time to limit memory. Weights and advantages are as for `row`, one
    entry per trace. Rows are named NAME/0, NAME/1, …."""
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
    """The mask as FlexAttention compiles it, a function of indices."""
    import torch

    return _seen_by(torch.as_tensor(batch.ends, device=device))


def _seen_by(ends: torch.Tensor) -> Any:
    def is_seen(_b: Any, _h: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < ends[key])

    return is_seen


def block_mask(batch: Batch, device: torch.device | str = "cpu", block: int = BLOCK) -> BlockMask:
    """Build the block mask of a batch on its device."""
    import torch

    return block_mask_of(torch.as_tensor(batch.ends, device=device), block)


def block_mask_of(ends: torch.Tensor, block: int = BLOCK) -> BlockMask:
    """Build the block mask from a batch's `ends` on their device, without synchronising.

    It is computed from the smallest and largest end of each block; the dense mask is never materialised.
    """
    from torch.nn.attention.flex_attention import BlockMask

    partial, full = blocks(ends, block)
    return BlockMask.from_kv_blocks(
        *_list_blocks(partial),
        *_list_blocks(full),
        BLOCK_SIZE=block,
        mask_mod=_seen_by(ends),
        seq_lengths=(len(ends), len(ends)),
    )


def blocks(ends: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[query blocks, key blocks]: which pairs are partly visible, and which fully.

    An earlier block of keys is partly visible if any key's subtree reaches the first query, and fully if
    every key's subtree covers the last one.
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


def _list_blocks(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query block, the number of visible key blocks, and their indices first."""
    import torch

    order = torch.argsort(seen.int(), dim=1, descending=True, stable=True)
    return seen.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Chains of tokens between two forks, for layers that carry a state from token to token.

    A stretch lies side by side in a batch, and carries on from its parent's last token, wherever that lies.
    All are here in the order of their tokens, without padding; arrays have one length.
    """

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
