"""Attention of single tokens on a GPU: each reads its own slot, up to its own position.

A kernel written in Triton. Where each token looks is read on the GPU, so the launch is the same
for every mix of lengths: nothing is padded to the longest, and a CUDA graph can replay it. Keys
are read in splits that run side by side, as one token alone would not keep a GPU busy, and the
parts are put together after.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SPLIT = 512
"""Keys that one program reads."""
BLOCK = 64
SMALLEST_DOT = 16
"""Rows that a tensor core takes at least."""


def attend_tokens(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[tokens, heads, size] of queries → the same of values.

    Token t reads the keys and values of slot rows[t], from the first to positions[t].
    """
    tokens, heads, size = query.shape
    _, key_heads, context, value_size = values.shape
    splits = triton.cdiv(context, SPLIT)
    group = heads // key_heads
    parts = torch.empty(tokens, heads, splits, value_size, dtype=torch.float32, device=query.device)
    weights = torch.empty(tokens, heads, splits, dtype=torch.float32, device=query.device)
    _read_split[(tokens, key_heads, splits)](
        query,
        keys,
        values,
        rows,
        positions,
        parts,
        weights,
        scale,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        GROUP=group,
        GROUP_ROWS=max(SMALLEST_DOT, triton.next_power_of_2(group)),
        SIZE=size,
        SIZE_ROWS=max(SMALLEST_DOT, triton.next_power_of_2(size)),
        VALUE_SIZE=value_size,
        VALUE_ROWS=max(SMALLEST_DOT, triton.next_power_of_2(value_size)),
        SPLITS=splits,
        SPLIT_KEYS=SPLIT,
        KEYS=BLOCK,
    )
    out = torch.empty(tokens, heads, value_size, dtype=query.dtype, device=query.device)
    _join_splits[(tokens, heads)](
        parts,
        weights,
        positions,
        out,
        VALUE_SIZE=value_size,
        VALUE_ROWS=max(SMALLEST_DOT, triton.next_power_of_2(value_size)),
        SPLITS=splits,
        SPLIT_KEYS=SPLIT,
        SPLIT_ROWS=triton.next_power_of_2(splits),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _read_split(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    rows,
    positions,
    parts,
    weights,
    scale,
    query_token,
    query_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_ROWS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The query heads that share one key head, over one split of one token's keys."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(positions + token) + 1
    first = split * SPLIT_KEYS
    if first < length:
        slot = tl.load(rows + token).to(tl.int64)
        group = tl.arange(0, GROUP_ROWS)
        size = tl.arange(0, SIZE_ROWS)
        value_size = tl.arange(0, VALUE_ROWS)
        q = tl.load(
            query + token * query_token + (head * GROUP + group)[:, None] * query_head + size[None],
            mask=(group < GROUP)[:, None] & (size < SIZE)[None],
            other=0.0,
        )
        key_row = keys + slot * key_slot + head * key_head
        value_row = values + slot * value_slot + head * value_head
        highest = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
        total = tl.zeros([GROUP_ROWS], tl.float32)
        mixed = tl.zeros([GROUP_ROWS, VALUE_ROWS], tl.float32)
        for at in range(first, tl.minimum(first + SPLIT_KEYS, length), KEYS):
            place = at + tl.arange(0, KEYS)
            seen = place < length
            k = tl.load(
                key_row + place[None] * SIZE + size[:, None],
                mask=seen[None] & (size < SIZE)[:, None],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision="ieee") * scale
            scores = tl.where(seen[None], scores, -float("inf"))
            above = tl.maximum(highest, tl.max(scores, 1))
            shrink = tl.exp(highest - above)
            p = tl.exp(scores - above[:, None])
            v = tl.load(
                value_row + place[:, None] * VALUE_SIZE + value_size[None],
                mask=seen[:, None] & (value_size < VALUE_SIZE)[None],
                other=0.0,
            )
            mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            total = total * shrink + tl.sum(p, 1)
            highest = above
        at = ((token * tl.num_programs(1) + head) * GROUP + group) * SPLITS + split
        tl.store(weights + at, highest + tl.log(total), mask=group < GROUP)
        tl.store(
            parts + at[:, None] * VALUE_SIZE + value_size[None],
            mixed / total[:, None],
            mask=(group < GROUP)[:, None] & (value_size < VALUE_SIZE)[None],
        )


@triton.jit  # type: ignore[untyped-decorator]
def _join_splits(  # type: ignore[no-untyped-def]
    parts,
    weights,
    positions,
    out,
    VALUE_SIZE: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLIT_ROWS: tl.constexpr,
):
    """The parts of one head of one token, each by its share of the probability."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, SPLIT_ROWS)
    size = tl.arange(0, VALUE_ROWS)
    # A split that begins behind the token was left unwritten.
    is_read = (split < SPLITS) & (split * SPLIT_KEYS <= tl.load(positions + token))
    at = (token * tl.num_programs(1) + head) * SPLITS + split
    weight = tl.load(weights + at, mask=is_read, other=-float("inf"))
    share = tl.exp(weight - tl.max(weight, 0))
    share = share / tl.sum(share, 0)
    part = tl.load(
        parts + at[:, None] * VALUE_SIZE + size[None],
        mask=is_read[:, None] & (size < VALUE_SIZE)[None],
        other=0.0,
    )
    mixed = tl.sum(part * share[:, None], 0)
    place = (token * tl.num_programs(1) + head) * VALUE_SIZE + size
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=size < VALUE_SIZE)
