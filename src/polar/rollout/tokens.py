"""Tells whose token a request brings: the data directory's, one of the store, or one of this process.

The owner's token, and other secrets, are made at first start in files that only the owner can read.
"""

from __future__ import annotations

import logging
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from polar.errors import PolarError
from polar.files import atomic_file, locked
from polar.models.access import TokenRole
from polar.store.tokens import OWNER, StoredToken, TokenStore, digest, id_in, new_token

log = logging.getLogger(__name__)

MIN_LENGTH = 16

CACHE_SECONDS = 1.0
"""How long another server's revocation may take to be known here; our own is known at once."""

CACHE_SIZE = 1_000


@dataclass(frozen=True, slots=True)
class Holder:
    """Who brings a token."""

    name: str
    role: TokenRole


class Authenticator:
    """Finds the holder of a token; every comparison with a secret takes the same time, equal or not."""

    def __init__(self, token: str, tokens: TokenStore) -> None:
        self._owner = token.encode()
        self._tokens = tokens
        self._cache: dict[str, tuple[StoredToken, float]] = {}
        self._of_process: dict[str, StoredToken] = {}

    def issue(self, name: str, role: TokenRole) -> str:
        """A token for a part of this process: it ends with it and is stored nowhere."""
        id, token = new_token()
        self._of_process[id] = StoredToken(name, role, digest(token), expires_at=None)
        return token

    def clear_cache(self) -> None:
        """Look every token up anew, after one was revoked."""
        # What is being looked up just now is noted in the old one.
        self._cache = {}

    async def holder(self, authorization: str | None) -> Holder | None:
        """Who brings the bearer token of this header; None: nobody that is known."""
        scheme, _, given = (authorization or "").partition(" ")
        token = given.strip()
        if scheme.lower() != "bearer" or not token:
            return None
        if secrets.compare_digest(token.encode(), self._owner):
            return Holder(OWNER, TokenRole.ADMIN)
        id = id_in(token)
        if id is None:
            return None
        stored = self._of_process.get(id) or await self._stored(id)
        if stored is None or not secrets.compare_digest(stored.digest, digest(token)):
            return None
        return None if self._tokens.has_expired(stored) else Holder(stored.name, stored.role)

    async def _stored(self, id: str) -> StoredToken | None:
        cache = self._cache
        found, expires = cache.get(id, (None, 0.0))
        if found is not None and expires > time.monotonic():
            return found
        found = await self._tokens.find(id)
        if found is None:
            cache.pop(id, None)
            return None
        if len(cache) >= CACHE_SIZE:
            cache.clear()
        cache[id] = found, time.monotonic() + CACHE_SECONDS
        return found


def load_or_create_token(data_dir: Path) -> str:
    """The token of this data directory; processes that ask at once get the same one."""
    return load_or_create_secret(data_dir / "token")


def load_or_create_secret(path: Path) -> str:
    """The secret in this file, made if there is none."""
    try:
        if not path.exists():
            _create(path)
        return _read(path)
    except OSError as error:
        raise PolarError(f"the token file {path} cannot be used: {error.strerror}") from None


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            with atomic_file(path, mode=0o600, durable=True) as part:
                part.write_text(secrets.token_urlsafe(32) + "\n")


def _read(path: Path) -> str:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        log.warning("%s could be read by others (mode %o); setting mode 600", path, mode)
        path.chmod(0o600)
    token = path.read_text().strip()
    if len(token) < MIN_LENGTH or not token.isascii():
        raise PolarError(
            f"{path} does not hold a token of at least {MIN_LENGTH} characters",
            hint="delete it; a new one is made at the next start",
        )
    return token
