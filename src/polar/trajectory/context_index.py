"""Finds the contexts that a prompt begins with, by rolling hashes over token prefixes.

The hash of a prefix is sum(id * BASE**position) modulo 2**64: that of a longer prefix costs only the
tokens it adds. A hash only finds; whoever asks compares the tokens before believing it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np
from numpy.typing import NDArray

from polar.models.completion import Ids

_BASE = 0x9E3779B97F4A7C15
"""Odd, so that every position has an inverse; its bits are those of the golden ratio."""


class PrefixHashes:
    """The hash function, with the powers it needs for prefixes of up to `longest` tokens."""

    def __init__(self, longest: int) -> None:
        self._powers = np.full(longest + 1, _BASE, np.uint64)
        self._powers[0] = 1
        np.cumprod(self._powers, out=self._powers)

    def extended(self, value: int, start: int, ids: Ids) -> int:
        """The hash of a prefix of `start` tokens whose hash is `value`, followed by `ids`."""
        added = np.dot(ids.astype(np.uint64), self._powers[start : start + len(ids)])
        return (value + int(added)) & (2**64 - 1)

    def of_prefixes(self, value: int, start: int, ids: Ids) -> NDArray[np.uint64]:
        """The hashes of that prefix followed by none, by one, … by all of `ids`."""
        hashes = np.empty(len(ids) + 1, np.uint64)
        hashes[0] = value
        hashes[1:] = ids
        hashes[1:] *= self._powers[start : start + len(ids)]
        return np.cumsum(hashes, out=hashes)


class ContextIndex:
    """Token sequences by length and hash; the latest of equal ones is found."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], int] = {}
        self._lengths: list[int] = []
        self._known: set[int] = set()

    def add(self, length: int, value: int, place: int) -> None:
        self._places[length, value] = place
        if length not in self._known:
            self._known.add(length)
            insort(self._lengths, length)

    def get(self, length: int, value: int) -> int | None:
        return self._places.get((length, value))

    def longest(self, start: int, hashes: NDArray[np.uint64]) -> int | None:
        """The place of the longest sequence among the prefixes, from `start` tokens on, that hash so."""
        first, last = bisect_left(self._lengths, start), bisect_right(self._lengths, start + len(hashes) - 1)
        lengths = self._lengths[first:last]
        values = hashes[[length - start for length in lengths]].tolist()
        for length, value in zip(reversed(lengths), reversed(values), strict=True):
            place = self._places.get((length, value))
            if place is not None:
                return place
        return None
