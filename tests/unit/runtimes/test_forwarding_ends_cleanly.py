"""A listener that is attended to is let go however early its attendance is cancelled."""

from __future__ import annotations

import asyncio
import socket

import pytest

from polar.runtimes.forwarding import forwarded


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_start_leaves_the_loop_no_closed_descriptor(turns: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    async def attend() -> None:
        async with forwarded(listener, "127.0.0.1", 9):
            await asyncio.sleep(60)

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
