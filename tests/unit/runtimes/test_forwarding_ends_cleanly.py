"""A listener is let go however early its attendance ends, and a connection that is over harms nobody."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from polar.runtimes.allow_list import AllowList
from polar.runtimes.network import ForwardProxy, copy, forward


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_start_leaves_the_loop_no_closed_descriptor(turns: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    async def attend() -> None:
        async with forward(listener, "127.0.0.1", 9):
            await asyncio.Event().wait()

    attending = asyncio.create_task(attend())
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    attending.cancel()
    await asyncio.wait({attending})
    # Whoever has its number next must be heard.
    listener.close()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        heard = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(ours, heard.set_result, None)
        theirs.send(b".")
        await asyncio.wait_for(heard, 30)
        asyncio.get_running_loop().remove_reader(ours)


@asynccontextmanager
async def closed_writer() -> AsyncIterator[asyncio.StreamWriter]:
    """The writer of a connection that is over."""
    ours, theirs = socket.socketpair()
    with theirs:
        _, writer = await asyncio.open_connection(sock=ours)
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
        yield writer


def heard(*said: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    for data in said:
        reader.feed_data(data)
    reader.feed_eof()
    return reader


@pytest.mark.parametrize("said", [[], [b"more"]], ids=["end", "data"])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_is_said_to_a_closed_connection_is_its_end(
    said: list[bytes], new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def say() -> None:
        async with closed_writer() as writer:
            await copy(heard(*said), writer)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(say())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_refusal_to_one_who_is_gone_is_no_error(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def refuse() -> None:
        async with closed_writer() as writer:
            proxy = ForwardProxy(AllowList.parse(()), "s")
            await proxy.serve(heard(b"CONNECT example.org:443 HTTP/1.1\r\n\r\n"), writer)
            assert proxy.refused == {"example.org:443": 1}

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(refuse())
