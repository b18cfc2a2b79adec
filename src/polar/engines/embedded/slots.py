"""Which slot a request computes in, and how much of its prompt is there already."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polar.models.completion import Ids


class Slot:
    """One row of the KV buffers and the tokens it holds; they stay after their request has ended."""

    def __init__(self, index: int, context: int) -> None:
        self.index = index
        self.is_free = True
        self.length = 0
        """How many tokens have their keys and values computed."""
        self.is_stale = False
        """Whether some are of weights that have been replaced: good for its own request only."""
        self.last_used = 0
        self._tokens: Ids = np.zeros(context, dtype=np.int32)

    def shared(self, prompt: Ids) -> int:
        """How many computed tokens a prompt begins with."""
        return 0 if self.is_stale else common_prefix(self._tokens[: self.length], prompt)

    def extend(self, ids: Ids) -> None:
        """These tokens are computed now."""
        self._tokens[self.length : self.length + len(ids)] = ids
        self.length += len(ids)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a prompt goes: `reused` tokens of it are in `slot`, after copying them from `source` if set."""

    slot: Slot
    reused: int
    source: Slot | None = None


class SlotTable:
    """All slots. Free ones serve as the prefix cache, the least recently used is overwritten first."""

    def __init__(self, count: int, context: int) -> None:
        self.slots = [Slot(index, context) for index in range(count)]
        self._clock = 0

    @property
    def free(self) -> int:
        return sum(slot.is_free for slot in self.slots)

    def best_prefix(self, prompt: Ids) -> tuple[Slot, int]:
        """The slot that shares the most with a prompt, free ones first among equals."""
        # The last token is computed in any case: the first sampled token needs its logits.
        shares = [(min(slot.shared(prompt), len(prompt) - 1), slot.is_free, slot) for slot in self.slots]
        length, _, slot = max(shares, key=lambda share: share[:2])
        return slot, length

    def place(self, prompt: Ids) -> Placement | None:
        """Take a slot for a prompt, or None while all are busy."""
        free = [slot for slot in self.slots if slot.is_free]
        if not free:
            return None
        best, reused = self.best_prefix(prompt)
        if best.is_free and 2 * reused >= best.length:
            placement = Placement(best, reused)
        else:
            # The best slot is busy, or holds mostly another conversation that may come back.
            oldest = min(free, key=lambda slot: (slot.length > 0, slot.last_used))
            placement = Placement(oldest, reused, None if oldest is best or not reused else best)
        placement.slot.is_free = False
        self._touch(placement.slot)
        if placement.source:
            placement.slot.length = 0
            placement.slot.extend(prompt[:reused])
        placement.slot.length = reused
        return placement

    def release(self, slot: Slot) -> None:
        slot.is_free = True
        if slot.is_stale:
            slot.is_stale, slot.length = False, 0
        self._touch(slot)

    def forget(self) -> None:
        """Drop every cached token, while no slot is taken: they are no longer what the model computes."""
        for slot in self.slots:
            slot.length = 0

    def expire(self) -> None:
        """The weights are replaced: what is cached of the old ones serves no other request any more."""
        for slot in self.slots:
            if slot.is_free:
                slot.length = 0
            else:
                slot.is_stale = True

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock


def common_prefix(left: Ids, right: Ids) -> int:
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if differing.size else length
