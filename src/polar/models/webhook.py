"""Webhooks: where a task wants its results sent, and how far the server is with that."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from polar.models.component import Frozen


class WebhookEvent(StrEnum):
    SESSION_ENDED = "session_ended"
    """A session has ended; sent with its result."""
    TASK_ENDED = "task_ended"
    """Every session of the task has ended."""


def _plain_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must begin with https:// or http:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no user or password: it is shown; the signature tells who calls")
    if parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("must have no fragment, space or control character, and be ASCII")
    _ = parts.port  # ValueError if it is none
    return url


class Webhook(Frozen):
    """Where a task's results are sent, and on which events."""

    url: Annotated[str, Field(max_length=2048), AfterValidator(_plain_url)]
    """Its host must be listed in the server's `server.webhooks.allow`."""
    events: tuple[WebhookEvent, ...] = Field(default=(WebhookEvent.SESSION_ENDED,), min_length=1)
    """Which events are sent."""


class WebhookView(Frozen):
    """A URL that tasks name, and how far it has followed the feed of results."""

    url: str
    """Where notices are sent."""
    lag: int
    """How many results of its tasks are not delivered yet."""
    lag_seconds: float
    """How long the oldest of them has waited."""
    failures: int
    """How many attempts in a row have failed."""
    error: str | None = None
    """What went wrong with the last attempt; None: it was delivered."""
    retry_at: float | None = None
    """When it is tried again after a failure, Unix seconds."""
    delivered_at: float | None = None
    """When it was last delivered to, Unix seconds."""


class WebhookList(Frozen):
    webhooks: tuple[WebhookView, ...]
