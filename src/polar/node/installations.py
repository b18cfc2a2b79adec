"""Harnesses prepared once a node and shared by all its sessions."""

from __future__ import annotations

import asyncio

from polar.harnesses.base import Harness, Installation


class Installations:
    """Remembers what is installed; sessions that ask at once wait for one installation."""

    def __init__(self) -> None:
        self._done: dict[str, Installation] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, name: str, harness: Harness) -> Installation:
        if name in self._done:
            return self._done[name]
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._done:
                self._done[name] = await harness.install()
            return self._done[name]
