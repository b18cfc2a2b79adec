"""Files that several processes share: one lock, and files and directories that are written whole or not at
all."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from polar.errors import InvalidInput, PolarError

log = logging.getLogger(__name__)


@contextmanager
def locked(path: Path, *, busy: PolarError | None = None) -> Iterator[None]:
    """Hold a lock file during the block; if another process holds it, wait, or raise `busy` if given."""
    with path.open("a") as file:
        lock(file, busy=busy)
        yield


def lock(file: IO[Any], *, busy: PolarError | None = None, is_shared: bool = False) -> None:
    """Lock an open file until it is closed. A shared lock excludes only exclusive ones."""
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | (fcntl.LOCK_NB if busy else 0))
    except BlockingIOError:
        assert busy is not None
        raise busy from None
    except OSError as error:
        # Some file systems have no locks, and most directories are used by one process.
        log.warning("%s cannot be locked, continuing without a lock: %s", file.name, error.strerror)


def is_locked(path: Path) -> bool:
    """Whether another process holds an exclusive lock; also True on a file system without locks."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o644, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary file beside `path`; after the block it replaces `path`."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.part-", dir=path.parent)
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        part.chmod(mode)
        if durable:
            sync(part)
        part.replace(path)
        if durable:
            sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path, *, mode: int = 0o755, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary directory beside `path`; after the block it is renamed to `path`.

    Parts left by processes that died are removed first, so only one process at a time may write a path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for orphan in path.parent.glob(f".{path.name}.part-*"):
        shutil.rmtree(orphan, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f".{path.name}.part-", dir=path.parent))
    try:
        yield part
        part.chmod(mode)
        if durable:
            for each in [*part.rglob("*"), part]:
                sync(each)
        part.rename(path)
        if durable:
            sync(path.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_atomic(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file atomically, creating its directories if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, mode=mode) as part:
        part.write_text(text, encoding="utf-8")


def make_directory(directory: Path) -> None:
    """Create a directory for files; raise InvalidInput if they cannot be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileExistsError:
        raise InvalidInput(f"{directory}: is a file, not a directory") from None
    except OSError as error:
        raise InvalidInput(f"{directory}: cannot be written: {error.strerror}") from None


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(directory: Path) -> str:
    """Return the SHA-256 of all names and contents in a directory; a missing directory counts as empty."""
    seen = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        seen.update(f"{path.relative_to(directory)}\0".encode())
        with path.open("rb") as file:
            seen.update(hashlib.file_digest(file, "sha256").digest())
    return seen.hexdigest()
