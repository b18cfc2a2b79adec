"""Who may ask the control plane for what: roles and tokens."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from polar.models.component import Frozen
from polar.models.task import Id


class TokenRole(StrEnum):
    """What a token opens."""

    ADMIN = "admin"
    """Everything, tokens included."""
    TRAINER = "trainer"
    """Submit and cancel tasks, read everything that came of them, pause and update the policy."""
    READ_ONLY = "read-only"
    """Read tasks, sessions, results and the policy."""
    NODE = "node"
    """Lease sessions, and deliver what came of them."""


class TokenState(StrEnum):
    LIVE = "live"
    """Valid."""
    EXPIRED = "expired"
    """Its lifetime is over."""
    REVOKED = "revoked"
    """Somebody revoked it."""


class TokenView(Frozen):
    """A token without its secret."""

    id: str
    """The part of the token between its underscores."""
    name: Id
    """Who brings it."""
    role: TokenRole
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
    """Who brings it; audit lines in the log call them so."""
    role: TokenRole
    expires_seconds: float | None = Field(default=None, gt=0, le=10 * 365 * 86_400)
    """How long it opens anything; None: until it is revoked."""


class MadeToken(Frozen):
    """The only answer that ever holds a token's secret."""

    token: str = Field(repr=False)
    """The token itself."""
    view: TokenView
