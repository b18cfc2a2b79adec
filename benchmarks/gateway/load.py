"""A load generator on bare sockets: it asks, counts and times, and does nothing else.

    python -m gateway.load < job.json

Reads one `Job`, prints one JSON result. A job that holds streams open prints `open` and ends with its
standard input.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any, cast

import aiohttp
import uvloop

from benchmarks.gateway.wire import COUNTER

_RAMP = 0.2
"""The part of a timed run that is not counted, while connections and caches fill."""

_LEAST_EACH = 6
"""Answers that a timed run counts for each connection, at least: slow ones answer many connections at once,
and where a moment's run begins and ends among such bursts would decide what is measured."""

_LONGEST = 5.0
"""How many times as long as asked for a timed run may take for that."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to ask of whom, and how."""

    kind: str
    """`throughput`, `everyday` (the same with a usual HTTP client), `latency`, `first_token` or `open`."""
    ports: list[int]
    sessions: list[tuple[str, str]]
    """Path and key of each session; requests go round. Session N is served at port N, N + 1, … in turn."""
    bodies: list[str]
    """One request after another, on the same session; only the last one's time counts."""
    counter: int
    """Where to begin to number the requests."""
    connections: int = 1
    seconds: float = 0.0
    requests: int = 0
    marker: str = ""
    """What a stream holds as soon as the first token has come through."""


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._received = bytearray()
        self._answered: asyncio.Future[None] | None = None
        self._until = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError(f"closed early: {bytes(self._received[:300])!r}"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        answered = self._answered
        if answered is None or answered.done():
            return
        if self._until in self._received if self._until else _is_whole(self._received):
            answered.set_result(None)

    async def ask(self, request: bytes, until: bytes = b"") -> None:
        """Send a request; return when the answer is whole, or holds `until`."""
        self._received.clear()
        self._until = until
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._answered
        if not self._received.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(f"refused: {bytes(self._received[:500])!r}")

    async def rest(self) -> None:
        """Wait until the answer that has begun is whole."""
        if not _is_whole(self._received):
            self._until = b""
            self._answered = asyncio.get_running_loop().create_future()
            await self._answered

    def close(self) -> None:
        self._transport.close()


def _is_whole(received: bytearray) -> bool:
    end = received.find(b"\r\n\r\n", 0, 4096)
    if end < 0:
        return False
    head = bytes(received[:end]).lower()
    at = head.find(b"content-length:")
    if at >= 0:
        return len(received) >= end + 4 + int(head[at + 15 :].split(b"\r", 1)[0])
    return received.endswith(b"0\r\n\r\n")


def numbered(job: Job, place: int = 0) -> Iterator[list[bytes]]:
    """The requests of one exchange with one of the ports, each exchange with a number of its own."""
    places = len(job.ports)
    parts = [body.encode().split(COUNTER.encode()) for body in job.bodies]
    sessions = job.sessions[place::places]
    heads = [[_head(path, key, len(body.encode())) for body in job.bodies] for path, key in sessions]
    for counter, head in zip(count(job.counter + place, places), cycle(heads), strict=False):
        number = b"%012d" % counter
        yield [top + number.join(part) for top, part in zip(head, parts, strict=True)]


def _head(path: str, key: str, length: int) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        "Accept: application/json",
        "User-Agent: bench/1.0",
        f"Content-Length: {length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def connect(port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


class Tally:
    """Counts answers over a time, from the end of the ramp on."""

    def __init__(self, job: Job) -> None:
        self._begin = time.perf_counter() + _RAMP * job.seconds
        self._seconds = job.seconds
        self._least = _LEAST_EACH * job.connections
        self._answers = 0
        self._over_after: float | None = None

    @property
    def is_over(self) -> bool:
        if self._over_after is None:
            passed = time.perf_counter() - self._begin
            enough = self._seconds if self._answers >= self._least else _LONGEST * self._seconds
            self._over_after = passed if passed >= enough else None
        return self._over_after is not None

    def count(self) -> None:
        self._answers += not self.is_over and time.perf_counter() >= self._begin

    def result(self) -> dict[str, Any]:
        assert self._over_after is not None
        return {"rate": self._answers / self._over_after}


async def throughput(job: Job) -> dict[str, Any]:
    requests = [numbered(job, place) for place in range(len(job.ports))]
    tally = Tally(job)

    async def keep_asking(place: int) -> None:
        connection = await connect(job.ports[place])
        while not tally.is_over:
            for request in next(requests[place]):
                await connection.ask(request)
                tally.count()

    await asyncio.gather(*(keep_asking(number % len(job.ports)) for number in range(job.connections)))
    return tally.result()


async def everyday(job: Job) -> dict[str, Any]:
    """As `throughput`, with the HTTP client that a program would use instead of bare sockets."""
    tally = Tally(job)
    places = len(job.ports)
    numbers = count(job.counter)
    sessions = [cycle(job.sessions[place::places]) for place in range(places)]

    async def keep_asking(client: aiohttp.ClientSession, place: int) -> None:
        while not tally.is_over:
            path, key = next(sessions[place])
            url, number = f"http://127.0.0.1:{job.ports[place]}{path}", f"{next(numbers):012d}"
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            for body in job.bodies:
                asked = body.replace(COUNTER, number).encode()
                async with client.post(url, data=asked, headers=headers) as answer:
                    await answer.read()
                    answer.raise_for_status()
                tally.count()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await asyncio.gather(*(keep_asking(client, number % places) for number in range(job.connections)))
    return tally.result()


async def latency(job: Job) -> dict[str, Any]:
    """Seconds of each exchange's last request, one at a time on one connection."""
    connection = await connect(job.ports[0])
    seconds = []
    for _, asked in zip(range(job.requests), numbered(job), strict=False):
        for request in asked:
            begun = time.perf_counter()
            await connection.ask(request)
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds}


async def first_token(job: Job) -> dict[str, Any]:
    """When each stream's first token came, by the clock all processes share."""
    connection = await connect(job.ports[0])
    moments = []
    for _, asked in zip(range(job.requests), numbered(job), strict=False):
        for request in asked:
            await connection.ask(request, job.marker.encode())
            moments.append(time.perf_counter())
            await connection.rest()
    return {"moments": moments}


async def hold_open(job: Job) -> dict[str, Any]:
    """Open all streams and keep them so until told to go on."""
    requests = numbered(job)
    gate = asyncio.Semaphore(64)

    async def begin() -> Connection:
        async with gate:
            connection = await connect(job.ports[0])
            await connection.ask(next(requests)[0], job.marker.encode())
            return connection

    connections = await asyncio.gather(*(begin() for _ in range(job.connections)))
    print("open", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.gather(*(connection.rest() for connection in connections))
    return {"ended": len(connections)}


_KINDS = {
    "throughput": throughput,
    "everyday": everyday,
    "latency": latency,
    "first_token": first_token,
    "open": hold_open,
}


def main() -> None:
    job = Job(**json.loads(sys.stdin.readline()))
    gc.disable()
    result = uvloop.run(_KINDS[job.kind](job))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
