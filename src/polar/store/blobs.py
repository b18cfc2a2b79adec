"""Recordings on disk: opaque bytes, there whole or not at all."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from polar.errors import Unavailable

FOLDER = "recordings"
"""Where recordings are below the data directory."""

_CHUNK = 1 << 20


def recording_path(data_dir: Path, session_id: str) -> Path | None:
    """The file of a session's newest recording below a data directory, for a person to look at."""
    directory = Recordings(data_dir / FOLDER).path(session_id, 0).parent
    tokens = [int(path.name) for path in directory.glob("*") if path.name.isdigit()]
    return directory / str(max(tokens)) if tokens else None


class Recordings:
    """One file for each lease that delivered one, so that a fenced-off node cannot overwrite another's."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, session_id: str, fencing_token: int) -> Path:
        # 256 directories keep each one small.
        shard = hashlib.sha256(session_id.encode()).hexdigest()[:2]
        return self._root / shard / session_id / str(fencing_token)

    async def put(self, session_id: str, fencing_token: int, chunks: AsyncIterator[bytes]) -> None:
        """Store the bytes durably; on any failure nothing is left behind."""
        target = self.path(session_id, fencing_token)
        try:
            await _write(target, chunks)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise Unavailable(
                f"the recording of session {session_id!r} was not stored: "
                + (f"the disk that holds {self._root} is full" if full else str(error.strerror)),
                hint="free some space and try again" if full else None,
            ) from error

    async def exists(self, session_id: str, fencing_token: int) -> bool:
        return await asyncio.to_thread(self.path(session_id, fencing_token).is_file)

    async def keep_only(self, session_id: str, fencing_token: int) -> None:
        """Remove what earlier leases of the session delivered."""
        await asyncio.to_thread(_remove_others, self.path(session_id, fencing_token))


async def _write(target: Path, chunks: AsyncIterator[bytes]) -> None:
    part = await asyncio.to_thread(_begin, target.parent)
    try:
        buffer = bytearray()
        async for chunk in chunks:
            buffer += chunk
            if len(buffer) >= _CHUNK:
                await asyncio.to_thread(_append, part, bytes(buffer))
                buffer.clear()
        await asyncio.to_thread(_append, part, bytes(buffer))
        await asyncio.to_thread(_finish, part, target)
    finally:
        await asyncio.to_thread(part.unlink, missing_ok=True)


def _begin(directory: Path) -> Path:
    for missing in (directory.parent.parent, directory.parent, directory):
        if not missing.is_dir():
            missing.mkdir(parents=True, exist_ok=True)
            _sync_directory(missing.parent)
    descriptor, name = tempfile.mkstemp(prefix=".part-", dir=directory)
    os.close(descriptor)
    return Path(name)


def _append(part: Path, data: bytes) -> None:
    with part.open("ab") as file:
        file.write(data)


def _finish(part: Path, target: Path) -> None:
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)
    _sync_directory(target.parent)


def _sync_directory(directory: Path) -> None:
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
