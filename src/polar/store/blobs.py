"""What nodes deliver beside results: opaque bytes, there whole or not at all.

Each lease that delivered something has a name of its own, so that a fenced-off node cannot
overwrite what belongs to another.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from polar.errors import InvalidInput, NotInstalled, PolarError, Unavailable
from polar.files import sync

T = TypeVar("T")

RECORDINGS = "recordings"
ARTIFACTS = "artifacts"
"""Where they are below the data directory, or below `server.blobs_url`."""

CHUNK = 1 << 20

PART = ".part-"
"""How the name of a file begins that is not whole."""

MOST_TOGETHER = 128
"""Files written together: the first waits for the last."""

SYNCERS = 8
"""How many syncs the disk is asked for at once, which it serves as one."""

_SYNCERS = ThreadPoolExecutor(SYNCERS, "file-syncer")

_BROKEN_OFF_SECONDS = 86_400.0
"""After this long without a byte an upload has broken off."""


@dataclass(frozen=True, slots=True)
class BlobName:
    """The session whose bytes they are, and the lease under which they were delivered."""

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
    async def found(self) -> dict[BlobName, float | None]:
        """Everything that is there, and when it was stored (Unix seconds) where the storage says so."""

    @abstractmethod
    async def remove(self, names: Iterable[BlobName]) -> None:
        """Remove those of the blobs that are there."""

    async def keep_only(self, name: BlobName) -> None:
        """Remove what other leases of the session delivered: theirs have lower tokens."""
        await self.remove(BlobName(name.session_id, token) for token in range(1, name.fencing_token))

    async def remove_broken_uploads(self) -> None:
        def remove() -> None:
            for part in self.uploads_dir.glob(f"{PART}*"):
                with suppress(FileNotFoundError):
                    if part.stat().st_mtime < time.time() - _BROKEN_OFF_SECONDS:
                        part.unlink()

        await asyncio.to_thread(remove)

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


class FileBlobs(Blobs):
    """Below a directory of this machine, or of a file system that several mount.

    A disk takes little longer to sync many files than to sync one. So all that wait together are written
    beside their place, then synced, then moved there; at last their directories are synced, each one once.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root.name, root)
        self._root = root
        self._disk = asyncio.Lock()
        self._next: tuple[list[_FileWrite], asyncio.Task[None]] | None = None
        """What is gathered while the disk is busy, and the task that will write it."""

    def local_path(self, name: BlobName) -> Path:
        return self._root / name.path

    async def put(self, name: BlobName, data: bytes | PurePath) -> None:
        mine = _FileWrite(f"{self._root}/{name.path}", data, f"{self._root}/{PART}{uuid4().hex}")
        if self._next is None or len(self._next[0]) == MOST_TOGETHER:
            gathered: list[_FileWrite] = []
            self._next = gathered, asyncio.create_task(self._write(gathered))
        gathered, written = self._next
        gathered.append(mine)
        # A caller that stops waiting stops no other.
        await asyncio.shield(written)
        if mine.error is not None:
            raise self.not_stored(mine.error, name.session_id) from mine.error

    async def exists(self, name: BlobName) -> bool:
        return await asyncio.to_thread(self.local_path(name).is_file)

    async def read(self, name: BlobName) -> AsyncIterator[bytes]:
        with await asyncio.to_thread(self.local_path(name).open, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk

    async def found(self) -> dict[BlobName, float | None]:
        def look() -> dict[BlobName, float | None]:
            there: dict[BlobName, float | None] = {}
            for path in self._root.glob("*/*"):
                if (name := BlobName.of(path.name)) is not None:
                    # What another has removed meanwhile is not there.
                    with suppress(FileNotFoundError):
                        there[name] = path.stat().st_mtime
            return there

        return await asyncio.to_thread(look)

    async def remove(self, names: Iterable[BlobName]) -> None:
        def unlink() -> None:
            for name in names:
                self.local_path(name).unlink(missing_ok=True)

        await asyncio.to_thread(unlink)

    async def _write(self, gathered: list[_FileWrite]) -> None:
        async with self._disk:
            if self._next is not None and self._next[0] is gathered:
                self._next = None
            await asyncio.to_thread(_write_together, gathered)


@dataclass(slots=True)
class _FileWrite:
    """A file to be made of bytes, or of an uploaded file, and what went wrong with it."""

    path: str
    data: bytes | PurePath
    part: str
    error: OSError | None = None

    @property
    def directory(self) -> str:
        return os.path.dirname(self.path)

    def begin(self) -> None:
        _make_directory(self.directory)
        if isinstance(self.data, PurePath):
            self.part = os.fspath(self.data)
            return
        descriptor = os.open(self.part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.data)

    def sync(self) -> None:
        sync(self.part)

    def move(self) -> None:
        os.replace(self.part, self.path)

    def attempt(self, step: Callable[[_FileWrite], None]) -> None:
        """Take a step, unless one has failed; then nothing is left of the file."""
        if self.error is not None:
            return
        try:
            step(self)
        except OSError as error:
            self.error = error
            with suppress(OSError):
                os.unlink(self.part)


def _write_together(writes: list[_FileWrite]) -> None:
    for write in writes:
        write.attempt(_FileWrite.begin)
    _in_parallel(lambda write: write.attempt(_FileWrite.sync), writes)
    moved: dict[str, list[_FileWrite]] = defaultdict(list)
    for write in writes:
        write.attempt(_FileWrite.move)
        if write.error is None:
            moved[write.directory].append(write)
    _in_parallel(_sync_directory, list(moved.values()))


def _in_parallel(do: Callable[[T], None], things: Sequence[T]) -> None:
    """Each thread gets a share of them, as handing over costs more than most syncs."""

    def do_share(first: int) -> None:
        for thing in things[first::SYNCERS]:
            do(thing)

    list(_SYNCERS.map(do_share, range(min(SYNCERS, len(things)))))


def _sync_directory(moved: Sequence[_FileWrite]) -> None:
    """Make the names of files durable that were moved into one directory."""
    try:
        sync(moved[0].directory)
    except OSError as error:
        for write in moved:
            write.error = error


def _make_directory(directory: str) -> None:
    """Durably, with those above it."""
    try:
        os.mkdir(directory)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_directory(os.path.dirname(directory))
        _make_directory(directory)
        return
    sync(os.path.dirname(directory))


class UrlBlobs(Blobs):
    """Below an fsspec URL: an object store, or memory. An object appears when its upload is complete."""

    def __init__(self, kind: str, url: str, uploads_dir: Path) -> None:
        super().__init__(kind, uploads_dir)
        self._url = url
        self._files, root = _file_system(url)
        self._root = root.rstrip("/")

    async def put(self, name: BlobName, data: bytes | PurePath) -> None:
        if isinstance(data, bytes):
            await self._do(name, self._files.pipe_file, self._path(name), data)
        else:
            await self._do(name, self._files.put_file, str(data), self._path(name))
            await asyncio.to_thread(Path(data).unlink)

    async def exists(self, name: BlobName) -> bool:
        return bool(await self._do(name, self._files.isfile, self._path(name)))

    async def read(self, name: BlobName) -> AsyncIterator[bytes]:
        path = self._path(name)
        size = int((await self._do(name, self._files.info, path))["size"])
        for start in range(0, size, 8 * CHUNK):
            end = min(start + 8 * CHUNK, size)
            yield await self._do(name, self._files.cat_file, path, start, end)

    async def found(self) -> dict[BlobName, float | None]:
        try:
            listed = await asyncio.to_thread(self._files.find, self._root, detail=True)
        except FileNotFoundError:
            return {}
        named = ((BlobName.of(path), details) for path, details in listed.items())
        return {name: await self._moment(name, details) for name, details in named if name is not None}

    async def remove(self, names: Iterable[BlobName]) -> None:
        def unlink(path: str) -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(path)

        for name in names:
            await self._do(name, unlink, self._path(name))

    async def _moment(self, name: BlobName, details: dict[str, Any]) -> float | None:
        """When it was stored: file systems say it under many names, or only when asked."""
        for key in ("LastModified", "last_modified", "mtime", "created"):
            if (at := details.get(key)) is not None:
                return float(at.timestamp() if hasattr(at, "timestamp") else at)
        try:
            modified = await asyncio.to_thread(self._files.modified, self._path(name))
        except (NotImplementedError, FileNotFoundError):
            return None
        return float(modified.timestamp())

    def _path(self, name: BlobName) -> str:
        return f"{self._root}/{name.path}"

    async def _do(self, name: BlobName, action: Any, *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(action, *arguments)
        except PolarError:
            raise
        # Every file system has errors of its own kind.
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise Unavailable(
                f"{self.kind} of session {name.session_id!r}: {_shown(self._url)} cannot be used: {reason}"
            ) from error


def _file_system(url: str) -> tuple[Any, str]:
    scheme = urlsplit(url).scheme
    try:
        import fsspec

        if scheme == "s3":
            # s3fs would pin botocore to one release; this speaks S3 by itself.
            from obstore.fsspec import register

            register("s3")
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:
        extra = f"pip install 'polar-rl[{scheme}]'" if scheme == "s3" else "install its fsspec package"
        raise NotInstalled(f"server.blobs_url: {scheme}:// cannot be used: {error}", hint=extra) from None
    except ValueError as error:
        raise InvalidInput(f"server.blobs_url: {error}", hint="file:///…, memory://… or s3://…") from None


def _shown(url: str) -> str:
    """Without a key that someone put into it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def open_blobs(kind: str, data_dir: Path, url: str | None) -> Blobs:
    """Below the data directory, or below an fsspec URL: file:///…, memory://…, s3://bucket/…"""
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
