"""What nodes deliver beside results: opaque bytes, there whole or not at all.

Each lease that delivered something has a name of its own, so that a fenced-off node cannot
overwrite what belongs to another.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

RECORDINGS = "recordings"
ARTIFACTS = "artifacts"
"""Where they are below the data directory, or below `server.blobs_url`."""

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class BlobName:
    """Whose bytes they are."""

    session_id: str
    fencing_token: int

    @property
    def path(self) -> str:
        """Relative, with slashes; 256 directories keep each one small."""
        shard = hashlib.sha256(self.session_id.encode()).hexdigest()[:2]
        return f"{shard}/{self.session_id}/{self.fencing_token}"

    @staticmethod
    def of(path: str) -> BlobName | None:
        """The name that a path ends in; None for what is no blob of ours."""
        *_, session_id, token = ("", "", *path.split("/"))
        return BlobName(session_id, int(token)) if token.isdigit() and session_id else None


@dataclass(frozen=True, slots=True)
class Stored:
    """A blob that a listing found."""

    name: BlobName
    at: float | None
    """When it was stored, in Unix seconds; None where the storage does not say."""


class Blobs(ABC):
    """One kind of bytes that sessions leave, below one place."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """recordings or artifacts, for messages."""

    @abstractmethod
    async def put(self, name: BlobName, chunks: AsyncIterator[bytes]) -> None:
        """Store the bytes durably; on any failure nothing is left behind."""

    async def put_whole(self, name: BlobName, data: bytes) -> None:
        """`put` for what is in memory already."""

        async def once() -> AsyncIterator[bytes]:
            yield data

        await self.put(name, once())

    @abstractmethod
    async def exists(self, name: BlobName) -> bool: ...

    @abstractmethod
    def read(self, name: BlobName) -> AsyncIterator[bytes]:
        """The bytes of a blob that exists, in pieces."""

    @abstractmethod
    async def keep_only(self, name: BlobName) -> None:
        """Remove what other leases of the session delivered."""

    @abstractmethod
    async def found(self) -> list[Stored]:
        """Everything that is there."""

    @abstractmethod
    async def remove(self, names: Iterable[BlobName]) -> None:
        """Remove blobs, and what was left of uploads that broke off long ago."""

    def local_path(self, name: BlobName) -> Path | None:
        """The file that holds a blob, where blobs are files."""
        return None


def open_blobs(kind: str, data_dir: Path, url: str | None) -> Blobs:
    """Below the data directory, or below an fsspec URL: file:///…, memory://…, s3://bucket/…"""
    if url is None:
        from polar.store.file_blobs import FileBlobs

        return FileBlobs(data_dir / kind)
    parts = urlsplit(url)
    if parts.scheme == "file":
        from polar.store.file_blobs import FileBlobs

        return FileBlobs(Path(parts.path) / kind)
    from polar.store.url_blobs import UrlBlobs

    return UrlBlobs(kind, f"{url.rstrip('/')}/{kind}")


def recording_path(data_dir: Path, session_id: str) -> Path | None:
    """The file of a session's newest recording below a data directory, for a person to look at."""
    from polar.store.file_blobs import FileBlobs

    return FileBlobs(data_dir / RECORDINGS).newest(session_id)
