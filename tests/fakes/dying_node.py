"""A node's process that dies, and is started again when a test lets it."""

from __future__ import annotations

import asyncio

import pytest

from polar.app import node_processes
from polar.app.node_processes import NodeProcess
from polar.errors import Backoff


class DyingNode:
    """Stands in for a node's process: the first dies at once, the next lives until it is terminated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts = 0
        self.starting, self.gate = asyncio.Event(), asyncio.Event()
        self.failure: Exception | None = None
        self._is_alive = False
        self._ended = asyncio.Event()
        self._ended.set()
        monkeypatch.setattr(node_processes, "RESTARTS", Backoff(0.0, 60.0))
        for name in ("start", "ended", "terminate"):
            monkeypatch.setattr(NodeProcess, name, getattr(self, name))

    async def start(self) -> None:
        self.starts += 1
        if self.starts > 1:
            self.starting.set()
            await self.gate.wait()
            if self.failure is not None and self.starts == 2:
                raise self.failure
            self._is_alive = True
            self._ended.clear()

    async def ended(self) -> int:
        await self._ended.wait()
        return 1

    def terminate(self) -> None:
        if self._is_alive:
            self._ended.set()
