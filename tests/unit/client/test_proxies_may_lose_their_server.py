"""A proxy that cannot reach its server says so in its own words: that is tried again, not a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from polar.client import AsyncClient
from polar.errors import PolarError, Unavailable


@asynccontextmanager
async def proxy(status: str) -> AsyncIterator[str]:
    """Answers every request with a page of its own."""
    page = b"<html>it is not there</html>"
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(page)}\r\nConnection: close\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head.encode() + page)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout"])
async def test_a_server_behind_a_proxy_is_away_for_a_while(status: str) -> None:
    async with proxy(status) as url, AsyncClient(url, "a token") as client:
        with pytest.raises(Unavailable, match=status[:3]):
            await client.health()


async def test_what_is_no_polar_server_at_all_is_not_waited_for() -> None:
    async with proxy("404 Not Found") as url, AsyncClient(url, "a token") as client:
        with pytest.raises(PolarError, match="not as Polar does") as refused:
            await client.health()
        assert not isinstance(refused.value, Unavailable)
