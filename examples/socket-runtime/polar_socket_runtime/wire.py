"""The protocol of client and server: frames over a Unix socket, one request per connection.

A frame is a kind (one byte), a length (four bytes) and that many bytes. A connection begins with a MESSAGE
that describes the request. Bodies follow as DATA frames, the last of them empty. Closing a connection cancels
its request, so nothing outlives a client that died.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Any

from polar.runtimes.base import (
    ImageNotFound,
    PathRefused,
    SandboxError,
    SandboxFull,
    SandboxUnavailable,
)

MESSAGE, DATA, STDOUT, STDERR = b"M", b"D", b"O", b"E"
CHUNK = 65536
MAX_FRAME = 16 * 1024 * 1024
_HEAD = struct.Struct("!cI")
_ERRORS = {
    kind.__name__: kind
    for kind in (SandboxError, SandboxUnavailable, ImageNotFound, SandboxFull, PathRefused)
}


class Connection:
    """One end of a connection, in frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, kind: bytes, data: bytes) -> None:
        self.writer.write(_HEAD.pack(kind, len(data)) + data)
        await self.writer.drain()

    async def send_message(self, **message: Any) -> None:
        await self.send(MESSAGE, json.dumps(message).encode())

    async def fail(self, error: SandboxError) -> None:
        kind = next(it.__name__ for it in type(error).__mro__ if it.__name__ in _ERRORS)
        await self.send_message(error=kind, message=error.message, hint=error.hint)

    async def send_body(self, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            if chunk:
                await self.send(DATA, chunk)
        await self.send(DATA, b"")

    async def receive(self) -> tuple[bytes, bytes]:
        """Return the next frame; raise asyncio.IncompleteReadError once the other side has closed."""
        kind, length = _HEAD.unpack(await self.reader.readexactly(_HEAD.size))
        if length > MAX_FRAME:
            raise SandboxError("received a frame that is too long")
        return kind, await self.reader.readexactly(length)

    async def receive_message(self) -> dict[str, Any]:
        """Return the next message, or raise the error in it."""
        kind, data = await self.receive()
        if kind != MESSAGE:
            raise SandboxError(f"received a frame of kind {kind!r} instead of a message")
        return parse_message(data)

    async def body(self) -> AsyncIterator[bytes]:
        while (data := (await self.receive())[1]) != b"":
            yield data

    async def wait_closed(self) -> None:
        """Wait until the other side has closed the connection."""
        try:
            while await self.reader.read(CHUNK):
                pass
        except OSError:
            return

    def close_sending(self) -> None:
        """Close the sending side; the other side's remaining messages can still be received."""
        try:
            self.writer.write_eof()
        except OSError:
            return

    def close(self) -> None:
        self.writer.close()


def parse_message(data: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(data)
    if "error" in message:
        raise _ERRORS[message["error"]](message["message"], hint=message["hint"])
    return message


def chunks_of(data: bytes) -> Iterable[bytes]:
    return (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


async def join(one: Connection, other: Connection) -> None:
    """Forward bytes in both directions until both have ended; a broken connection counts as an end."""
    async with asyncio.TaskGroup() as both:
        both.create_task(_copy(one, other))
        both.create_task(_copy(other, one))


async def _copy(source: Connection, target: Connection) -> None:
    try:
        while data := await source.reader.read(CHUNK):
            target.writer.write(data)
            await target.writer.drain()
        target.close_sending()
    except OSError:
        target.close()
