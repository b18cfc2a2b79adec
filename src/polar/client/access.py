"""Tokens and callbacks: what both clients ask about who may do what and who is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

from polar.client import calls
from polar.client.calls import Call
from polar.models.access import MadeToken, NewToken, Role, TokenView
from polar.models.callback import CallbackPage, CallbackStatus, CallbackView

T = TypeVar("T")


class AccessCalls(ABC):
    """For programs that do not use asyncio."""

    @abstractmethod
    def _send(self, call: Call[T]) -> T: ...

    def tokens(self) -> tuple[TokenView, ...]:
        """All tokens that were ever made, without their secrets."""
        return self._send(calls.tokens()).tokens

    def create_token(self, name: str, role: Role, *, expires_seconds: float | None = None) -> MadeToken:
        """Make a token; its secret is in the answer and nowhere else."""
        return self._send(calls.create_token(NewToken(name=name, role=role, expires_seconds=expires_seconds)))

    def revoke_token(self, name_or_id: str) -> tuple[TokenView, ...]:
        """End one token by its id, or all of a name."""
        return self._send(calls.revoke_token(name_or_id)).tokens

    def callbacks(
        self, status: CallbackStatus | None = None, task_id: str | None = None
    ) -> Iterator[CallbackView]:
        """What was to be told, and how far that is, newest first."""
        before: str | None = ""
        while before is not None:
            page = self._send(calls.callbacks(before, status, task_id))
            yield from page.callbacks
            before = page.next

    def retry_callback(self, id: str) -> CallbackView:
        """Try a callback again now, also one that was given up."""
        return self._send(calls.retry_callback(id))


class AsyncAccessCalls(ABC):
    """The same for asyncio."""

    @abstractmethod
    async def _send(self, call: Call[T]) -> T: ...

    async def tokens(self) -> tuple[TokenView, ...]:
        """All tokens that were ever made, without their secrets."""
        return (await self._send(calls.tokens())).tokens

    async def create_token(self, name: str, role: Role, *, expires_seconds: float | None = None) -> MadeToken:
        """Make a token; its secret is in the answer and nowhere else."""
        asked = NewToken(name=name, role=role, expires_seconds=expires_seconds)
        return await self._send(calls.create_token(asked))

    async def revoke_token(self, name_or_id: str) -> tuple[TokenView, ...]:
        """End one token by its id, or all of a name."""
        return (await self._send(calls.revoke_token(name_or_id))).tokens

    async def callbacks(
        self, status: CallbackStatus | None = None, task_id: str | None = None
    ) -> AsyncIterator[CallbackView]:
        """What was to be told, and how far that is, newest first."""
        before: str | None = ""
        while before is not None:
            page: CallbackPage = await self._send(calls.callbacks(before, status, task_id))
            for view in page.callbacks:
                yield view
            before = page.next

    async def retry_callback(self, id: str) -> CallbackView:
        """Try a callback again now, also one that was given up."""
        return await self._send(calls.retry_callback(id))
