"""Access to the control plane: roles and tokens."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from polar.models.component import Frozen
from polar.models.task import Id


class TokenRole(StrEnum):
    """What a token permits."""

    ADMIN = "admin"
    """Everything, tokens included."""
    TRAINER = "trainer"
    """Submit and cancel tasks, read everything, pause and update the policy."""
    READ_ONLY = "read-only"
    """Read tasks, sessions, results and the policy."""
    NODE = "node"
    """Lease sessions and deliver their results."""


class TokenState(StrEnum):
    LIVE = "live"
    """Valid."""
    EXPIRED = "expired"
    """Expired."""
    REVOKED = "revoked"
    """Revoked."""


class TokenView(Frozen):
    """A token without its secret."""

    id: str
    """The part of the token between its underscores."""
    name: Id
    """The owner's name."""
    role: TokenRole
    state: TokenState
    """Whether it is valid."""
    created_at: float
    """Unix seconds, as `expires_at`."""
    expires_at: float | None = None
    """Unix seconds; None if it does not expire."""


class TokenPage(Frozen):
    tokens: tuple[TokenView, ...]


class NewToken(Frozen):
    """A request for a token."""

    name: Id
    """The owner's name, as in audit lines of the log."""
    role: TokenRole
    expires_seconds: float | None = Field(default=None, gt=0, le=10 * 365 * 86_400)
    """Lifetime in seconds; None for unlimited."""


class MadeToken(Frozen):
    """The only answer that ever holds a token's secret."""

    token: str = Field(repr=False)
    """The token itself."""
    view: TokenView
