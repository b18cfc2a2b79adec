"""HTTP/1.1 to one engine: kept-alive connections with one request at a time, bodies as they arrive.

Every token passes here, so this does only what an engine needs: no redirects, cookies, proxies or
encodings. A general client takes longer for a request than all else the gateway does with it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

_PORTS = {"http": 80, "https": 443}


class Disconnected(Exception):
    """No connection could be made, or it broke before the answer was whole."""


class Connections:
    """The connections to one server; as many as there are requests at once."""

    def __init__(
        self, url: str, headers: Mapping[str, str], *, connect_seconds: float, silence_seconds: float
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        fields = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._connect_seconds = connect_seconds
        self.silence_seconds = silence_seconds
        self._idle: list[_EngineConnection] = []
        self._busy: set[_EngineConnection] = set()
        self.epoch = 0
        """Rises when the first connection is made after none was open: only then may the server be another
        process than before."""

    def request(self, method: str, path: str, body: bytes = b"") -> Exchange:
        """An async context manager that yields the answer once its head is here; leaving early closes the
        connection."""
        line = f"{method} {self._base}{path} HTTP/1.1\r\n"
        head = f"{line}{self._fields}Content-Length: {len(body)}\r\n\r\n".encode("latin-1")
        return Exchange(self, head + body)

    def give_back(self, connection: _EngineConnection) -> None:
        self._busy.discard(connection)
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    async def take(self) -> _EngineConnection:
        """Return an idle or a new connection."""
        while self._idle and not self._idle[-1].is_reusable:
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._connect()
        self._busy.add(connection)
        return connection

    async def _connect(self) -> _EngineConnection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                loop = asyncio.get_running_loop()
                _, made = await loop.create_connection(
                    lambda: _EngineConnection(self), self._host, self._port, ssl=self._ssl
                )
        except OSError as error:
            raise Disconnected(str(error) or type(error).__name__) from error
        if not any(other.is_open for other in (*self._idle, *self._busy)):
            self.epoch += 1
        return made


class Exchange:
    """One request and its answer, whose body may still be coming; a class, because a generator costs more
    than all else in here."""

    _connection: _EngineConnection

    def __init__(self, connections: Connections, request: bytes) -> None:
        self._connections = connections
        self._request = request
        self.status = 0
        self.headers: dict[str, str] = {}
        """Names in lower case."""
        self.has_head = False
        self.is_whole = False
        self._arrived: list[bytes] = []
        self._failure: Disconnected | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Exchange:
        self._connection = await self._connections.take()
        try:
            self._connection.send(self._request, self)
            # A connection keeps its last exchange, and prompts are long.
            self._request = b""
            while not self.has_head:
                await self._change()
        except BaseException:
            self._connections.give_back(self._connection)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connections.give_back(self._connection)

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """Return the rest of the body."""
        while not self.is_whole:
            await self._change()
        return self._taken()

    async def piece(self) -> bytes:
        """Return the bytes that have arrived since the last call; empty at the end."""
        while not self._arrived and not self.is_whole:
            await self._change()
        return self._taken()

    def _taken(self) -> bytes:
        arrived, self._arrived = self._arrived, []
        return b"".join(arrived)

    async def _change(self) -> None:
        """Return once more is known."""
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def add(self, piece: bytes) -> None:
        self._arrived.append(piece)

    def fail(self, failure: Disconnected) -> None:
        self._failure = failure
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            if self._failure is not None:
                self._waiter.set_exception(self._failure)
            else:
                self._waiter.set_result(None)


class _EngineConnection(asyncio.Protocol):
    """One connection; the methods named `on_…` are called by the parser."""

    _transport: asyncio.Transport

    def __init__(self, connections: Connections) -> None:
        self._silence_seconds = connections.silence_seconds
        self._exchange = Exchange(connections, b"")
        self._parser = httptools.HttpResponseParser(self)
        self.is_open = True
        self.is_reusable = True
        """Whether the connection is open and the last answer was read completely."""
        self._heard_at = 0.0
        self._watch: asyncio.TimerHandle | None = None

    def send(self, data: bytes, exchange: Exchange) -> None:
        self.is_reusable = False
        self._exchange = exchange
        self._heard_at = asyncio.get_running_loop().time()
        if self._watch is None:
            self._watch_silence()
        if self.is_open:
            self._transport.write(data)
        else:
            exchange.fail(Disconnected("the server closed the connection"))

    def close(self) -> None:
        self._stop_watching()
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.is_reusable:
            self._break("the server spoke without being asked")
            return
        self._heard_at = asyncio.get_running_loop().time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"the server does not speak HTTP: {error}")
        self._exchange.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = self.is_reusable = False
        self._stop_watching()
        exchange = self._exchange
        if exchange.is_whole:
            return
        if exchange.has_head and not {"content-length", "transfer-encoding"} & exchange.headers.keys():
            exchange.is_whole = True
            exchange.wake()
        else:
            exchange.fail(Disconnected(str(exc or "the server closed the connection")))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._exchange.status = self._parser.get_status_code()
        self._exchange.has_head = True

    def on_body(self, body: bytes) -> None:
        self._exchange.add(body)

    def on_message_complete(self) -> None:
        if self._exchange.status < 200:  # an interim answer: the real one follows
            self._exchange.headers.clear()
            self._exchange.has_head = False
            return
        self._exchange.is_whole = True
        self.is_reusable = self.is_open and self._parser.should_keep_alive()

    def _watch_silence(self) -> None:
        """Close the connection once the server has been silent for too long."""
        self._watch = None
        if self.is_reusable:
            return
        loop = asyncio.get_running_loop()
        left = self._heard_at + self._silence_seconds - loop.time()
        if left > 0:
            self._watch = loop.call_later(left, self._watch_silence)
        else:
            self._break(f"the server said nothing for {self._silence_seconds:g} s")

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _break(self, reason: str) -> None:
        self.is_reusable = False
        self._exchange.fail(Disconnected(reason))
        self.close()
