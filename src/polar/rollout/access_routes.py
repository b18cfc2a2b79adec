"""The REST API of tokens, the audit log and callbacks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from polar.models.access import AuditPage, MadeToken, NewToken, Rotation, TokenPage
from polar.models.callback import CallbackPage, CallbackStatus, CallbackView
from polar.rollout.gate import caller_of
from polar.rollout.keys import Keys
from polar.rollout.service import RolloutService
from polar.store.audit import Audit, AuditFilter
from polar.store.tokens import Tokens

Limit = Annotated[int, Query(ge=1, le=1000, description="How many a page holds, at most.")]
Before = Annotated[str | None, Query(description="The `next` of the page before.")]


def add_callback_routes(router: APIRouter, service: RolloutService) -> None:
    """What those who wait for callbacks ask."""

    @router.get("/callbacks")
    async def list_callbacks(
        status: CallbackStatus | None = None,
        task_id: Annotated[str | None, Query(description="Only of this task.")] = None,
        limit: Limit = 100,
        before: Before = None,
    ) -> CallbackPage:
        """What was to be told and how far that is, newest first."""
        return await service.store.callbacks.page(status=status, task_id=task_id, limit=limit, before=before)

    @router.post("/callbacks/{callback_id}/retry")
    async def retry_callback(callback_id: str) -> CallbackView:
        """Try a callback again now, also one that was given up; one that was delivered stays as it is."""
        return await service.retry_callback(callback_id)


def add_access_routes(router: APIRouter, keys: Keys, tokens: Tokens, audit: Audit) -> None:
    """What admins ask."""

    @router.get("/tokens")
    async def list_tokens() -> TokenPage:
        """All tokens that were ever made, without their secrets."""
        return TokenPage(tokens=await tokens.all())

    @router.post("/tokens", status_code=201)
    async def create_token(body: NewToken, request: Request) -> MadeToken:
        """Make a token; the answer holds its secret, which is shown this once."""
        caller_of(request).about = f"{body.name} ({body.role.value})"
        return await tokens.create(body)

    @router.post("/tokens/{name}/rotate")
    async def rotate_token(name: str, body: Rotation) -> MadeToken:
        """Make a token that takes the place of another, which goes on for the overlap."""
        made = await tokens.rotate(name, body)
        keys.forget()
        return made

    @router.post("/tokens/{name}/revoke")
    async def revoke_token(name: str) -> TokenPage:
        """End a token by its id, or all of a name, at once."""
        revoked = await tokens.revoke(name)
        keys.forget()
        return TokenPage(tokens=revoked)

    @router.get("/audit")
    async def list_audit(
        actor: Annotated[str | None, Query(description="Only of tokens of this name.")] = None,
        action: Annotated[str | None, Query(description="Only this operation.")] = None,
        object: Annotated[str | None, Query(description="Only about this.")] = None,
        since: Annotated[float | None, Query(description="Only from then on, Unix seconds.")] = None,
        refused: Annotated[bool, Query(description="Only what was not done.")] = False,
        limit: Limit = 100,
        before: Before = None,
    ) -> AuditPage:
        """What was asked and by whom, newest first."""
        wanted = AuditFilter(actor=actor, action=action, object=object, since=since, refused=refused)
        return await audit.page(wanted, limit=limit, before=before)
