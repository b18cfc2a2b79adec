"""Carries connections from a listening socket to the gateway, byte by byte in both directions."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

_CHUNK = 65536


def reachable_host(host: str) -> str:
    """Where a server that listens on `host` is reached from the same machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


@asynccontextmanager
async def forwarded(listener: socket.socket, host: str, port: int) -> AsyncIterator[None]:
    """While inside, whoever connects to `listener` talks to `host:port`; connections end with it."""
    connections: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_carry(reader, writer, reachable_host(host), port))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(connected, sock=listener)
    try:
        yield
    finally:
        server.close()
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    try:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError as error:
            logger.warning("a sandbox's connection to the gateway at %s:%s failed: %s", host, port, error)
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, far_writer))
                both.create_task(_copy(far_reader, writer))
        finally:
            far_writer.close()
    finally:
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end of the stream and pass the end on; a broken connection is also an end."""
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()
