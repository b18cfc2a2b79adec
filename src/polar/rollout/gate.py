"""The gate before every route: who may pass, and how much they may carry."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polar.rollout.problems import problem

OPEN_PATHS = frozenset({"/api/v1/health", "/api/v1/openapi.json"})
"""Answered without a token: they show no task and no secret."""


class Gate:
    """Checks the bearer token before anything of the request is read, then counts what is."""

    def __init__(self, app: ASGIApp, token: str, max_body_bytes: int, max_recording_bytes: int) -> None:
        self._app = app
        self._token = token.encode()
        self._max_body_bytes = max_body_bytes
        self._max_recording_bytes = max_recording_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if scope["path"] not in OPEN_PATHS and not self._is_authorized(headers):
            refusal = problem(
                401,
                "unauthorized",
                "this needs the control plane's bearer token (file `token` in its data directory)",
                {"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        limit = self._limit(scope)
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            await problem(413, "too_large", f"the body may have at most {limit} bytes")(scope, receive, send)
            return
        await self._app(scope, _counted(receive, limit), send)

    def _is_authorized(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        matches = secrets.compare_digest(given.strip().encode(), self._token)
        return matches and scheme.lower() == "bearer"

    def _limit(self, scope: Scope) -> int:
        is_recording = scope["method"] == "PUT" and scope["path"].endswith("/recording")
        return self._max_recording_bytes if is_recording else self._max_body_bytes


def _counted(receive: Receive, limit: int) -> Receive:
    """A body without a declared length is refused once it has become too long."""
    taken = 0

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > limit:
            raise HTTPException(413, f"the body may have at most {limit} bytes")
        return message

    return counted
