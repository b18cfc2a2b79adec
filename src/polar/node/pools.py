"""Bounded pools for the stages of a session, and the one seat a session holds in them."""

from __future__ import annotations

import asyncio
import os

from polar.config.settings import NodeSettings
from polar.models.session import SessionStatus

_AGENTS_PER_CORE = 4
"""An agent waits for the model most of its time."""
_BYTES_PER_AGENT = 1 << 30
FEWEST_RUN_SLOTS = 2


class Pool:
    """A stage with a limited number of places."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.occupied = 0
        self._offered: list[Seat] = []
        """Places kept for sessions that the server has been asked for: occupied, and empty."""
        self._places = asyncio.Semaphore(size)

    @property
    def free(self) -> int:
        return self.size - self.occupied

    @property
    def sessions(self) -> int:
        return self.occupied - len(self._offered)

    async def free_seats(self) -> list[Seat]:
        """All that are free, after waiting for the first; those left in the list are on offer."""
        await self.enter()
        seats = self._offered = [Seat(self)]
        while self.free:
            await self.enter()
            seats.append(Seat(self))
        return seats

    async def enter(self) -> None:
        await self._places.acquire()
        self.occupied += 1

    def leave(self) -> None:
        self.occupied -= 1
        self._places.release()

    async def __aenter__(self) -> None:
        await self.enter()

    async def __aexit__(self, *_: object) -> None:
        self.leave()


class Pools:
    """INIT makes sandboxes, READY keeps them warm, RUN holds agents, POSTRUN scores.

    A session holds a READY place from its lease on, so that nothing is prepared for which there is no
    room and no INIT worker holds on to what it made; it keeps its RUN slot until POSTRUN has room:
    pressure travels backwards. Without a READY buffer it holds its RUN slot from the start.
    """

    def __init__(self, settings: NodeSettings) -> None:
        sizes = places(settings)
        self.init = Pool("init", sizes[SessionStatus.INIT])
        self.ready = Pool("ready", sizes[SessionStatus.READY])
        self.run = Pool("run", sizes[SessionStatus.RUNNING])
        self.postrun = Pool("postrun", sizes[SessionStatus.POSTRUN])

    @property
    def entrance(self) -> Pool:
        """Where a leased session takes its first seat."""
        return self.ready if self.ready.size else self.run

    @property
    def all(self) -> tuple[Pool, ...]:
        return self.init, self.ready, self.run, self.postrun


class Seat:
    """The place a session holds; moving takes the next before it gives up the last, leaving frees it once."""

    def __init__(self, taken: Pool) -> None:
        self._pool: Pool | None = taken

    async def move(self, pool: Pool) -> None:
        if pool is self._pool:
            return
        await pool.enter()
        self.leave()
        self._pool = pool

    def leave(self) -> None:
        if self._pool is not None:
            self._pool.leave()
            self._pool = None

    def __enter__(self) -> Seat:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def places(settings: NodeSettings) -> dict[SessionStatus, int]:
    """How many sessions each stage takes at once."""
    slots = settings.run_slots or _run_slots()
    return {
        SessionStatus.INIT: settings.init_workers or slots,
        SessionStatus.READY: slots if settings.ready_buffer is None else settings.ready_buffer,
        SessionStatus.RUNNING: slots,
        SessionStatus.POSTRUN: settings.postrun_workers or max(2, slots // 2),
    }


def _run_slots() -> int:
    """As many agents as this machine's cores and memory carry."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(
        FEWEST_RUN_SLOTS, min(_AGENTS_PER_CORE * len(os.sched_getaffinity(0)), memory // _BYTES_PER_AGENT)
    )
