"""Writes files durably, those that wait together step by step together.

A disk takes little longer to sync many files than to sync one. So all that wait are written beside
their place, then synced, then moved there; at last their directories are synced, each one once.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

T = TypeVar("T")

PART = ".part-"
"""How the name of a file begins that is not whole."""

MOST_TOGETHER = 128
"""Files written together: the first waits for the last, and all are open meanwhile."""

SYNCERS = 8
"""The disk is asked for so many syncs at once, and serves them as one."""

_SYNCERS = ThreadPoolExecutor(SYNCERS, "file-syncer")


@dataclass(slots=True)
class _Write:
    """A file to be made, and what went wrong with it."""

    path: str
    data: bytes
    part: str = ""
    descriptor: int = -1
    error: OSError | None = None

    @property
    def directory(self) -> str:
        return os.path.dirname(self.path)

    def begin(self) -> None:
        self.part = f"{self.directory}/{PART}{uuid4().hex}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self.descriptor = os.open(self.part, flags, 0o600)
        except FileNotFoundError:
            make_directory(self.directory)
            self.descriptor = os.open(self.part, flags, 0o600)
        with os.fdopen(self.descriptor, "wb", closefd=False) as file:
            file.write(self.data)

    def sync(self) -> None:
        os.fsync(self.descriptor)

    def move(self) -> None:
        self._close()
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


class FileWriter:
    """`await writer.write(path, data)` returns when the file is on the disk whole; OSError if not."""

    def __init__(self) -> None:
        self._disk = asyncio.Lock()
        self._next: tuple[list[_Write], asyncio.Task[None]] | None = None
        """What is gathered while the disk is busy, and who will write it."""

    async def write(self, path: str, data: bytes) -> None:
        mine = _Write(path, data)
        if self._next is None or len(self._next[0]) == MOST_TOGETHER:
            gathered: list[_Write] = []
            self._next = gathered, asyncio.create_task(self._write(gathered))
        gathered, written = self._next
        gathered.append(mine)
        # Who stops waiting stops no other.
        await asyncio.shield(written)
        if mine.error is not None:
            raise mine.error

    async def _write(self, gathered: list[_Write]) -> None:
        async with self._disk:
            if self._next is not None and self._next[0] is gathered:
                self._next = None
            await asyncio.to_thread(_write_together, gathered)


def _write_together(writes: list[_Write]) -> None:
    for write in writes:
        write.attempt(_Write.begin)
    _in_parallel(_sync, writes)
    moved: dict[str, list[_Write]] = defaultdict(list)
    for write in writes:
        write.attempt(_Write.move)
        if write.error is None:
            moved[write.directory].append(write)
    _in_parallel(_keep_names, list(moved.items()))


def _in_parallel(do: Callable[[Sequence[T]], None], things: Sequence[T]) -> None:
    """Each thread gets a share of them, as handing over costs more than most syncs."""
    list(_SYNCERS.map(do, (things[first::SYNCERS] for first in range(min(SYNCERS, len(things))))))


def _sync(writes: Sequence[_Write]) -> None:
    for write in writes:
        write.attempt(_Write.sync)


def _keep_names(moved: Sequence[tuple[str, list[_Write]]]) -> None:
    """Sync directories that files were moved into."""
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


def sync(path: str | os.PathLike[str]) -> None:
    """Have a file's content, or a directory's names, survive the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
