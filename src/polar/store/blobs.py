"""What nodes deliver beside results: opaque bytes, there whole or not at all.

Each lease that delivered something has a name of its own, so that a fenced-off node cannot
overwrite what belongs to another.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from polar.errors import Unavailable

RECORDINGS = "recordings"
ARTIFACTS = "artifacts"
"""Where they are below the data directory, or below `server.blobs_url`."""

CHUNK = 1 << 20

PART = ".part-"
"""How the name of a file begins that is not whole."""

_BROKEN_OFF_SECONDS = 86_400.0
"""After this long without a byte an upload has broken off."""


@dataclass(frozen=True, slots=True)
class BlobName:
    """Whose bytes they are."""

    session_id: str
    fencing_token: int

    @property
    def path(self) -> str:
        """Relative, with a slash. 16 directories, since each that a file is moved into is synced; no
        session's id has an @."""
        shard = hashlib.sha256(self.session_id.encode()).hexdigest()[0]
        return f"{shard}/{self.session_id}@{self.fencing_token}"

    @staticmethod
    def of(path: str) -> BlobName | None:
        """The name that a path ends in; None for what is no blob of ours."""
        session_id, _, token = path.rpartition("/")[2].rpartition("@")
        return BlobName(session_id, int(token)) if token.isdigit() and session_id else None


@dataclass(frozen=True, slots=True)
class Stored:
    """A blob that a listing found."""

    name: BlobName
    at: float | None
    """When it was stored, in Unix seconds; None where the storage does not say."""


class Blobs(ABC):
    """One kind of bytes that sessions leave, below one place."""

    def __init__(self, kind: str, uploads_dir: Path) -> None:
        self.kind = kind
        """recordings or artifacts, for messages."""
        self.uploads_dir = uploads_dir
        """Where what is uploaded is gathered, in files whose names begin with PART."""

    @abstractmethod
    async def put(self, name: BlobName, data: bytes | PurePath) -> None:
        """Store bytes durably, or those of an uploaded file, which is gone then; on any failure nothing is
        left behind."""

    @abstractmethod
    async def exists(self, name: BlobName) -> bool: ...

    @abstractmethod
    def read(self, name: BlobName) -> AsyncIterator[bytes]:
        """The bytes of a blob that exists, in pieces."""

    @abstractmethod
    async def found(self) -> list[Stored]:
        """Everything that is there."""

    @abstractmethod
    async def remove(self, names: Iterable[BlobName]) -> None:
        """Remove those of the blobs that are there."""

    async def keep_only(self, name: BlobName) -> None:
        """Remove what other leases of the session delivered: theirs have lower tokens."""
        await self.remove(BlobName(name.session_id, token) for token in range(1, name.fencing_token))

    async def remove_broken_uploads(self) -> None:
        await asyncio.to_thread(_remove_parts, self.uploads_dir, time.time() - _BROKEN_OFF_SECONDS)

    def local_path(self, name: BlobName) -> Path | None:
        """The file that holds a blob, where blobs are files."""
        return None

    def not_stored(self, error: OSError, session_id: str) -> Unavailable:
        """What went wrong with a file, for whoever delivers."""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = f"the disk that holds {self.uploads_dir} is full" if is_full else error.strerror
        return Unavailable(
            f"{self.kind} of session {session_id!r} were not stored: {reason}",
            hint="free some space and try again" if is_full else None,
        )


def _remove_parts(directory: Path, before: float) -> None:
    for part in directory.glob(f"{PART}*"):
        with suppress(FileNotFoundError):
            if part.stat().st_mtime < before:
                part.unlink()


def open_blobs(kind: str, data_dir: Path, url: str | None) -> Blobs:
    """Below the data directory, or below an fsspec URL: file:///…, memory://…, s3://bucket/…"""
    from polar.store.file_blobs import FileBlobs
    from polar.store.url_blobs import UrlBlobs

    if url is None:
        return FileBlobs(data_dir / kind)
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FileBlobs(Path(parts.path) / kind)
    return UrlBlobs(kind, f"{url.rstrip('/')}/{kind}", data_dir)


def recording_path(data_dir: Path, session_id: str) -> Path | None:
    """The file of a session's newest recording below a data directory, for a person to look at."""
    files = (data_dir / RECORDINGS).glob(f"*/{session_id}@*")
    named = [(name.fencing_token, path) for path in files if (name := BlobName.of(path.name)) is not None]
    return max(named)[1] if named else None
