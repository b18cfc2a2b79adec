"""What nodes upload: deliveries one after another in a body, read without holding much of it in memory; and
what captures have grown by."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from polar.errors import InvalidInput, explain
from polar.models.delivery import MOST_DELIVERIES, SIZES, CaptureGrowth, Delivery
from polar.store.blobs import CHUNK, PART, Blobs
from polar.store.store import Store

M = TypeVar("M", bound=BaseModel)

MOST_JSON_BYTES = 64 << 20
"""The most JSON that all deliveries of a body may have: they are in memory together."""
MOST_IN_MEMORY = 1 << 18
"""A recording or an archive of more bytes goes to a file as it comes."""


@asynccontextmanager
async def uploaded(chunks: AsyncIterator[bytes], store: Store) -> AsyncIterator[list[Delivery]]:
    """The deliveries of a body (see `SIZES`), with files that are removed after the block if nobody took
    them."""
    body = _UploadBody(chunks)
    try:
        deliveries: list[Delivery] = []
        while not await body.has_ended():
            if len(deliveries) == MOST_DELIVERIES:
                raise InvalidInput(f"body: holds more than {MOST_DELIVERIES} deliveries")
            deliveries.append(await _delivery(body, store))
        yield deliveries
    finally:
        for part in body.parts:
            await asyncio.to_thread(part.unlink, missing_ok=True)


async def _delivery(body: _UploadBody, store: Store) -> Delivery:
    text_bytes, recording_bytes, artifacts_bytes = SIZES.unpack(await body.read(SIZES.size))
    body.json_bytes += text_bytes
    if body.json_bytes > MOST_JSON_BYTES:
        raise InvalidInput(f"body: the JSON of deliveries may have at most {MOST_JSON_BYTES} bytes together")
    delivery = _parsed(Delivery, await body.read(text_bytes))
    recording = await _part(body, recording_bytes, store.recordings, delivery)
    artifacts = await _part(body, artifacts_bytes, store.artifacts, delivery)
    return delivery.model_copy(update={"recording": recording, "artifacts": artifacts})


async def uploaded_growth(chunks: AsyncIterator[bytes]) -> list[CaptureGrowth]:
    """What captures have grown by, from a body that is small enough to be in memory."""
    body = _UploadBody(chunks)
    grown: list[CaptureGrowth] = []
    while not await body.has_ended():
        if len(grown) == MOST_DELIVERIES:
            raise InvalidInput(f"body: tells of more than {MOST_DELIVERIES} captures")
        text_bytes, data_bytes, _ = SIZES.unpack(await body.read(SIZES.size))
        one = _parsed(CaptureGrowth, await body.read(text_bytes))
        grown.append(one.model_copy(update={"data": await body.read(data_bytes)}))
    return grown


def _parsed(kind: type[M], text: bytes) -> M:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise InvalidInput(explain(error)) from None


async def _part(body: _UploadBody, size: int, blobs: Blobs, delivery: Delivery) -> bytes | Path | None:
    if size <= MOST_IN_MEMORY:
        return await body.read(size) or None
    try:
        return await body.save(size, blobs.uploads_dir)
    except OSError as error:
        raise blobs.not_stored(error, delivery.session_id) from error


class _UploadBody:
    """The bytes of a request, in the order they come."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self.parts: list[Path] = []
        """Files that were made of it."""
        self.json_bytes = 0
        self._chunks = chunks
        self._ready = bytearray()

    async def has_ended(self) -> bool:
        return not await self._fill(1)

    async def read(self, size: int) -> bytes:
        if not await self._fill(size):
            raise InvalidInput("body: ends before a delivery does")
        taken = bytes(self._ready[:size])
        del self._ready[:size]
        return taken

    async def save(self, size: int, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=PART, dir=directory)
        self.parts.append(Path(name))
        with os.fdopen(descriptor, "wb") as file:
            while size:
                data = await self.read(min(size, CHUNK))
                await asyncio.to_thread(file.write, data)
                size -= len(data)
        return Path(name)

    async def _fill(self, size: int) -> bool:
        """Whether that many bytes are ready, after waiting for them."""
        while len(self._ready) < size:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                return False
            self._ready += chunk
        return True
