"""First-fit decreasing: the largest item first, each into the first bin that has room for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """The items of each bin, by index; every size is at most the capacity. O(n log n)."""
    rooms = _Rooms(len(sizes), capacity)
    bins: list[list[int]] = []
    # Stable, so that equal sizes keep their order and the result depends on nothing else.
    for item in np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist():
        bin = rooms.take(sizes[item])
        if bin == len(bins):
            bins.append([])
        bins[bin].append(item)
    return bins


class _Rooms:
    """How much room each bin has, under a binary tree of maxima that leads to the first with enough."""

    def __init__(self, bins: int, capacity: int) -> None:
        self._leaves = 1 << max(bins - 1, 0).bit_length()
        self._most = [capacity] * (2 * self._leaves)

    def take(self, size: int) -> int:
        """Take room in the first bin that has it."""
        most, node = self._most, 1
        while node < self._leaves:
            node *= 2
            node += most[node] < size
        most[node] -= size
        bin = node - self._leaves
        while node := node // 2:
            most[node] = max(most[2 * node], most[2 * node + 1])
        return bin
