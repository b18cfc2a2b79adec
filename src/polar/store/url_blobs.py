"""Blobs wherever fsspec reaches: object stores, and memory for tests.

An object appears when its upload is complete, so what is there is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

from polar.errors import InvalidInput, NotInstalled, PolarError, Unavailable
from polar.store.blobs import CHUNK, BlobName, Blobs, Stored


class UrlBlobs(Blobs):
    """Below an fsspec URL."""

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

    async def found(self) -> list[Stored]:
        try:
            listed = await asyncio.to_thread(self._files.find, self._root, detail=True)
        except FileNotFoundError:
            return []
        named = ((BlobName.of(path), details) for path, details in listed.items())
        return [
            Stored(name, await self._moment(name, details)) for name, details in named if name is not None
        ]

    async def remove(self, names: Iterable[BlobName]) -> None:
        for name in names:
            await self._do(name, _remove, self._files, self._path(name))

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


def _remove(files: Any, path: str) -> None:
    try:
        files.rm_file(path)
    except FileNotFoundError:
        return


def _shown(url: str) -> str:
    """Without a key that someone put into it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
