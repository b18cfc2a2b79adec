"""Says how likely given tokens are, each after those before it: at temperature 1, nothing cut.

A scored prompt is computed in a slot of its own from its first token on, whatever is cached of it, since
each position's logits are needed. They are made for a chunk at a time, and only one chunk between two
steps of the scheduler: memory is bounded, and requests that decode meanwhile wait no longer for it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from polar.engines.embedded.attention import AttentionSegment
from polar.engines.embedded.model import SlotModel
from polar.engines.embedded.scheduler import Slot, SlotTable

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 2**20
"""What the logits of a chunk may take, in single precision."""
SMALLEST_CHUNK, LARGEST_CHUNK = 16, 512


@dataclass(frozen=True, slots=True)
class Scored:
    """The answer to one request."""

    request: int
    logprobs: list[float] | None
    """Of every token but the first; None: computing them failed."""


@dataclass(slots=True, eq=False)
class _Scoring:
    number: int
    ids: list[int]
    slot: Slot | None = None
    logprobs: list[float] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Tokens computed: each but the last gave the logprob of the next."""
        return len(self.logprobs)


class Scorer:
    """Shares the slots of a scheduler, and its thread. One request is computed after the other."""

    def __init__(self, model: SlotModel, table: SlotTable) -> None:
        self._model = model
        self._table = table
        self._waiting: deque[_Scoring] = deque()
        fitting = CHUNK_BYTES // (4 * model.vocabulary)
        self._chunk = max(SMALLEST_CHUNK, min(LARGEST_CHUNK, fitting))

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def is_midway(self) -> bool:
        """Whether a request is computed in part."""
        return bool(self._waiting) and self._waiting[0].slot is not None

    def submit(self, number: int, ids: list[int]) -> None:
        self._waiting.append(_Scoring(number, ids))

    def abort(self, number: int) -> None:
        """Forget a request; unknown numbers are requests that have ended."""
        for scoring in self._waiting:
            if scoring.number == number:
                self._end(scoring)
                return

    def step(self) -> Scored | None:
        """Compute a chunk of the oldest request; what came of it if that was its last."""
        scoring = self._waiting[0]
        if scoring.slot is None:
            scoring.slot = self._place(scoring.ids)
        if scoring.slot is None:
            return None
        try:
            self._advance(scoring, scoring.slot)
        except Exception:
            # Out of memory, most likely: this request is lost, the others are not.
            log.exception("scoring %d tokens failed", len(scoring.ids))
            self._end(scoring)
            return Scored(scoring.number, None)
        if scoring.done + 1 < len(scoring.ids):
            return None
        # Computed from its first token on, the slot holds what a request that begins alike may reuse.
        scoring.slot.length = 0
        scoring.slot.extend(np.asarray(scoring.ids[: scoring.done], np.int32))
        self._end(scoring)
        return Scored(scoring.number, scoring.logprobs)

    def _place(self, ids: list[int]) -> Slot | None:
        placement = self._table.place(np.asarray(ids, np.int32))
        if placement is None:
            return None
        # Nobody may take the slot's tokens for cached while they are computed anew.
        placement.slot.length = 0
        return placement.slot

    def _advance(self, scoring: _Scoring, slot: Slot) -> None:
        start = scoring.done
        ids = scoring.ids[start : min(start + self._chunk, len(scoring.ids) - 1)]
        logits = self._model.logits(AttentionSegment(slot.index, start, ids, wants_logits=False))
        targets = torch.tensor(scoring.ids[start + 1 : start + 1 + len(ids)], device=logits.device)
        logprobs = logits.float().log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
        scoring.logprobs += logprobs.tolist()

    def _end(self, scoring: _Scoring) -> None:
        self._waiting.remove(scoring)
        if scoring.slot is not None:
            self._table.release(scoring.slot)
