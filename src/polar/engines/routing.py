"""Parses the experts of tokens as engines encode them: base64, one row of numbers per token."""

from __future__ import annotations

import base64
import binascii
import io
import logging
from typing import Any

import numpy as np

from polar.models.completion import Routing

log = logging.getLogger(__name__)


def from_npy(text: str, rows: int, width: int | None) -> Routing | None:
    """vLLM's format: a numpy file of [tokens, layers, experts]. `width`: numbers per token, if known."""
    try:
        told = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        log.warning("an engine told experts that cannot be read: %s", error)
        return None
    return _compact(told, rows, width)


def from_numbers(text: str, rows: int, width: int | None) -> Routing | None:
    """SGLang's format: bare numbers of four bytes each. The layer count is not included, so all experts of a
    token stand in one layer until a reader that knows the number per layer separates them."""
    try:
        told = np.frombuffer(base64.b64decode(text), "<i4").reshape(rows, 1, width or -1)
    except (binascii.Error, ValueError) as error:
        log.warning("an engine told experts of other tokens than it sampled: %s", error)
        return None
    return _compact(told, rows, width)


def _compact(told: np.ndarray[Any, np.dtype[Any]], rows: int, width: int | None) -> Routing | None:
    """The smallest type that holds the numbers; None if they do not fit the tokens."""
    is_whole = told.ndim == 3 and len(told) == rows and told[0].size == (width or told[0].size)
    if not told.size or not is_whole or told.dtype.kind not in "iu":
        log.warning("an engine told the experts of %s %s for %d tokens", told.dtype, told.shape, rows)
        return None
    if told.min() < 0 or told.max() > np.iinfo(np.uint16).max:
        log.warning("an engine told experts that have no number: %d to %d", told.min(), told.max())
        return None
    return told.astype(np.uint8 if told.max() <= np.iinfo(np.uint8).max else np.uint16)
