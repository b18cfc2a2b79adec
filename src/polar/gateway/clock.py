"""The wall time that a session was granted; the one place that counts it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class WallClock:
    """Runs from the session's opening until its time is spent or the clock is stopped."""

    def __init__(self, seconds: float | None, when_spent: Callable[[], None]) -> None:
        """`seconds` None: time without end."""
        self.seconds = seconds
        self.is_spent = False
        self._when_spent = when_spent
        self._timer: asyncio.TimerHandle | None = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._spend)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _spend(self) -> None:
        self.is_spent = True
        self._when_spent()
