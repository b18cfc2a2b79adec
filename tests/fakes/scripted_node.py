"""A node's side of policy updates, whose test says when it follows an order and when it fails to."""

from __future__ import annotations

import asyncio

from polar.client import AsyncClient
from polar.models.policy import PolicyOrder, PolicyReport


class ScriptedNode:
    """Asks for orders as `PolicyFollower` does; the test says when they are followed."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        self.error: str | None = None
        """Why it cannot follow, told with every report."""
        self._next: PolicyOrder | None = None
        """What the answer to the last report brought, if that was new."""
        self.order: PolicyOrder

    async def report(self, wait: float = 0.0) -> PolicyOrder:
        order = getattr(self, "order", None)
        report = PolicyReport(
            step=order.step if order else -1,
            version=order.version if order and self.error is None else 0,
            error=self.error,
            wait_seconds=wait,
        )
        self.order = await self._client.follow_policy(self._name, report)
        return self.order

    async def follow(self, error: str | None = None) -> PolicyOrder:
        """Take the next order that is new, and report that it is followed, or why it is not."""
        async with asyncio.timeout(30):
            taken = self._next or await self.report(wait=10)
            # Told again with every report until there is another order, as a node does: one told once could
            # be overwritten before anybody has read it.
            self.error = error
            answer = await self.report()
        self._next = answer if answer.step != taken.step else None
        return taken
