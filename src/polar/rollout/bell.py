"""Wakes everyone who waits for something to happen in this process."""

from __future__ import annotations

import asyncio


class Bell:
    """Whoever listens before looking cannot miss a ring that comes between the look and the wait."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def listen(self) -> asyncio.Event:
        """Set by the first ring from now on."""
        return self._next

    def ring(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
