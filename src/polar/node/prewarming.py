"""A fresh sandbox for the evaluator, made while the agent still runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Self

from polar.runtimes.base import Sandbox

Make = Callable[[], AbstractAsyncContextManager[Sandbox]]


class Prewarmed:
    """Hands out the sandbox that was begun early, then ones made on demand; all end with the context."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._stack = AsyncExitStack()
        self._early: asyncio.Task[Sandbox] | None = None

    def begin(self) -> None:
        """Start making one now; that it fails is told to whoever takes it."""
        self._early = asyncio.create_task(self._stack.enter_async_context(self._make()))

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        early, self._early = self._early, None
        if early is None:
            async with self._make() as made:
                yield made
        else:
            yield await early

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if self._early is not None:
            self._early.cancel()
            await asyncio.wait({self._early})
            if not self._early.cancelled():
                self._early.exception()
        await self._stack.aclose()
