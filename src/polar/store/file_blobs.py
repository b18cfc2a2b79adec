"""Blobs as files: written beside their place, synced, then moved there."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from polar.errors import Unavailable
from polar.store.blobs import CHUNK, BlobName, Blobs, Stored

_PART = ".part-"
_UPLOAD_SECONDS = 86_400.0
"""After so long without a byte an upload has broken off."""

_WRITERS = ThreadPoolExecutor(8, "blob-writer")
"""Several, since the disk syncs a few files in little more time than one."""


class FileBlobs(Blobs):
    """Below a directory of this machine, or of a file system that several mount."""

    def __init__(self, root: Path) -> None:
        super().__init__(root.name)
        self._root = root

    def path(self, session_id: str, fencing_token: int) -> Path:
        return self.local_path(BlobName(session_id, fencing_token))

    def local_path(self, name: BlobName) -> Path:
        return self._root / name.path

    async def put(self, name: BlobName, chunks: AsyncIterator[bytes]) -> None:
        try:
            await _write(self.local_path(name), chunks)
        except OSError as error:
            raise self._not_stored(name, error) from error

    async def put_whole(self, name: BlobName, data: bytes) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(_WRITERS, _write_whole, self.local_path(name), data)
        except OSError as error:
            raise self._not_stored(name, error) from error

    async def exists(self, name: BlobName) -> bool:
        return await asyncio.to_thread(self.local_path(name).is_file)

    async def read(self, name: BlobName) -> AsyncIterator[bytes]:
        with await asyncio.to_thread(self.local_path(name).open, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk

    async def keep_only(self, name: BlobName) -> None:
        await asyncio.to_thread(_remove_others, self.local_path(name))

    async def found(self) -> list[Stored]:
        return await asyncio.to_thread(_found, self._root)

    async def remove(self, names: Iterable[BlobName]) -> None:
        await asyncio.to_thread(_remove, self._root, [self.local_path(name) for name in names])

    def _not_stored(self, name: BlobName, error: OSError) -> Unavailable:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return Unavailable(
            f"{self.kind} of session {name.session_id!r} were not stored: "
            + (f"the disk that holds {self._root} is full" if full else str(error.strerror)),
            hint="free some space and try again" if full else None,
        )


async def _write(target: Path, chunks: AsyncIterator[bytes]) -> None:
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
            await asyncio.to_thread(_write_whole, target, bytes(buffer))
        else:
            await asyncio.to_thread(_append, part, bytes(buffer))
            await asyncio.to_thread(_finish, part, target)
    finally:
        if part is not None:
            await asyncio.to_thread(part.unlink, missing_ok=True)


def _write_whole(target: Path, data: bytes) -> None:
    # In as few steps as it takes: with many small blobs, threads wait for each other more than for the disk.
    directory, part = os.fspath(target.parent), f"{target.parent}/{_PART}{uuid4().hex}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(part, flags, 0o600)
    except FileNotFoundError:
        _make_directory(directory)
        descriptor = os.open(part, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise
    _sync_directory(directory)


def _begin(directory: Path) -> Path:
    _make_directory(os.fspath(directory))
    descriptor, name = tempfile.mkstemp(prefix=_PART, dir=directory)
    os.close(descriptor)
    return Path(name)


def _make_directory(directory: str) -> None:
    """Durably, with those above it. Nearly always one is missing, the session's own."""
    parent = os.path.dirname(directory)
    try:
        os.mkdir(directory)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_directory(parent)
        _make_directory(directory)
        return
    _sync_directory(parent)


def _append(part: Path, data: bytes) -> None:
    with part.open("ab") as file:
        file.write(data)


def _finish(part: Path, target: Path) -> None:
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)
    _sync_directory(target.parent)


def _sync_directory(directory: Path | str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_others(kept: Path) -> None:
    if not kept.parent.is_dir():
        return
    for path in kept.parent.iterdir():
        if path != kept:
            path.unlink(missing_ok=True)


def _found(root: Path) -> list[Stored]:
    return [
        Stored(name, path.stat().st_mtime)
        for path in root.glob("*/*/*")
        if (name := BlobName.of(path.relative_to(root).as_posix())) is not None
    ]


def _remove(root: Path, paths: list[Path]) -> None:
    broken_off = time.time() - _UPLOAD_SECONDS
    paths += [part for part in root.glob(f"*/*/{_PART}*") if part.stat().st_mtime < broken_off]
    for path in paths:
        path.unlink(missing_ok=True)
        # Fails, as it should, while something is in it.
        with suppress(OSError):
            path.parent.rmdir()
