"""The wall time that a session was granted; the one place that counts it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class WallClock:
    """Runs from the session's opening until its time is spent or the clock is stopped; a pause is no time."""

    def __init__(
        self, seconds: float | None, when_spent: Callable[[], None], *, is_paused: bool = False
    ) -> None:
        """`seconds` None: time without end."""
        self.seconds = seconds
        self.is_spent = False
        self._when_spent = when_spent
        self._left = seconds
        self._timer: asyncio.TimerHandle | None = None
        if not is_paused:
            self.resume()

    def pause(self) -> None:
        if self._timer is not None:
            self._left = max(self._timer.when() - asyncio.get_running_loop().time(), 0.0)
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        if self._timer is None and self._left is not None:
            self._timer = asyncio.get_running_loop().call_later(self._left, self._spend)

    def stop(self) -> None:
        self.pause()
        self._left = None
        # Whoever is told of the end holds the clock: together they would wait for the garbage collector.
        self._when_spent = _tell_nobody

    def _spend(self) -> None:
        self._left = self._timer = None
        self.is_spent = True
        self._when_spent()


def _tell_nobody() -> None:
    return
