"""The HTTP connections to an engine: reused when an answer is whole, broken off when it is left early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.engines.connections import Connections, Disconnected
from tests.fakes.raw_server import RawServer
from tests.waiting import leap, turns


@asynccontextmanager
async def served(
    *answers: bytes | None, pause: float | None = None, silence_seconds: float = 30.0
) -> AsyncIterator[tuple[RawServer, Connections]]:
    server = RawServer(answers, pause)
    listener = await asyncio.start_server(server.talk, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    connections = Connections(
        f"http://127.0.0.1:{port}/base",
        {"Authorization": "Bearer secret"},
        connect_seconds=5.0,
        silence_seconds=silence_seconds,
    )
    try:
        yield server, connections
    finally:
        connections.close()
        listener.close()


def whole(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *fields, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def ask(connections: Connections, body: bytes = b"{}") -> bytes:
    async with connections.request("POST", "/v1/completions", body) as response:
        return await response.read()


async def test_whole_answers_share_one_connection() -> None:
    async with served(whole(b"one"), chunked(b"t", b"wo"), whole(b"")) as (server, connections):
        assert [await ask(connections) for _ in range(3)] == [b"one", b"two", b""]
        assert server.connections == 1
    first = server.heads[0]
    assert first.startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in first


async def test_requests_at_once_get_connections_of_their_own() -> None:
    async with served(*[whole(b"x")] * 4) as (server, connections):
        assert await asyncio.gather(*(ask(connections) for _ in range(4))) == [b"x"] * 4
        assert server.connections == 4


async def test_status_and_type_are_known_before_the_body() -> None:
    answer = whole(b"no", "Content-Type: application/json; charset=utf-8", status="503 Busy")
    async with served(answer) as (_, connections), connections.request("GET", "/v1/models") as response:
        assert (response.status, response.content_type) == (503, "application/json")
        assert await response.read() == b"no"


async def test_leaving_early_breaks_the_connection_off() -> None:
    beginning = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"
    async with served(beginning) as (server, connections):
        async with connections.request("POST", "/", b"{}") as response:
            assert await response.piece() == b"first"
        async with asyncio.timeout(30):
            await server.closed_by_client.wait()


async def test_a_cancelled_wait_breaks_the_connection_off() -> None:
    async with served(None) as (server, connections):
        waiting = asyncio.create_task(ask(connections))
        await server.asked.wait()
        waiting.cancel()
        async with asyncio.timeout(30):
            await server.closed_by_client.wait()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n5\r\nfirst\r\n",
        b"",
        b"no HTTP at all\r\n\r\n",
    ],
    ids=["short body", "no last chunk", "nothing", "not HTTP"],
)
async def test_an_answer_that_is_not_whole_is_no_answer(answer: bytes) -> None:
    async with served(answer) as (_, connections):
        with pytest.raises(Disconnected):
            await ask(connections)


async def test_an_answer_may_end_with_its_connection() -> None:
    async with served(b"HTTP/1.0 200 OK\r\n\r\nold", whole(b"new")) as (server, connections):
        assert [await ask(connections), await ask(connections)] == [b"old", b"new"]
        assert server.connections == 2


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async with served(whole(b"one", "Connection: close"), whole(b"two")) as (server, connections):
        assert [await ask(connections), await ask(connections)] == [b"one", b"two"]
        assert server.connections == 2


async def test_a_silent_server_is_given_up() -> None:
    async with served(None, silence_seconds=0.05) as (_, connections):
        with pytest.raises(Disconnected, match="said nothing"):
            await ask(connections)


async def test_silence_counts_only_while_something_is_asked() -> None:
    async with served(whole(b"one"), whole(b"two"), None, silence_seconds=0.5) as (server, connections):
        assert await ask(connections) == b"one"
        leap(0.6)
        await turns(2)
        assert await ask(connections) == b"two"
        with pytest.raises(Disconnected, match="said nothing"):
            await ask(connections)
        assert server.connections == 1


async def test_a_slow_server_is_not_a_silent_one() -> None:
    async with served(whole(b"slowly"), pause=20.0, silence_seconds=30.0) as (_, connections):
        assert await ask(connections) == b"slowly"


async def test_nobody_listening_is_told() -> None:
    listener = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    connections = Connections(f"http://127.0.0.1:{port}", {}, connect_seconds=5.0, silence_seconds=5.0)
    with pytest.raises(Disconnected):
        await ask(connections)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.booleans())
def test_bodies_come_through_however_they_are_cut(pieces: list[bytes], by_byte: bool) -> None:
    async def check() -> None:
        async with served(chunked(*pieces), pause=0.0 if by_byte else None) as (_, connections):
            assert await ask(connections) == b"".join(pieces)

    asyncio.run(check())
