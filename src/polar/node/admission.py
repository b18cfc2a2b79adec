"""Whether a node takes more sessions: not while its disk is short, nor while everything fails on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from polar.config.settings import NodeSettings
from polar.models.session import FailureReason, SessionResult, SessionStatus
from polar.models.views import MOST_AVOIDED, MOST_LEASES
from polar.runtimes.disk import free_bytes

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often a node that takes nothing looks whether it may again."""
FEWEST_TASKS = 2
"""How many tasks must have failed sessions for it to be the node's fault: one task may be wrong itself."""
LONGEST_PAUSE = 4.0
"""How many times longer than at first a node pauses whose trials keep failing."""


class Breaker:
    """Opens when sessions fail in a row for infrastructure reasons; then one at a time is tried."""

    def __init__(self, failures: int, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._seconds = seconds
        self._now = now
        self._tasks: list[str] = []
        """The tasks of the sessions that failed in a row."""
        self._pauses = 0
        self._opens_at: float | None = None
        """When the next trial may begin; None: the breaker is closed."""
        self._trials: set[str] = set()
        """Leases that began while it was open."""
        self.reason: str | None = None
        """Why it is open."""

    def allowed(self) -> int:
        """How many sessions may be begun now."""
        if self._opens_at is None:
            return MOST_LEASES
        return 1 if self._now() >= self._opens_at and not self._trials else 0

    @property
    def suspects(self) -> tuple[str, ...]:
        """Tasks of which a trial would tell little, while the breaker is open: theirs failed here before."""
        return tuple(dict.fromkeys(self._tasks))[-MOST_AVOIDED:] if self.reason else ()

    def began(self, lease: str) -> None:
        if self._opens_at is not None:
            self._trials.add(lease)

    def ended(self, lease: str, task_id: str, result: SessionResult | None) -> None:
        """Take notice of a session that has left the node; None: it was given back, or is another's."""
        self._trials.discard(lease)
        if result is None or result.status is SessionStatus.CANCELLED:
            return
        if result.failure is FailureReason.INFRASTRUCTURE:
            self._failed(task_id, result.error or "no reason given")
        else:
            self._close()

    def _failed(self, task_id: str, error: str) -> None:
        self._tasks.append(task_id)
        if len(self._tasks) < self._most or len(set(self._tasks)) < FEWEST_TASKS:
            return
        if self._opens_at is not None and self._now() < self._opens_at:
            return  # It began before the breaker opened.
        pause = min(self._seconds * 2.0**self._pauses, self._seconds * LONGEST_PAUSE)
        self._opens_at = self._now() + pause
        self._pauses += 1
        self.reason = f"sessions failed here in a row ({len(self._tasks)}), the last with: {error}"

    def _close(self) -> None:
        self._tasks.clear()
        self._pauses = 0
        self._opens_at = self.reason = None


class Admission:
    """What a node asks before it asks for work."""

    def __init__(self, settings: NodeSettings, directory: Path, changed: Callable[[], None]) -> None:
        """`changed` is called whenever the node begins or ceases to be in trouble."""
        self._reserve = settings.disk_reserve_bytes
        self._directory = directory
        self._changed = changed
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_seconds)
        self.trouble: str | None = None
        """Why no more sessions are taken; None: they are."""

    async def allowed(self) -> int:
        """How many sessions may be begun; waits until there is one."""
        while True:
            shortage = self._shortage()
            self._tell(shortage or self.breaker.reason)
            if not shortage and (allowed := self.breaker.allowed()):
                return allowed
            await asyncio.sleep(LOOK_SECONDS)

    def ended(self, lease: str, task_id: str, result: SessionResult | None) -> None:
        self.breaker.ended(lease, task_id, result)
        self._tell(self._shortage() or self.breaker.reason)

    def _shortage(self) -> str | None:
        free = free_bytes(self._directory)
        if free >= self._reserve:
            return None
        return (
            f"only {free / 2**30:.1f} GiB of disk space are left below {self._directory}, less than"
            f" node.disk_reserve_bytes ({self._reserve / 2**30:.1f} GiB)"
        )

    def _tell(self, trouble: str | None) -> None:
        if trouble == self.trouble:
            return
        if trouble is None:
            log.info("this node takes sessions again")
        elif self.trouble is None or self._kind(trouble) != self._kind(self.trouble):
            log.error("this node takes no more sessions for now: %s", trouble)
        is_new = (trouble is None) != (self.trouble is None)
        self.trouble = trouble
        if is_new:
            self._changed()

    @staticmethod
    def _kind(trouble: str) -> str:
        """A shortage is told once, not whenever a byte more is missing."""
        return trouble.partition(" ")[0]
