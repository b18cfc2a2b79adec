"""Experts that follow from a token and all tokens before it, so that those of any other token show."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from polar.models.completion import Routing

LAYERS, CHOSEN, EXPERTS = 2, 2, 8


def routing_of(context: Sequence[int], start: int = 0) -> Routing:
    """Of each token from `start` on but the last, as an engine tells them."""
    rows: Routing = np.zeros((max(len(context) - 1 - start, 0), LAYERS, CHOSEN), np.uint8)
    seen, ids = 0, np.asarray(context, np.int32)
    for at, id in enumerate(ids[:-1]):
        seen = crc32(id.tobytes(), seen)
        if at >= start:
            rows[at - start] = [_distinct(seen >> 8 * layer) for layer in range(LAYERS)]
    return rows


def _distinct(number: int) -> tuple[int, int]:
    first, further = number % EXPERTS, 1 + (number >> 3) % (EXPERTS - 1)
    return first, (first + further) % EXPERTS
