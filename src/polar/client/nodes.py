"""Nodes: what both clients ask about them, and what a node asks for itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from polar.client import calls
from polar.client.calls import Call
from polar.models.dashboard import NodeOverview
from polar.models.policy import PolicyOrder, PolicyReport
from polar.models.session import LeaseKey
from polar.models.views import (
    Deliveries,
    DeliveryOutcome,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Joined,
    LeaseRequest,
    Leases,
    Release,
    ResultPost,
)

T = TypeVar("T")


class NodeCalls(ABC):
    """For programs that do not use asyncio."""

    @abstractmethod
    def _send(self, call: Call[T]) -> T: ...

    def nodes(self) -> tuple[NodeOverview, ...]:
        """The nodes that report or hold sessions, and how full they are."""
        return self._send(calls.nodes()).nodes

    def drain_node(self, name: str) -> NodeOverview:
        """Have a node leased nothing more; it finishes what it holds."""
        return self._send(calls.drain_node(name))

    def resume_node(self, name: str) -> NodeOverview:
        """Have a drained node leased sessions again."""
        return self._send(calls.resume_node(name))


class AsyncNodeCalls(ABC):
    """For those that do, and for nodes."""

    @abstractmethod
    async def _send(self, call: Call[T]) -> T: ...

    async def nodes(self) -> tuple[NodeOverview, ...]:
        """The nodes that report or hold sessions, and how full they are."""
        return (await self._send(calls.nodes())).nodes

    async def drain_node(self, name: str) -> NodeOverview:
        """Have a node leased nothing more; it finishes what it holds."""
        return await self._send(calls.drain_node(name))

    async def resume_node(self, name: str) -> NodeOverview:
        """Have a drained node leased sessions again."""
        return await self._send(calls.resume_node(name))

    async def join(self, node: str, join: Join) -> Joined:
        return await self._send(calls.join(node, join))

    async def follow_policy(self, node: str, report: PolicyReport) -> PolicyOrder:
        return await self._send(calls.follow_policy(node, report))

    async def lease(self, node: str, request: LeaseRequest) -> Leases:
        return await self._send(calls.lease(node, request))

    async def heartbeat(self, node: str, beat: Heartbeat) -> HeartbeatAnswer:
        return await self._send(calls.heartbeat(node, beat))

    async def put_recording(self, session_id: str, key: LeaseKey, data: bytes | Path) -> None:
        return await self._send(calls.put_recording(session_id, key, data))

    async def put_artifacts(self, session_id: str, key: LeaseKey, data: bytes | Path) -> None:
        return await self._send(calls.put_artifacts(session_id, key, data))

    async def post_result(self, session_id: str, post: ResultPost) -> None:
        return await self._send(calls.post_result(session_id, post))

    async def deliver(
        self, node: str, deliveries: Deliveries, parts: Iterable[bytes] = ()
    ) -> tuple[DeliveryOutcome, ...]:
        """Deliver several sessions at once; `parts` are the bytes they speak of. See `Courier`."""
        return (await self._send(calls.deliver(node, deliveries, parts))).outcomes

    async def release(self, session_id: str, given_back: Release) -> None:
        return await self._send(calls.release(session_id, given_back))
