"""Tokens and webhooks: what a client asks about who may do what, and where results are sent."""

from __future__ import annotations

from polar.client.connection import Connection, segment
from polar.models.access import MadeToken, NewToken, TokenPage, TokenRole, TokenView
from polar.models.webhook import WebhookList, WebhookView


class AccessCalls(Connection):
    """For admins, and webhooks for trainers."""

    async def tokens(self) -> tuple[TokenView, ...]:
        """All tokens that were ever made, without their secrets."""
        return (await self._get("/tokens", TokenPage)).tokens

    async def create_token(
        self, name: str, role: TokenRole, *, expires_seconds: float | None = None
    ) -> MadeToken:
        """Make a token; its secret is in the answer and nowhere else."""
        asked = NewToken(name=name, role=role, expires_seconds=expires_seconds)
        return await self._post("/tokens", asked, MadeToken)

    async def revoke_token(self, name_or_id: str) -> tuple[TokenView, ...]:
        """End one token by its id, or all of a name."""
        return (await self._post(f"/tokens/{segment(name_or_id)}/revoke", None, TokenPage)).tokens

    async def webhooks(self) -> tuple[WebhookView, ...]:
        """The URLs that results are sent to, and how far each has got."""
        return (await self._get("/webhooks", WebhookList)).webhooks
