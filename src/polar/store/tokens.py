"""Tokens as they are stored: by name, with a role, and of the secret only its digest."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, text, update

from polar.errors import Conflict, NotFound
from polar.models.access import MadeToken, NewToken, TokenRole, TokenState, TokenView
from polar.models.component import view
from polar.store.database import Repository, reads, writes
from polar.store.tables import tokens

PREFIX = "polar"
OWNER = "owner"
"""Whoever can read the data directory's token, which is not in the store."""

_TOKEN = re.compile(rf"{PREFIX}_([0-9a-f]+)_[0-9a-f]{{64}}")


@dataclass(frozen=True, slots=True)
class StoredToken:
    """What is known of a token that was handed out and not revoked."""

    name: str
    role: TokenRole
    digest: str
    expires_at: float | None


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> tuple[str, str]:
    """A token, and before it the id that it carries."""
    id = secrets.token_hex(6)
    return id, f"{PREFIX}_{id}_{secrets.token_hex(32)}"


def id_in(token: str) -> str | None:
    """The id that a token of ours carries: `polar_ID_SECRET`."""
    found = _TOKEN.fullmatch(token)
    return found[1] if found else None


def without_secrets(text: str) -> str:
    """The text with the ids of the tokens in it instead of their secrets."""
    return _TOKEN.sub(rf"{PREFIX}_\1_…", text)


class TokenStore(Repository):
    """All tokens that were ever made; a name has at most one that is live."""

    @writes
    def create(self, connection: Connection, asked: NewToken) -> MadeToken:
        """Conflict if a live token has the name."""
        if asked.name == OWNER:
            raise Conflict(f"{OWNER!r} is what the data directory's own token is called")
        now = self._database.now()
        if _is_taken(connection, asked.name, now):
            raise Conflict(f"there is a token named {asked.name!r}", hint="revoke it, or choose another name")
        id, token = new_token()
        made = {
            "id": id,
            "name": asked.name,
            "role": asked.role,
            "created_at": now,
            "expires_at": None if asked.expires_seconds is None else now + asked.expires_seconds,
        }
        connection.execute(insert(tokens).values(digest=digest(token), **made))
        return MadeToken(token=token, view=TokenView(state=TokenState.LIVE, **made))

    @writes
    def revoke(self, connection: Connection, name_or_id: str) -> tuple[TokenView, ...]:
        """End the token of this id, or all of this name, at once; a whole token stands for its id."""
        asked = id_in(name_or_id) or name_or_id
        live = ((tokens.c.id == asked) | (tokens.c.name == asked)) & tokens.c.revoked_at.is_(None)
        rows = connection.execute(select(tokens).where(live).order_by(tokens.c.seq)).all()
        if not rows:
            raise NotFound(f"no token is {asked!r}", hint="`polar token list` shows them")
        connection.execute(update(tokens).where(live).values(revoked_at=self._database.now()))
        return tuple(view(TokenView, row, state=TokenState.REVOKED) for row in rows)

    @reads
    def all(self, connection: Connection) -> tuple[TokenView, ...]:
        """Oldest first, the expired and the revoked among them."""
        now = self._database.now()
        rows = connection.execute(select(tokens).order_by(tokens.c.seq))
        return tuple(view(TokenView, row, state=_state(row, now)) for row in rows)

    @reads
    def find(self, connection: Connection, id: str) -> StoredToken | None:
        """What was handed out under this id, unless it was revoked."""
        query = select(tokens).where(tokens.c.id == id, tokens.c.revoked_at.is_(None))
        row = connection.execute(query).one_or_none()
        return None if row is None else StoredToken(row.name, TokenRole(row.role), row.digest, row.expires_at)

    def has_expired(self, token: StoredToken) -> bool:
        return token.expires_at is not None and token.expires_at <= self._database.now()


def _is_taken(connection: Connection, name: str, now: float) -> bool:
    """Whether a live token has this name; no other one can be made before this transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("LOCK TABLE tokens IN SHARE ROW EXCLUSIVE MODE"))
    is_live = tokens.c.expires_at.is_(None) | (tokens.c.expires_at > now)
    query = select(tokens.c.id).where(tokens.c.name == name, tokens.c.revoked_at.is_(None), is_live)
    return connection.execute(query).first() is not None


def _state(row: Any, now: float) -> TokenState:
    if row.revoked_at is not None:
        return TokenState.REVOKED
    has_expired = row.expires_at is not None and row.expires_at <= now
    return TokenState.EXPIRED if has_expired else TokenState.LIVE
