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

    ends = torch.as_tensor(batch.ends, device=device)

    def is_seen(_b: Any, _h: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < ends[key])

    return is_seen


def block_mask(batch: Batch, device: torch.device | str = "cpu", block: int = BLOCK) -> BlockMask:
    """The block mask, made from the blocks' smallest and largest ends: the dense mask is never there.

    A block of keys before a block of queries is seen in part if any key's subtree reaches the first
    query, and wholly if every key's subtree covers the last one.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    partial, full = blocks(batch, block)
    numbers, indices = _listed(partial)
    full_numbers, full_indices = _listed(full)
    tensors = [torch.as_tensor(a, device=device) for a in (numbers, indices, full_numbers, full_indices)]
    return BlockMask.from_kv_blocks(
        *tensors,
        BLOCK_SIZE=block,
        mask_mod=mask_mod(batch, device),
        seq_lengths=(len(batch), len(batch)),
    )


def blocks(batch: Batch, block: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[query blocks, key blocks]: which pairs are seen in part, and which wholly."""
    count = -(-len(batch) // block)
    firsts = np.arange(count) * block
    lasts = np.minimum(firsts + block, len(batch)) - 1
    reach = np.maximum.reduceat(batch.ends, firsts)
    cover = np.minimum.reduceat(batch.ends, firsts)
    before = np.arange(count)[None, :] < np.arange(count)[:, None]
    full = before & (cover[None, :] > lasts[:, None])
    seen = before & (reach[None, :] > firsts[:, None])
    return (seen & ~full) | np.eye(count, dtype=bool), full


def _listed(seen: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """For each query block how many key blocks it sees, and their indices with those first."""
    order = np.argsort(~seen, axis=1, kind="stable")
    return seen.sum(1).astype(np.int32)[None, None], order.astype(np.int32)[None, None]
