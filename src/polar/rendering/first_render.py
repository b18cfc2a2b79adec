"""Ids of texts that come again: a harness sends the same system prompt and tools in every session.

Templates are tokenised piece by piece, between control tokens that no merge crosses. The ids of a piece
depend on its text alone, so keeping them by that text is exact for every family.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

import numpy as np

from polar.models.completion import Ids

_WORTH_KEEPING = 512
"""Characters; shorter texts are tokenised as fast as they are found."""
_ROOM = 16 * 1024 * 1024
"""Characters kept at most: with their ids about 32 MB of plain text."""
_SEEN = 65_536
"""How many texts are known to have come once."""


class KeptTexts:
    """Tokenises texts; long ones that come a second time are kept, the latest used longest.

    What comes once, such as the result of a tool, is not kept: it would push out what comes again.
    """

    def __init__(self, encode: Callable[[str], list[int]], room: int = _ROOM) -> None:
        self._encode = encode
        self._room = room
        self._used = 0
        self._kept: OrderedDict[str, Ids] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._lock = Lock()  # prompts are rendered in several threads

    def ids(self, text: str) -> list[int]:
        if len(text) < _WORTH_KEEPING:
            return self._encode(text)
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None:
                self._kept.move_to_end(text)
        if kept is not None:
            found: list[int] = kept.tolist()
            return found
        ids = self._encode(text)
        with self._lock:
            self._remember(text, ids)
        return ids

    def _remember(self, text: str, ids: list[int]) -> None:
        mark = hash(text)
        if mark not in self._seen:
            self._seen[mark] = None
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
            return
        if text in self._kept or len(text) > self._room:
            return
        self._kept[text] = np.array(ids, np.int32)
        self._used += len(text)
        while self._used > self._room:
            dropped, _ = self._kept.popitem(last=False)
            self._used -= len(dropped)
