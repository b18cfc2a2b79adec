"""Wakes everyone who waits for something to happen in this process."""

from __future__ import annotations

import asyncio


class Notifier:
    """Listen before you look: a notification that comes between the look and the wait is not missed."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def listen(self) -> asyncio.Event:
        """The event that the next notification sets."""
        return self._next

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
