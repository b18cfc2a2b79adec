"""The links of the fault tests do what they are told, so that what passes them has passed something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.faults.link import Condition, Link, Opened
from tests.faults.mischief import Fault, plan
from tests.waiting import still_waits

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nping"


class Echo:
    """Answers every four bytes of a body with themselves, and remembers how often."""

    def __init__(self) -> None:
        self.taken = 0
        self.came = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"ping")
                async with self.came:
                    self.taken += 1
                    self.came.notify_all()
                writer.write(b"ping")
        except asyncio.IncompleteReadError:
            writer.close()

    async def until_taken(self, count: int) -> None:
        async with asyncio.timeout(10), self.came:
            await self.came.wait_for(lambda: self.taken >= count)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def link(echo: Echo) -> AsyncIterator[Link]:
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def reach() -> Opened:
        return await asyncio.open_connection("127.0.0.1", port)

    async with server, Link(reach, carries_http=True) as opened:
        yield opened


async def ask(link: Link) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    try:
        writer.write(REQUEST)
        async with asyncio.timeout(30):
            return await reader.read(4)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def test_a_clear_link_passes_a_request_on_once(link: Link, echo: Echo) -> None:
    assert await ask(link) == b"ping"
    assert echo.taken == 1


async def test_a_slow_link_passes_it_on_later(link: Link) -> None:
    link.become(Condition.SLOW)
    assert await ask(link) == b"ping"


async def test_a_cut_link_breaks_the_connection_and_recovers(link: Link, echo: Echo) -> None:
    link.become(Condition.CUT)
    assert await ask(link) == b""
    link.become(Condition.CLEAR)
    assert await ask(link) == b"ping"
    assert echo.taken == 1


async def test_a_frozen_link_says_nothing_until_it_recovers(link: Link, echo: Echo) -> None:
    link.become(Condition.FROZEN)
    asking = asyncio.create_task(ask(link))
    assert await still_waits(asking)
    link.become(Condition.CLEAR)
    assert await asking == b""
    assert echo.taken == 0


async def test_a_repeating_link_passes_a_request_on_twice(link: Link, echo: Echo) -> None:
    link.become(Condition.REPEATING)
    assert await ask(link) == b"ping"
    await echo.until_taken(2)


def test_what_goes_wrong_follows_from_the_seed_and_leaves_no_kind_out() -> None:
    assert plan(5, 30, list(Fault)) == plan(5, 30, list(Fault)) != plan(6, 30, list(Fault))
    assert {one.fault for one in plan(5, len(Fault), list(Fault))} == set(Fault)
