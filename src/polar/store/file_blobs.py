"""Blobs as files: one a lease, in 16 directories, each there whole or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from polar.errors import Unavailable
from polar.store.blobs import CHUNK, BlobName, Blobs, Stored
from polar.store.file_writer import PART, FileWriter, make_directory, sync

_UPLOAD_SECONDS = 86_400.0
"""After so long without a byte an upload has broken off."""

_BEFORE_TOKEN = "@"
"""Between session and fencing token in a file's name; no session's id has it."""


class FileBlobs(Blobs):
    """Below a directory of this machine, or of a file system that several mount.

    A blob is `shard/session@token`. The shards are few, since each that a file is moved into is synced.
    Stores that were begun when each session had a directory of its own hold some at `BlobName.path`:
    these are read, and let go, where they are.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root.name)
        self._root = root
        self._writer = FileWriter()

    def path(self, session_id: str, fencing_token: int) -> Path:
        return self.local_path(BlobName(session_id, fencing_token))

    def local_path(self, name: BlobName) -> Path:
        place, early = Path(self._place(name)), self._early_place(name)
        return early if not place.exists() and early.exists() else place

    async def put(self, name: BlobName, chunks: AsyncIterator[bytes]) -> None:
        try:
            await self._write(Path(self._place(name)), chunks)
        except OSError as error:
            raise self._not_stored(name, error) from error

    async def put_whole(self, name: BlobName, data: bytes) -> None:
        try:
            await self._writer.write(self._place(name), data)
        except OSError as error:
            raise self._not_stored(name, error) from error

    async def exists(self, name: BlobName) -> bool:
        return await asyncio.to_thread(lambda: self.local_path(name).is_file())

    async def read(self, name: BlobName) -> AsyncIterator[bytes]:
        with await asyncio.to_thread(lambda: self.local_path(name).open("rb")) as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk

    async def keep_only(self, name: BlobName) -> None:
        # A lease that was another's has a lower token.
        others = (BlobName(name.session_id, token) for token in range(name.fencing_token))
        await asyncio.to_thread(self._unlink, others)

    async def found(self) -> list[Stored]:
        return await asyncio.to_thread(lambda: list(_found(self._root)))

    async def remove(self, names: Iterable[BlobName]) -> None:
        await asyncio.to_thread(self._unlink, names)
        await asyncio.to_thread(_remove_broken_off, self._root)

    def newest(self, session_id: str) -> Path | None:
        """The file of the latest lease of a session that delivered something."""
        sought = BlobName(session_id, 0)
        late = Path(self._place(sought)).parent.glob(f"{session_id}{_BEFORE_TOKEN}*")
        early = self._early_place(sought).parent.glob("*")
        names = [name for path in (*late, *early) if (name := _name_of(path)) is not None]
        return self.local_path(max(names, key=lambda name: name.fencing_token)) if names else None

    def _place(self, name: BlobName) -> str:
        return f"{self._root}/{name.path[0]}/{name.session_id}{_BEFORE_TOKEN}{name.fencing_token}"

    def _early_place(self, name: BlobName) -> Path:
        return self._root / name.path

    def _unlink(self, names: Iterable[BlobName]) -> None:
        for name in names:
            Path(self._place(name)).unlink(missing_ok=True)
            early = self._early_place(name)
            early.unlink(missing_ok=True)
            # Fails, as it should, while something is in it.
            with suppress(OSError):
                early.parent.rmdir()

    async def _write(self, target: Path, chunks: AsyncIterator[bytes]) -> None:
        buffer = bytearray()
        part: Path | None = None
        try:
            async for chunk in chunks:
                buffer += chunk
                if len(buffer) >= CHUNK:
                    if part is None:
                        part = await asyncio.to_thread(_begin, target.parent)
                    await asyncio.to_thread(_append, part, bytes(buffer))
                    buffer.clear()
            if part is None:
                await self._writer.write(os.fspath(target), bytes(buffer))
            else:
                await asyncio.to_thread(_append, part, bytes(buffer))
                await asyncio.to_thread(_finish, part, target)
        finally:
            if part is not None:
                await asyncio.to_thread(part.unlink, missing_ok=True)

    def _not_stored(self, name: BlobName, error: OSError) -> Unavailable:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return Unavailable(
            f"{self.kind} of session {name.session_id!r} were not stored: "
            + (f"the disk that holds {self._root} is full" if full else str(error.strerror)),
            hint="free some space and try again" if full else None,
        )


def _begin(directory: Path) -> Path:
    make_directory(os.fspath(directory))
    descriptor, name = tempfile.mkstemp(prefix=PART, dir=directory)
    os.close(descriptor)
    return Path(name)


def _append(part: Path, data: bytes) -> None:
    with part.open("ab") as file:
        file.write(data)


def _finish(part: Path, target: Path) -> None:
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)
    sync(target.parent)


def _found(root: Path) -> Iterator[Stored]:
    for path in (*root.glob("*/*"), *root.glob("*/*/*")):
        if (name := _name_of(path)) is not None:
            # What another has let go meanwhile is not there.
            with suppress(FileNotFoundError):
                yield Stored(name, path.stat().st_mtime)


def _name_of(path: Path) -> BlobName | None:
    session_id, _, token = path.name.rpartition(_BEFORE_TOKEN)
    return BlobName.of(f"{session_id}/{token}" if session_id else f"{path.parent.name}/{token}")


def _remove_broken_off(root: Path) -> None:
    broken_off = time.time() - _UPLOAD_SECONDS
    for part in (*root.glob(f"*/{PART}*"), *root.glob(f"*/*/{PART}*")):
        with suppress(FileNotFoundError):
            if part.stat().st_mtime < broken_off:
                part.unlink()
