"""The owner's bearer token, and other secrets: made at first start, kept in files that only they can read."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from polar.errors import PolarError

log = logging.getLogger(__name__)

MIN_LENGTH = 16


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
    descriptor, part = tempfile.mkstemp(prefix=".token-", dir=path.parent)  # mkstemp: mode 600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)
    except FileExistsError:
        log.debug("another process made %s first", path)
    finally:
        os.unlink(part)


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
