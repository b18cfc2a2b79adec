"""What client and server say to each other: frames over a Unix socket, one request for each connection.

A frame is a kind (one byte), a length (four bytes) and that many bytes. A connection begins with a MESSAGE
that says what is wanted. Bodies follow as DATA frames, the last of them empty. Ending a connection calls
its request off, so nothing outlives a client that died.
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

    async def say(self, **message: Any) -> None:
        await self.send(MESSAGE, json.dumps(message).encode())

    async def fail(self, error: SandboxError) -> None:
        kind = next(it.__name__ for it in type(error).__mro__ if it.__name__ in _ERRORS)
        await self.say(error=kind, message=error.message, hint=error.hint)

    async def send_body(self, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            if chunk:
                await self.send(DATA, chunk)
        await self.send(DATA, b"")

    async def receive(self) -> tuple[bytes, bytes]:
        """The next frame; asyncio.IncompleteReadError once the other side is gone."""
        kind, length = _HEAD.unpack(await self.reader.readexactly(_HEAD.size))
        if length > MAX_FRAME:
            raise SandboxError("a frame that is too long")
        return kind, await self.reader.readexactly(length)

    async def hear(self) -> dict[str, Any]:
        """The next message; raises the error that it tells of."""
        kind, data = await self.receive()
        if kind != MESSAGE:
            raise SandboxError(f"a frame of kind {kind!r} where a message was expected")
        return understood(data)

    async def body(self) -> AsyncIterator[bytes]:
        while (data := (await self.receive())[1]) != b"":
            yield data

    async def over(self) -> None:
        """Wait until the other side has ended the connection."""
        try:
            while await self.reader.read(CHUNK):
                pass
        except OSError:
            return

    def hang_up(self) -> None:
        """Say that nothing more is wanted; what the other side still says can be heard."""
        try:
            self.writer.write_eof()
        except OSError:
            return

    def close(self) -> None:
        self.writer.close()


def understood(data: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(data)
    if "error" in message:
        raise _ERRORS[message["error"]](message["message"], hint=message["hint"])
    return message


def chunks_of(data: bytes) -> Iterable[bytes]:
    return (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


async def join(one: Connection, other: Connection) -> None:
    """Carry bytes in both directions until both have ended; a broken connection is an end too."""
    async with asyncio.TaskGroup() as both:
        both.create_task(_copy(one, other))
        both.create_task(_copy(other, one))


async def _copy(source: Connection, target: Connection) -> None:
    try:
        while data := await source.reader.read(CHUNK):
            target.writer.write(data)
            await target.writer.drain()
        target.hang_up()
    except OSError:
        target.close()
