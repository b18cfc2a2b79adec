"""Whose token a request brings: the data directory's own, one of the store, or one of this process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from polar.models.access import Role
from polar.store.database import Database
from polar.store.tokens import OWNER, PREFIX, StoredToken, Tokens, digest, id_in

REMEMBERED_SECONDS = 1.0
"""How long another server's revocation may take to be known here; our own is known at once."""

MOST_REMEMBERED = 1_000


@dataclass(frozen=True, slots=True)
class Holder:
    """Who brings a token."""

    name: str
    role: Role


_OWNER = Holder(OWNER, Role.ADMIN)


class Keys:
    """Finds the holder of a token; every comparison with a secret takes the same time, equal or not."""

    def __init__(
        self, token: str, tokens: Tokens, database: Database, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._owner = token.encode()
        self._tokens = tokens
        self._database = database
        self._clock = clock
        self._remembered: dict[str, tuple[StoredToken, float]] = {}
        self._of_process: dict[str, tuple[str, Holder]] = {}

    def issue(self, name: str, role: Role) -> str:
        """A token for a part of this process: it ends with it and is stored nowhere."""
        id = secrets.token_hex(6)
        token = f"{PREFIX}_{id}_{secrets.token_hex(32)}"
        self._of_process[id] = digest(token), Holder(name, role)
        return token

    def forget(self) -> None:
        """Look everything up anew, after tokens have changed."""
        self._remembered.clear()

    async def holder(self, token: str) -> Holder | None:
        """None: the token opens nothing."""
        if secrets.compare_digest(token.encode(), self._owner):
            return _OWNER
        id = id_in(token)
        if id is None:
            return None
        if id in self._of_process:
            expected, holder = self._of_process[id]
            return holder if secrets.compare_digest(expected, digest(token)) else None
        stored = await self._stored(id)
        if stored is None or not secrets.compare_digest(stored.digest, digest(token)):
            return None
        if stored.expires_at is not None and stored.expires_at <= self._database.now():
            return None
        return Holder(stored.name, stored.role)

    async def _stored(self, id: str) -> StoredToken | None:
        known = self._remembered.get(id)
        if known is not None and known[1] > self._clock():
            return known[0]
        found = await self._tokens.find(id)
        if found is None:
            self._remembered.pop(id, None)
            return None
        if len(self._remembered) >= MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[id] = found, self._clock() + REMEMBERED_SECONDS
        return found
