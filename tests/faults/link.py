"""A TCP link between two parts that can be cut, slowed, frozen, or made to repeat requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import Self

Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]

SLOWEST_SECONDS = 0.3
"""How long a slow link holds a piece of data back."""
REPEATED_WITHIN_SECONDS = 1.0
"""How late the copy of a request may come."""
COPY_SECONDS = 1.5
"""How long the answer to a copy is waited for before its connection is dropped."""
BROKEN = (OSError, EOFError)


class Condition(StrEnum):
    """How a link is."""

    CLEAR = "clear"
    CUT = "cut"
    """Connections break, new ones are refused."""
    SLOW = "slow"
    FROZEN = "frozen"
    """Connections stay and carry nothing: half open to both sides. They break when the link recovers."""
    REPEATING = "repeating"
    """Every request comes twice, the copy some time later and on a connection of its own."""


class Link:
    """Listens on a port of its own and passes on what comes to wherever `reach` connects to."""

    def __init__(self, reach: Callable[[], Awaitable[Opened]], *, carries_http: bool) -> None:
        self._reach = reach
        self._carries_http = carries_http
        self._condition = Condition.CLEAR
        self._chance = random.Random(0)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def become(self, condition: Condition) -> None:
        if Condition.CUT in (condition, self._condition) or self._condition is Condition.FROZEN:
            for writer in self._writers:
                writer.transport.abort()
        self._condition = condition

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._begin(self._carry(reader, writer))

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        try:
            if self._condition is Condition.CUT:
                return
            with suppress(*BROKEN):
                far_reader, far_writer = await self._reach()
                ends.add(far_writer)
                self._writers |= ends
                onward = _requests(reader) if self._carries_http else _pieces(reader)
                async with asyncio.TaskGroup() as directions:
                    directions.create_task(self._pass_on(onward, far_writer, repeats=self._carries_http))
                    directions.create_task(self._pass_on(_pieces(far_reader), writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pass_on(
        self, pieces: AsyncIterator[bytes], writer: asyncio.StreamWriter, *, repeats: bool = False
    ) -> None:
        with suppress(*BROKEN):
            async for piece in pieces:
                if self._condition is Condition.FROZEN:
                    continue
                if self._condition is Condition.SLOW:
                    await asyncio.sleep(self._chance.uniform(0, SLOWEST_SECONDS))
                if repeats and self._condition is Condition.REPEATING:
                    self._begin(self._repeat(piece))
                writer.write(piece)
                await writer.drain()
        # What one side has ended is over for both.
        writer.close()

    async def _repeat(self, request: bytes) -> None:
        await asyncio.sleep(self._chance.uniform(0, REPEATED_WITHIN_SECONDS))
        with suppress(*BROKEN, TimeoutError):
            reader, writer = await self._reach()
            try:
                writer.write(request)
                async with asyncio.timeout(COPY_SECONDS):
                    await reader.read(1)
            finally:
                writer.transport.abort()


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Whole requests; their bodies have a declared length."""
    with suppress(asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [
                int(line.partition(b":")[2])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            ]
            yield head + await reader.readexactly(sum(lengths))
