"""Attends to a listening socket inside a sandbox: carries its connections to the gateway, byte by byte."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)

_CHUNK = 65536
MAX_CONNECTIONS = 256
"""Of one listener at a time: a sandbox shall not use up the node's descriptors."""


def reachable_host(host: str) -> str:
    """Where a server that listens on `host` is reached from the same machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def served(listener: socket.socket, handle: Handler, *, limit: int = _CHUNK) -> AsyncIterator[None]:
    """While inside, `handle` attends to whoever connects to `listener`; connections end with it.

    Who comes when there are too many is hung up on.
    """
    connections: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(handle(reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    # Begun only where its end is certain: a cancelled start would leave the loop with a closed descriptor.
    server = await asyncio.start_server(connected, sock=listener, limit=limit, start_serving=False)
    try:
        await server.start_serving()
        yield
    finally:
        server.close()
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections)


@asynccontextmanager
async def forwarded(listener: socket.socket, host: str, port: int) -> AsyncIterator[None]:
    """While inside, whoever connects to `listener` talks to `host:port`."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _carry(reader, writer, reachable_host(host), port)

    async with served(listener, carry):
        yield


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    try:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError as error:
            logger.warning("a sandbox's connection to the gateway at %s:%s failed: %s", host, port, error)
            return
        try:
            await join(reader, writer, far_reader, far_writer)
        finally:
            far_writer.close()
    finally:
        writer.close()


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Copy in both directions until both have ended."""
    async with asyncio.TaskGroup() as both:
        both.create_task(copy(reader, far_writer))
        both.create_task(copy(far_reader, writer))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end of the stream and pass the end on; a broken connection is also an end."""
    try:
        while data := await reader.read(_CHUNK):
            await send(writer, data)
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()
    except OSError:
        writer.close()


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write, at the other side's pace; OSError if the connection is over."""
    # Of a connection that was closed here asyncio drops what is written, and uvloop raises RuntimeError.
    if writer.is_closing():
        raise ConnectionResetError("the connection was closed")
    writer.write(data)
    await writer.drain()
