"""Telling others that something has ended: what a task asks for, what is sent, and how far that is."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from polar.models.component import Frozen


class CallbackEvent(StrEnum):
    SESSION_ENDED = "session_ended"
    """Told with the session's result."""
    TASK_ENDED = "task_ended"
    """Every session of the task has ended."""


class CallbackStatus(StrEnum):
    WAITING = "waiting"
    """For its first attempt, or for the next."""
    DELIVERED = "delivered"
    """Its receiver has taken it."""
    DEAD = "dead"
    """Given up; `polar callbacks retry` begins anew."""


def _plain_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must begin with https:// or http:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no user or password: it is shown; the signature tells who calls")
    if parts.fragment or any(character.isspace() or not character.isprintable() for character in url):
        raise ValueError("must have no fragment, space or control character")
    _ = parts.port  # ValueError if it is none
    return url


class Callback(Frozen):
    """Whom a task's owner wants told of what."""

    url: Annotated[str, Field(max_length=2048), AfterValidator(_plain_url)]
    """Its host must be listed in the server's `server.callbacks.allow`."""
    events: tuple[CallbackEvent, ...] = Field(default=(CallbackEvent.SESSION_ENDED,), min_length=1)
    """What to tell of."""


class CallbackView(Frozen):
    """One thing to tell, and how far that is."""

    id: str
    """The same at every attempt; its receiver gets it as `Polar-Delivery`."""
    task_id: str
    """Whose end, or a session of which, it tells of."""
    session_id: str | None
    """Of a session that ended; None: the task did."""
    event: CallbackEvent
    url: str
    """Where it goes."""
    status: CallbackStatus
    attempts: int
    """How often it was tried."""
    due_at: float
    """When it is tried next, while it waits."""
    error: str | None = None
    """What went wrong with the last attempt."""
    created_at: float
    """Unix seconds, as all times here."""
    ended_at: float | None = None
    """When it was delivered or given up."""


class CallbackPage(Frozen):
    """Newest first."""

    callbacks: tuple[CallbackView, ...]
    next: str | None = None
    """Pass as `before` to get older ones; None: there are none."""
