"""Uploads what came of a node's sessions: one request at a time, with all that became ready meanwhile."""

from __future__ import annotations

import asyncio

from polar.client.async_client import AsyncClient, size_of
from polar.errors import Unavailable
from polar.models.delivery import Delivery

MOST_TOGETHER = 64
MOST_BYTES = 16 << 20
"""The most deliveries in one request, and the most bytes of them. A larger delivery travels alone."""


class ResultUploader:
    """`await uploader.deliver(delivery)` returns when it is stored, and raises if it is refused."""

    def __init__(self, client: AsyncClient, node: str) -> None:
        self._client = client
        self._node = node
        self._turn = asyncio.Lock()
        self._next: tuple[list[Delivery], asyncio.Task[list[Exception | None]]] | None = None
        """What is gathered while a request is under way, and the task that will send it."""
        self._bytes = 0

    async def deliver(self, delivery: Delivery) -> None:
        size = size_of(delivery.recording) + size_of(delivery.artifacts)
        if size > MOST_BYTES:
            problem = await self._deliver_alone(delivery)
        else:
            problem = await self._deliver_with_others(delivery, size)
        if problem is not None:
            raise problem

    async def _deliver_with_others(self, delivery: Delivery, size: int) -> Exception | None:
        is_full = self._next is not None and len(self._next[0]) == MOST_TOGETHER
        if self._next is None or is_full or self._bytes + size > MOST_BYTES:
            gathered: list[Delivery] = []
            self._next = gathered, asyncio.create_task(self._send(gathered))
            self._bytes = 0
        gathered, sending = self._next
        gathered.append(delivery)
        place, self._bytes = len(gathered) - 1, self._bytes + size
        # A caller that stops waiting stops no other; what it delivered may be stored.
        return (await asyncio.shield(sending))[place]

    async def _deliver_alone(self, delivery: Delivery) -> Exception | None:
        try:
            (problem,) = await self._client.deliver(self._node, [delivery])
        except Exception as error:
            return error
        return problem

    async def _send(self, gathered: list[Delivery]) -> list[Exception | None]:
        async with self._turn:
            if self._next is not None and self._next[0] is gathered:
                self._next = None
            try:
                return [*await self._client.deliver(self._node, gathered)]
            except Unavailable:
                raise
            except Exception:
                # One of them may be what cannot be sent, read or stored: the others must not fail with it.
                return [await self._deliver_alone(delivery) for delivery in gathered]
