"""Who may ask the control plane for what: roles, tokens, and the log of what was asked."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from polar.models.component import Frozen
from polar.models.task import Id


class Role(StrEnum):
    """What a token opens."""

    ADMIN = "admin"
    """Everything, tokens and the audit log included."""
    TRAINER = "trainer"
    """Submit and cancel tasks, read everything that came of them, pause and update the policy."""
    READ_ONLY = "read-only"
    """Read tasks, sessions, results and the policy."""
    NODE = "node"
    """Lease sessions, and deliver what came of them."""


class TokenState(StrEnum):
    LIVE = "live"
    """It opens what its role may."""
    EXPIRED = "expired"
    """Its time is over."""
    REVOKED = "revoked"
    """Somebody ended it."""


class TokenView(Frozen):
    """A token without its secret."""

    id: str
    """The part of the token between its underscores: tells two of one name apart."""
    name: Id
    """Who brings it."""
    role: Role
    state: TokenState
    """Whether it opens anything."""
    created_at: float
    """Unix seconds, as `expires_at`."""
    expires_at: float | None = None
    """None: it does not expire."""


class TokenPage(Frozen):
    tokens: tuple[TokenView, ...]


class NewToken(Frozen):
    """Asks for a token."""

    name: Id
    """Who brings it; the audit log knows them by it."""
    role: Role
    expires_seconds: float | None = Field(default=None, gt=0, le=10 * 365 * 86_400)
    """How long it opens anything; None: until it is revoked."""


class Rotation(Frozen):
    """Asks for another token in place of one."""

    overlap_seconds: float = Field(default=86_400.0, ge=0, le=90 * 86_400)
    """How long the old one still opens what it did."""
    expires_seconds: float | None = Field(default=None, gt=0, le=10 * 365 * 86_400)
    """Of the new one; None: as long as the old one had from its beginning."""


class MadeToken(Frozen):
    """The only answer that ever holds a token's secret."""

    token: str = Field(repr=False)
    """The token itself."""
    view: TokenView


class AuditEntry(Frozen):
    """One thing that was asked, and what became of it. Holds no secret."""

    seq: int
    """Rises with every entry."""
    at: float
    """Unix seconds by the server's clock."""
    actor: str | None
    """The token's name; None: the caller brought none that is known."""
    role: Role | None
    """The token's."""
    address: str | None
    """Where the request came from, as the server saw it."""
    action: str
    """The operation, as the OpenAPI document names it."""
    object: str | None
    """What it was about: the id of a task, session or node, the name of a token."""
    status: int
    """The HTTP status of the answer."""
    detail: str | None
    """Why it was refused, where it was."""


class AuditPage(Frozen):
    """Entries, newest first."""

    entries: tuple[AuditEntry, ...]
    next: str | None = None
    """Pass as `before` to get older ones; None: there are none."""
