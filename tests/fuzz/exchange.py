"""Sends bytes to a server and reads one answer, strictly: what is wrong with an answer is an error here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.fuzz.wire import Wire


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_endless(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


class BrokenAnswer(Exception):
    """An answer that no client could read, or none."""


class Connection:
    """One keep-alive connection, opened when it is needed."""

    def __init__(self, host: str, port: int) -> None:
        self._at = (host, port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, wire: Wire) -> Reply | None:
        """The answer; None where the server may close without one, and does."""
        is_new = self._streams is None
        reader, writer = self._streams = self._streams or await asyncio.open_connection(*self._at)
        try:
            writer.write(wire.data)
            if not wire.is_whole:
                await writer.drain()
                writer.write_eof()
            reply = await _reply(reader, wire.method)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            if not is_new:  # the server may close an idle connection at any time
                return await self.exchange(wire)
            if wire.is_whole:
                raise BrokenAnswer(f"{type(error).__name__}: {error}") from error
            return None
        if not wire.keeps_open or reply.is_endless or reply.headers.get("connection", "").lower() == "close":
            self.close()
        return reply

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _reply(reader: asyncio.StreamReader, method: str) -> Reply:
    status, headers = await _head(reader)
    while 100 <= status < 200 and status != 101:
        status, headers = await _head(reader)
    reply = Reply(status, headers, b"")
    if (
        method == "HEAD"
        or status in (101, 204, 304)
        or (reply.is_endless and "x-accel-buffering" not in headers)
    ):
        return reply
    return Reply(status, headers, await _body(reader, headers))


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, status, *_ = head[0].split(" ", 2)
    if not version.startswith("HTTP/"):
        raise BrokenAnswer(f"not HTTP: {head[0]!r}")
    fields = (line.partition(":") for line in head[1:] if line)
    return int(status), {name.strip().lower(): value.strip() for name, _, value in fields}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
        return body
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read()
