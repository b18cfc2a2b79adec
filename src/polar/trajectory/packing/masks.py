"""Attention masks of a batch for torch: blocks for FlexAttention, a dense one where that is not at hand.

torch is imported here only, and only when a mask is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polar.trajectory.packing.batch import Batch

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""FlexAttention's own block size."""


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
