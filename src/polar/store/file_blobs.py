"""Blobs as files, each there whole or not at all.

A disk takes little longer to sync many files than to sync one. So all that wait together are written beside
their place, then synced, then moved there; at last their directories are synced, each one once.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TypeVar
from uuid import uuid4

from polar.files import sync
from polar.store.blobs import CHUNK, PART, BlobName, Blobs, Stored

T = TypeVar("T")

MOST_TOGETHER = 128
"""Files written together: the first waits for the last, and all are open meanwhile."""

SYNCERS = 8
"""How many syncs the disk is asked for at once, which it serves as one."""

_SYNCERS = ThreadPoolExecutor(SYNCERS, "file-syncer")


class FileBlobs(Blobs):
    """Below a directory of this machine, or of a file system that several mount."""

    def __init__(self, root: Path) -> None:
        super().__init__(root.name, root)
        self._root = root
        self._disk = asyncio.Lock()
        self._next: tuple[list[_Write], asyncio.Task[None]] | None = None
        """What is gathered while the disk is busy, and the task that will write it."""

    def local_path(self, name: BlobName) -> Path:
        return self._root / name.path

    async def put(self, name: BlobName, data: bytes | PurePath) -> None:
        mine = _Write(f"{self._root}/{name.path}", data, f"{self._root}/{PART}{uuid4().hex}")
        if self._next is None or len(self._next[0]) == MOST_TOGETHER:
            gathered: list[_Write] = []
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

    async def found(self) -> list[Stored]:
        return await asyncio.to_thread(lambda: list(_found(self._root)))

    async def remove(self, names: Iterable[BlobName]) -> None:
        def unlink() -> None:
            for name in names:
                self.local_path(name).unlink(missing_ok=True)

        await asyncio.to_thread(unlink)

    async def _write(self, gathered: list[_Write]) -> None:
        async with self._disk:
            if self._next is not None and self._next[0] is gathered:
                self._next = None
            await asyncio.to_thread(_write_together, gathered)


@dataclass(slots=True)
class _Write:
    """A file to be made of bytes, or of an uploaded file, and what went wrong with it."""

    path: str
    data: bytes | PurePath
    part: str
    descriptor: int = -1
    error: OSError | None = None

    @property
    def directory(self) -> str:
        return os.path.dirname(self.path)

    def begin(self) -> None:
        if isinstance(self.data, PurePath):
            self.part = os.fspath(self.data)
            self.descriptor = os.open(self.part, os.O_RDONLY)
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self.descriptor = os.open(self.part, flags, 0o600)
        except FileNotFoundError:
            make_directory(os.path.dirname(self.part))
            self.descriptor = os.open(self.part, flags, 0o600)
        with os.fdopen(self.descriptor, "wb", closefd=False) as file:
            file.write(self.data)

    def sync(self) -> None:
        os.fsync(self.descriptor)

    def move(self) -> None:
        self._close()
        try:
            os.replace(self.part, self.path)
        except FileNotFoundError:
            make_directory(self.directory)
            os.replace(self.part, self.path)

    def attempt(self, step: Callable[[_Write], None]) -> None:
        """Take a step, unless one has failed; then nothing is left of the file."""
        if self.error is not None:
            return
        try:
            step(self)
        except OSError as error:
            self.error = error
            self._close()
            with suppress(OSError):
                os.unlink(self.part)

    def _close(self) -> None:
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


def _write_together(writes: list[_Write]) -> None:
    for write in writes:
        write.attempt(_Write.begin)
    _in_parallel(_sync, writes)
    moved: dict[str, list[_Write]] = defaultdict(list)
    for write in writes:
        write.attempt(_Write.move)
        if write.error is None:
            moved[write.directory].append(write)
    _in_parallel(_sync_directories, list(moved.items()))


def _in_parallel(do: Callable[[Sequence[T]], None], things: Sequence[T]) -> None:
    """Each thread gets a share of them, as handing over costs more than most syncs."""
    list(_SYNCERS.map(do, (things[first::SYNCERS] for first in range(min(SYNCERS, len(things))))))


def _sync(writes: Sequence[_Write]) -> None:
    for write in writes:
        write.attempt(_Write.sync)


def _sync_directories(moved: Sequence[tuple[str, list[_Write]]]) -> None:
    for directory, writes in moved:
        try:
            sync(directory)
        except OSError as error:
            for write in writes:
                write.error = error


def make_directory(directory: str) -> None:
    """Durably, with those above it."""
    parent = os.path.dirname(directory)
    try:
        os.mkdir(directory)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_directory(parent)
        make_directory(directory)
        return
    sync(parent)


def _found(root: Path) -> Iterator[Stored]:
    for path in root.glob("*/*"):
        if (name := BlobName.of(path.name)) is not None:
            # What another has removed meanwhile is not there.
            with suppress(FileNotFoundError):
                yield Stored(name, path.stat().st_mtime)
