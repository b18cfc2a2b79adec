"""Bounded pools for the stages of a session, and the one seat a session holds in them."""

from __future__ import annotations

import asyncio
from types import TracebackType

from polar.config.settings import NodeSettings


class Pool:
    """A stage with a limited number of places."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.occupied = 0
        self._places = asyncio.Semaphore(size)

    @property
    def free(self) -> int:
        return self.size - self.occupied

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

    A session holds a READY place from its lease on, so that nothing is prepared for which there
    is no room; it keeps its RUN slot until POSTRUN has room: pressure travels backwards.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self.init = Pool("init", settings.init_workers)
        self.ready = Pool("ready", settings.ready_buffer)
        self.run = Pool("run", settings.run_slots)
        self.postrun = Pool("postrun", settings.postrun_workers)


class Seat:
    """The place a session holds; moving takes the next before it gives up the last, leaving frees it once."""

    def __init__(self, taken: Pool) -> None:
        self._pool: Pool | None = taken

    async def move(self, pool: Pool) -> None:
        await pool.enter()
        self._release()
        self._pool = pool

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.leave()
            self._pool = None

    def __enter__(self) -> Seat:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._release()
