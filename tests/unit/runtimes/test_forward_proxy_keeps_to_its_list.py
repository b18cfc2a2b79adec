"""The proxy of a sandbox connects to what is listed, at the address it checked, and says why not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from polar.runtimes import network
from polar.runtimes.allow_list import AllowList
from polar.runtimes.network import ForwardProxy, proxy_environment, serve_listener


@asynccontextmanager
async def web_server() -> AsyncIterator[tuple[int, list[bytes]]]:
    """Answers every connection once; its port, and what it was sent."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0] or b"0")
        seen.append(head + await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nreached")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], seen


@asynccontextmanager
async def proxy(*allowed: str) -> AsyncIterator[tuple[int, ForwardProxy]]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    made = ForwardProxy(AllowList.parse(allowed), "s1")
    async with serve_listener(listener, made.serve, limit=network.MAX_HEAD_BYTES):
        yield port, made


async def ask(port: int, request: str) -> str:
    """Everything the proxy answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer.decode()


async def test_a_listed_server_is_asked_for_itself_whatever_host_is_claimed() -> None:
    async with web_server() as (web, seen), proxy(f"localhost:{web}") as (port, _):
        request = f"GET http://localhost:{web}/a?b HTTP/1.1\r\nHost: other.example\r\nX-One: 1\r\n"
        answer = await ask(port, f"{request}Proxy-Authorization: secret\r\nConnection: keep-alive\r\n\r\n")
        assert answer.endswith("reached")
        expected = f"GET /a?b HTTP/1.1\r\nHost: localhost:{web}\r\nX-One: 1\r\nConnection: close\r\n\r\n"
        assert seen == [expected.encode()]


async def test_a_body_is_passed_on_and_nothing_after_it() -> None:
    async with web_server() as (web, seen), proxy(f"localhost:{web}") as (port, _):
        head = f"POST http://localhost:{web} HTTP/1.1\r\nContent-Length: 5\r\n\r\n"
        assert (await ask(port, f"{head}12345GET / HTTP/1.1\r\nHost: other\r\n\r\n")).endswith("reached")
        assert seen[0].startswith(b"POST / HTTP/1.1\r\n")
        assert seen[0].endswith(b"\r\n\r\n12345")


async def test_a_tunnel_carries_both_directions() -> None:
    async with web_server() as (web, seen), proxy(f"localhost:{web}") as (port, _):
        answer = await ask(port, f"CONNECT localhost:{web} HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        assert answer.startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
        assert seen == [b"GET / HTTP/1.1\r\n\r\n"]


async def test_what_is_not_listed_is_refused_by_name_and_counted() -> None:
    async with web_server() as (web, seen), proxy("localhost:1", "pypi.org:443") as (port, made):
        wanted = [
            *(f"CONNECT {host}:{web} HTTP/1.1" for host in ("localhost", "127.0.0.1", "[::1]", "pypi.org")),
            *(f"GET http://{host}:{web}/ HTTP/1.1" for host in ("localhost", "127.0.0.1", "127.1", "0x7f.1")),
            f"GET http://localhost:1@127.0.0.1:{web}/ HTTP/1.1",
            f"CONNECT 2130706433:{web} HTTP/1.1",
            f"CONNECT *.pypi.org:{web} HTTP/1.1",
        ]
        for line in wanted:
            # The Host header may say what is listed: it is not what is asked for.
            answer = await ask(port, f"{line}\r\nHost: localhost:1\r\n\r\n")
            assert answer.startswith("HTTP/1.1 403 Forbidden\r\n"), line
            assert "polar: " in answer
        assert seen == []
        assert made.refused[f"localhost:{web}"] == 2
        assert made.refused[f"127.0.0.1:{web}"] == 2


@pytest.mark.parametrize(
    "request_",
    [
        *("GET / HTTP/1.1\r\n\r\n", "GET https://a.org/ HTTP/1.1\r\n\r\n", "nonsense\r\n\r\n"),
        *("GET http://localhost:1/ HTTP/1.1\r\nContent-Length: x\r\n\r\n", f"GET {'a' * 70000}"),
        *("GET http://a b/ HTTP/1.1\r\n\r\n", "CONNECT a.org:443 HTTP/2\r\n\r\n"),
    ],
)
async def test_what_is_no_request_is_told_so(request_: str) -> None:
    async with proxy("localhost:1") as (port, _):
        assert (await ask(port, request_)).startswith("HTTP/1.1 400 Bad Request\r\n")


async def test_a_name_is_resolved_once_and_reached_where_it_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name server that says a public address first and this machine's the next time gains nothing."""
    asked: list[str] = []
    connected: list[str] = []
    addresses = iter([["192.0.2.1", "127.0.0.1"], ["151.101.0.223", "127.0.0.1"], ["127.0.0.1"]])

    async def resolve(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, port)) for text in next(addresses)]

    open_connection = asyncio.open_connection

    async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if port != 443:
            return await open_connection(host, port)
        connected.append(host)
        raise ConnectionRefusedError("refused")

    async with proxy("*.example.org:443") as (port, _):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        monkeypatch.setattr(asyncio, "open_connection", connect)
        answers = [await ask(port, "CONNECT a.example.org:443 HTTP/1.1\r\n\r\n") for _ in range(3)]
        assert [answer.split()[1] for answer in answers] == ["403", "502", "403"]
        assert connected == ["151.101.0.223"]
        assert asked == ["a.example.org"] * 3


async def test_a_dead_server_is_told_apart_from_a_forbidden_one() -> None:
    async with web_server() as (web, _):
        pass
    async with proxy(f"localhost:{web}") as (port, _made):
        answer = await ask(port, f"CONNECT localhost:{web} HTTP/1.1\r\n\r\n")
        assert answer.startswith("HTTP/1.1 502 Bad Gateway\r\n")


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MAX_CONNECTIONS", 2)
    async with web_server() as (web, _), proxy(f"localhost:{web}") as (port, _made):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        request = f"GET http://localhost:{web}/ HTTP/1.1\r\n\r\n"
        with suppress(ConnectionResetError):
            assert await ask(port, request) == ""
        for reader, writer in silent:
            writer.write_eof()
            await reader.read()
            writer.close()
        assert (await ask(port, request)).endswith("reached")


def test_programs_are_told_of_the_proxy_and_reach_the_gateway_without_it() -> None:
    env = proxy_environment(AllowList.parse(["pypi.org:443"]), 47101)
    assert env["HTTPS_PROXY"] == env["https_proxy"] == env["http_proxy"] == "http://127.0.0.1:47101"
    assert env["NO_PROXY"] == env["no_proxy"] == "127.0.0.1,::1,localhost"
    assert proxy_environment(AllowList.parse(["localhost:1"]), 1)["no_proxy"] == "127.0.0.1,::1"
