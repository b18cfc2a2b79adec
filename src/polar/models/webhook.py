"""Webhooks: receivers of a task's results, and their progress."""

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
    """A receiver of a task's results, and its events."""

    url: Annotated[str, Field(max_length=2048), AfterValidator(_plain_url)]
    """Its host must be listed in the server's `server.webhooks.allow`."""
    events: tuple[WebhookEvent, ...] = Field(default=(WebhookEvent.SESSION_ENDED,), min_length=1)
    """Events to send."""


class WebhookView(Frozen):
    """A receiver that tasks name, and its position in the feed of results."""

    url: str
    """Address of the receiver."""
    lag: int
    """Number of undelivered results."""
    lag_seconds: float
    """Seconds that the oldest has waited."""
    failures: int
    """Consecutive failed attempts."""
    error: str | None = None
    """Error of the last attempt; None if it succeeded."""
    retry_at: float | None = None
    """Unix seconds of the next attempt after a failure."""
    delivered_at: float | None = None
    """Unix seconds of the last delivery."""


class WebhookList(Frozen):
    webhooks: tuple[WebhookView, ...]
