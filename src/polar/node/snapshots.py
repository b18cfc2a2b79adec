"""Prepared workspaces that the samples of a task share, so that its prepare steps run once a node."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from polar.models.task import TaskSpec
from polar.runtimes.base import Host, Runtime

KEPT = 16
"""How many snapshots are kept that no session uses at the moment."""


@dataclass(slots=True, eq=False)
class Entry:
    """The snapshot of one preparation; whoever finds none holds the lock while it makes one."""

    name: str
    runtime: Runtime
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_made: bool = False
    users: int = 0


class Snapshots:
    """The snapshots of a node; those that no session has used for longest go first."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._made = 0

    @asynccontextmanager
    async def use(self, task: TaskSpec, runtime: Runtime) -> AsyncIterator[Entry]:
        """The entry of this task's preparation; its snapshot stays while the block runs."""
        key = _key(task)
        entry = self._entries.get(key)
        if entry is None:
            self._made += 1
            entry = self._entries[key] = Entry(str(self._made), runtime)
        entry.users += 1
        self._entries.move_to_end(key)
        try:
            yield entry
        finally:
            entry.users -= 1
            await self._forget_unused(KEPT)

    async def close(self) -> None:
        """Remove all; no session uses one any more."""
        await self._forget_unused(0)

    async def _forget_unused(self, kept: int) -> None:
        unused = [key for key, entry in self._entries.items() if not entry.users]
        for key in unused[: max(0, len(unused) - kept)]:
            entry = self._entries.pop(key)
            if entry.is_made:
                await entry.runtime.discard(entry.name, self._host)


def _key(task: TaskSpec) -> str:
    """Equal for tasks whose sandboxes begin alike."""
    document = task.model_dump_json(include={"runtime", "files", "prepare"})
    return hashlib.sha256(document.encode()).hexdigest()
