"""What happens now, as a stream of server-sent events: changes of sessions, and the overview after them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from polar.models.dashboard import Overview
from polar.store.store import Store

LOOK_SECONDS = 0.5
"""How often a stream looks for events; any server process may have written them."""
OVERVIEW_SECONDS = 1.0
"""For so long an overview is shown to all who ask; counting is then a matter of time, not of watchers."""
QUIET_SECONDS = 15.0
"""A stream in which nothing happens says so this often, so that nothing in between closes it."""
EVENTS_A_TIME = 200
CHANGES = 12
"""How many of the latest changes an overview holds."""


class Live:
    """The overview for everyone, and a stream for each who watches."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._latest: Overview | None = None
        self._taken = -OVERVIEW_SECONDS
        self._closing = asyncio.Event()

    async def overview(self) -> Overview:
        async with self._lock:
            now = time.monotonic()
            if self._latest is None or now - self._taken >= OVERVIEW_SECONDS:
                self._latest = await self._count()
                self._taken = now
            return self._latest

    async def stream(self, gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
        """Frames until the caller hangs up or the server closes; events begin with those after now."""
        cursor = await self._store.events.newest()
        spoke = time.monotonic()
        shown = await self.overview()
        yield _frame("overview", shown.model_dump_json())
        while not await gone() and not await self._is_closing():
            page = await self._store.events.after(cursor, limit=EVENTS_A_TIME)
            if page.events:
                cursor = page.cursor
                yield _frame("changes", page.model_dump_json())
            latest = await self.overview()
            if _without_times(latest) != _without_times(shown):
                shown = latest
                yield _frame("overview", shown.model_dump_json())
            elif not page.events:
                if time.monotonic() - spoke < QUIET_SECONDS:
                    continue
                yield ": quiet\n\n"
            spoke = time.monotonic()

    def stop(self) -> None:
        """End every stream."""
        self._closing.set()

    async def _is_closing(self) -> bool:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._closing.wait()
        except TimeoutError:
            return False
        return True

    async def _count(self) -> Overview:
        sessions, nodes, policy, minutes, changes = await asyncio.gather(
            self._store.sessions.counts(),
            self._store.nodes.all(),
            self._store.policy.view(),
            self._store.listing.minutes(),
            self._store.events.latest(CHANGES),
        )
        return Overview(
            at=time.time(), sessions=sessions, nodes=nodes, policy=policy, minutes=minutes, changes=changes
        )


def _without_times(overview: Overview) -> Overview:
    nodes = tuple(node.model_copy(update={"seconds_silent": 0.0}) for node in overview.nodes)
    policy = overview.policy.model_copy(update={"seconds_left": None})
    return overview.model_copy(update={"at": 0.0, "nodes": nodes, "policy": policy})


def _frame(event: str, data: str) -> str:
    return f"event: {event}\ndata: {data}\n\n"
