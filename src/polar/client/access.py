"""Tokens and callbacks: what a client asks about who may do what and who is told."""

from __future__ import annotations

from collections.abc import AsyncIterator

from polar.client.connection import Connection, segment
from polar.models.access import MadeToken, NewToken, Role, TokenPage, TokenView
from polar.models.callback import CallbackPage, CallbackStatus, CallbackView


class AccessCalls(Connection):
    """For admins, and callbacks for trainers."""

    async def tokens(self) -> tuple[TokenView, ...]:
        """All tokens that were ever made, without their secrets."""
        return (await self._get("/tokens", TokenPage)).tokens

    async def create_token(self, name: str, role: Role, *, expires_seconds: float | None = None) -> MadeToken:
        """Make a token; its secret is in the answer and nowhere else."""
        asked = NewToken(name=name, role=role, expires_seconds=expires_seconds)
        return await self._post("/tokens", asked, MadeToken)

    async def revoke_token(self, name_or_id: str) -> tuple[TokenView, ...]:
        """End one token by its id, or all of a name."""
        return (await self._post(f"/tokens/{segment(name_or_id)}/revoke", None, TokenPage)).tokens

    async def callbacks(
        self, status: CallbackStatus | None = None, task_id: str | None = None
    ) -> AsyncIterator[CallbackView]:
        """What was to be told, and how far that is, newest first."""
        query = {"status": status, "task_id": task_id}
        async for page in self._pages("/callbacks", CallbackPage, query, cursor="before"):
            for view in page.callbacks:
                yield view

    async def retry_callback(self, id: str) -> CallbackView:
        """Try a callback again now, also one that was given up."""
        return await self._post(f"/callbacks/{segment(id)}/retry", None, CallbackView)
