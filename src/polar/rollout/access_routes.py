"""The REST API of tokens and callbacks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from polar.models.access import MadeToken, NewToken, TokenPage
from polar.models.callback import CallbackPage, CallbackStatus, CallbackView
from polar.rollout.access import ADMINS, TRAINERS, allow, caller_of
from polar.rollout.service import RolloutService
from polar.rollout.tokens import Authenticator
from polar.store.tokens import Tokens

Limit = Annotated[int, Query(ge=1, le=1000, description="How many a page holds, at most.")]
Before = Annotated[str | None, Query(description="The `next` of the page before.")]


def add_callback_routes(router: APIRouter, service: RolloutService) -> None:
    """What those who wait for callbacks ask."""

    @router.get("/callbacks", dependencies=[allow(TRAINERS)])
    async def list_callbacks(
        status: CallbackStatus | None = None,
        task_id: Annotated[str | None, Query(description="Only of this task.")] = None,
        limit: Limit = 100,
        before: Before = None,
    ) -> CallbackPage:
        """What was to be told and how far that is, newest first."""
        return await service.store.callbacks.page(status=status, task_id=task_id, limit=limit, before=before)

    @router.post("/callbacks/{callback_id}/retry", dependencies=[allow(TRAINERS)])
    async def retry_callback(callback_id: str) -> CallbackView:
        """Try a callback again now, also one that was given up; one that was delivered stays as it is."""
        return await service.retry_callback(callback_id)


def add_access_routes(router: APIRouter, authenticator: Authenticator, tokens: Tokens) -> None:
    """What admins ask."""

    @router.get("/tokens", dependencies=[allow(ADMINS)])
    async def list_tokens() -> TokenPage:
        """All tokens that were ever made, without their secrets."""
        return TokenPage(tokens=await tokens.all())

    @router.post("/tokens", status_code=201, dependencies=[allow(ADMINS)])
    async def create_token(body: NewToken, request: Request) -> MadeToken:
        """Make a token; the answer holds its secret, which is shown this once."""
        caller_of(request).about = f"{body.name} ({body.role.value})"
        return await tokens.create(body)

    @router.post("/tokens/{name}/revoke", dependencies=[allow(ADMINS)])
    async def revoke_token(name: str) -> TokenPage:
        """End a token by its id, or all of a name, at once."""
        revoked = await tokens.revoke(name)
        authenticator.clear_cache()
        return TokenPage(tokens=revoked)
