"""Long-polls: a request that finds nothing is held back until there is something, or its time is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 1.0
"""How often a long-poll looks for what another server process wrote; our own writes wake it."""

Gone = Callable[[], Awaitable[bool]]
"""Whether the caller of a long-poll has hung up."""


class Notifier:
    """Wakes everyone in this process who waits for something to happen.

    Listen before you look: a notification that comes between the look and the wait is not missed.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._is_closed = False

    def listen(self) -> asyncio.Event:
        """The event that the next notification sets."""
        return self._next

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    def close(self) -> None:
        """Answer every long-poll now, and hold none back from now on."""
        self._is_closed = True
        self.notify()

    async def long_poll(
        self, look: Callable[[], Awaitable[T]], is_ready: Callable[[T], bool], wait_seconds: float, gone: Gone
    ) -> T:
        """Look immediately, on every notification and at least every second, until the answer is ready.

        After `wait_seconds`, or once the caller has hung up, the last answer is returned as it is.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            notified = self.listen()
            answer = await look()
            left = deadline - time.monotonic()
            if is_ready(answer) or left <= 0 or self._is_closed:
                return answer
            try:
                async with asyncio.timeout(min(left, POLL_SECONDS)):
                    await notified.wait()
            except TimeoutError:
                pass
            if await gone():
                return answer
