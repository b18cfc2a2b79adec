"""Short steps on a GPU as CUDA graphs: recorded once, replayed without the cost of their launches.

A small model's step is hundreds of kernels of microseconds each, and a processor that starts them
one by one is what everything waits for. A graph starts them all at once. Its tensors stay where
they are, so a step is copied into the graph's own input; one of a few sizes holds it, and tokens
that fill it up go to a slot that nobody has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from polar.engines.embedded.attention import Packed, SlotCache
from polar.engines.embedded.token_attention import attend_tokens

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of a graph. Beyond the last, computing takes longer than launching."""
WARM_UPS = 2
"""Runs before the recording: what is made on first use must not become part of it."""


class GraphInput:
    """Tokens of a step, where a graph reads them. Takes the place of a `Step` in the model."""

    def __init__(self, cache: SlotCache, size: int, device: torch.device) -> None:
        self.cache = cache
        self._size = size
        self._outputs = min(size, cache.slots)
        self._all = torch.zeros(3 * size + self._outputs, dtype=torch.long, device=device)
        self.ids, self.positions, self.rows, self.lasts = self._all.split([size, size, size, self._outputs])
        self.rows.fill_(cache.spare)

    def fill(self, packed: Packed) -> None:
        rest = self._size - len(packed.ids)
        zeros = [0] * rest
        spare = [self.cache.spare] * rest
        lasts = [*packed.lasts, *[0] * (self._outputs - len(packed.lasts))]
        values = [*packed.ids, *zeros, *packed.positions, *zeros, *packed.rows, *spare, *lasts]
        # From memory that is not pinned, the copy has read it all when this returns.
        self._all.copy_(torch.tensor(values), non_blocking=True)

    def attend(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As `Step.attend`."""
        layer = self.cache.layer(index, key, value)
        layer.keys[self.rows, :, self.positions] = key[0].transpose(0, 1)
        layer.values[self.rows, :, self.positions] = value[0].transpose(0, 1)
        query = query[0].transpose(0, 1)
        return attend_tokens(query, layer.keys, layer.values, self.rows, self.positions, scale).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class _Recorded:
    input: GraphInput
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class Graphs:
    """The graphs of one model, one of each size."""

    def __init__(
        self, cache: SlotCache, device: torch.device, compute: Callable[[GraphInput], torch.Tensor]
    ) -> None:
        self._cache = cache
        self._device = device
        self._compute = compute
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[int, _Recorded] = {}

    def compute(self, packed: Packed) -> torch.Tensor | None:
        """A row of logits for each segment that wants them; None: too long for a graph."""
        size = next((size for size in SIZES if size >= len(packed.ids)), None)
        if size is None:
            return None
        recorded = self._recorded[size]
        recorded.input.fill(packed)
        recorded.graph.replay()
        return recorded.logits[: len(packed.lasts)]

    def record_all(self) -> None:
        # The largest first: the others find room in what it took.
        for size in reversed(SIZES):
            self._recorded[size] = self._record(size)
        log.info("recorded %d CUDA graphs", len(SIZES))

    def _record(self, size: int) -> _Recorded:
        entry = GraphInput(self._cache, size, self._device)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._compute(entry)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._compute(entry)
        return _Recorded(entry, graph, logits)
