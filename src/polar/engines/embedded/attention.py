"""Attention over KV buffers that the engine owns: one row of packed tokens, many slots of many lengths.

transformers lets a model take its attention from a function registered by name. Ours gets the
queries, keys and values of all tokens of a step in one packed row, writes keys and values into
their slots, and attends each token to its own slot only. So the linear layers see one dense
matrix whatever the mix of decoding requests and prefill chunks, nothing is padded or copied,
and any model with transformers' attention interface works unchanged.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

NAME = "polar_slots"
PADDED_WORK_LIMIT = 2.0
"""On a CPU single tokens share one attention call unless padding more than doubles the work."""
MASKED_AT_ONCE = 4096
"""Tokens that one call attends under a mask: it and the scores have a column for each key of the slot."""


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """Consecutive tokens of one slot to compute in a step."""

    slot: int
    start: int
    """Position of the first token; everything before it is in the slot's buffer already."""
    ids: Sequence[int]
    logits: int
    """Number of its last tokens whose logits are wanted."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(slots=True)
class Layer:
    """Keys and values of one layer: [slots, key-value heads, context, head size] each."""

    keys: torch.Tensor
    values: torch.Tensor


class SlotCache:
    """The KV buffers of all layers. A buffer is made when its layer's first keys show its shape."""

    def __init__(self, slots: int, context: int) -> None:
        self.slots = slots
        self.context = context
        self._layers: dict[int, Layer] = {}

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> Layer:
        found = self._layers.get(index)
        if found is None:
            found = self._layers[index] = Layer(self._buffer(keys), self._buffer(values))
        return found

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` tokens of `source`."""
        with torch.inference_mode():
            for layer in self._layers.values():
                layer.keys[target, :, :length] = layer.keys[source, :, :length]
                layer.values[target, :, :length] = layer.values[source, :, :length]

    def _buffer(self, sample: torch.Tensor) -> torch.Tensor:
        shape = (self.slots, sample.shape[1], self.context, sample.shape[3])
        if sample.device.type != "cpu":
            return torch.zeros(shape, dtype=sample.dtype, device=sample.device)
        # Anonymous memory is zero and takes no room until written: a short context stays cheap.
        memory = mmap.mmap(-1, math.prod(shape) * sample.element_size())
        return torch.frombuffer(memory, dtype=sample.dtype).view(shape)


class Step:
    """One forward pass over a packed row of segments, single tokens first, and how each token attends."""

    def __init__(
        self, cache: SlotCache, segments: Sequence[AttentionSegment], device: Any, dtype: Any
    ) -> None:
        singles = sorted((s for s in segments if len(s.ids) == 1), key=lambda s: s.slot)
        chunks = [s for s in segments if len(s.ids) > 1]
        self.segments = [*singles, *chunks]
        """Segments in row order, which is also the order of the logits."""
        ends = itertools.accumulate(len(s.ids) for s in self.segments)
        wanted = [at for s, end in zip(self.segments, ends, strict=True) for at in range(end - s.logits, end)]
        self.wanted = torch.tensor(wanted, dtype=torch.long, device=device)
        """Positions of the tokens whose logits are wanted."""
        self.ids = torch.tensor([id for s in self.segments for id in s.ids], device=device)
        positions = [p for s in self.segments for p in range(s.start, s.end)]
        self.positions = torch.tensor(positions, device=device)
        self._rows = torch.tensor([s.slot for s in self.segments for _ in s.ids], device=device)
        self._cache = cache
        self._single_count = len(singles)
        self._singles = _singles(singles, device, dtype)
        self._chunks = [_Chunk(part, device, dtype) for s in chunks for part in _parts(s)]

    def attend(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[1, heads, tokens, size] → [1, tokens, heads, size], with keys and values stored."""
        layer = self._cache.layer(index, key, value)
        layer.keys[self._rows, :, self.positions] = key[0].transpose(0, 1)
        layer.values[self._rows, :, self.positions] = value[0].transpose(0, 1)
        query = query[0].transpose(0, 1)
        offset = self._single_count
        parts = [single.attend(layer, query[:offset], scale) for single in self._singles]
        for chunk in self._chunks:
            parts.append(chunk.attend(layer, query[offset : offset + chunk.length], scale))
            offset += chunk.length
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


class _Singles:
    """Single tokens of several slots in one attention call over a range of slots."""

    def __init__(self, segments: Sequence[AttentionSegment], first: int, device: Any, dtype: Any) -> None:
        self.first_row = first
        self.count = len(segments)
        self.low, self.high = segments[0].slot, segments[-1].slot + 1
        self.longest = max(s.end for s in segments)
        self.is_dense = self.high - self.low == self.count
        self.mask: torch.Tensor | None = None
        if not self.is_dense or any(s.end != self.longest for s in segments):
            # Slots in between that are not ours attend to one position: an empty row would be NaN.
            ends = [1] * (self.high - self.low)
            for s in segments:
                ends[s.slot - self.low] = s.end
            seen = torch.arange(self.longest, device=device) < torch.tensor(ends, device=device)[:, None]
            self.mask = _hiding(~seen, dtype)[:, None, None]
        self.at = torch.tensor([s.slot - self.low for s in segments], device=device)

    def attend(self, layer: Layer, query: torch.Tensor, scale: float) -> torch.Tensor:
        keys = layer.keys[self.low : self.high, :, : self.longest]
        values = layer.values[self.low : self.high, :, : self.longest]
        heads, size = query.shape[1:]
        # Query heads that share a key head stand in the query-length dimension: no key is repeated.
        grouped = query[self.first_row : self.first_row + self.count]
        grouped = grouped.reshape(self.count, keys.shape[1], heads // keys.shape[1], size)
        if not self.is_dense:
            padded = grouped.new_zeros(self.high - self.low, *grouped.shape[1:])
            padded[self.at] = grouped
            grouped = padded
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scale)
        if not self.is_dense:
            out = out[self.at]
        return out.reshape(self.count, heads, values.shape[3])


def _singles(segments: Sequence[AttentionSegment], device: Any, dtype: Any) -> list[_Singles]:
    if not segments:
        return []
    span = segments[-1].slot + 1 - segments[0].slot
    padded = span * max(s.end for s in segments)
    if torch.device(device).type == "cpu" and padded > PADDED_WORK_LIMIT * sum(s.end for s in segments):
        return [_Singles([s], row, device, dtype) for row, s in enumerate(segments)]
    return [_Singles(segments, 0, device, dtype)]


def _parts(segment: AttentionSegment) -> list[AttentionSegment]:
    """Split the chunk for attention; the part at the start of a slot needs no mask."""
    size = MASKED_AT_ONCE if segment.start else len(segment.ids)
    return [
        replace(segment, start=segment.start + at, ids=segment.ids[at : at + size])
        for at in range(0, len(segment.ids), size)
    ]


class _Chunk:
    """Consecutive tokens of one slot, each seeing what came before it."""

    def __init__(self, segment: AttentionSegment, device: Any, dtype: Any) -> None:
        self.slot, self.start, self.end = segment.slot, segment.start, segment.end
        self.length = len(segment.ids)
        self.mask: torch.Tensor | None = None
        if self.start:
            positions = torch.arange(self.end, device=device)
            hidden = positions[None] > positions[self.start :, None]
            self.mask = _hiding(hidden, dtype)[None, None]

    def attend(self, layer: Layer, query: torch.Tensor, scale: float) -> torch.Tensor:
        keys = layer.keys[self.slot, :, : self.end].unsqueeze(0)
        values = layer.values[self.slot, :, : self.end].unsqueeze(0)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


def _hiding(hidden: torch.Tensor, dtype: Any) -> torch.Tensor:
    """A mask to add to the scores: the CPU kernel is a third slower with a boolean one."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -math.inf)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    slot_step: Step | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if slot_step is None:
        raise NotImplementedError("the model does not hand its arguments down to its attention")
    for name in ("softcap", "sliding_window", "position_bias", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return slot_step.attend(module.layer_idx, query, key, value, scale), None


def register() -> None:
    """Make the attention known to transformers under NAME."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
