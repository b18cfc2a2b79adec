"""Uploads the results of a node's sessions, and what running sessions have captured so far: for each of the
two one request at a time, with everything that became ready meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from polar.client.async_client import AsyncClient, size_of
from polar.errors import Backoff, PolarError, Unavailable
from polar.models.completion import RESUMED, Completion
from polar.models.delivery import CaptureGrowth, Delivery
from polar.models.session import Lease

log = logging.getLogger(__name__)

MOST_TOGETHER = 64
"""The most sessions that one request is about."""
MOST_BYTES = 16 << 20
"""The most bytes of deliveries in one request. A larger delivery travels alone."""
MOST_GROWTH = 1 << 20
"""The most bytes of captures in one request, which are in memory together."""
PAUSE_SECONDS = 0.05
"""Seconds between two requests with captures: under load, many model calls share one request."""
GROWTH_SECONDS = 10.0
"""How long the server may take to answer such a request."""
TROUBLE = Backoff(0.25, 5.0)
"""Pauses between such requests while they fail."""

Part = tuple[int, int]
"""Where something in a file begins and ends."""


class ResultUploader:
    """`await uploader.deliver(delivery)` returns when it is stored, and raises if it is refused."""

    def __init__(self, client: AsyncClient, node: str) -> None:
        self._client = client
        self._node = node
        self._turn = asyncio.Lock()
        self._next: tuple[list[Delivery], asyncio.Task[list[Exception | None]]] | None = None
        """What is gathered while a request is under way, and the task that will send it."""
        self._bytes = 0

    async def deliver(self, delivery: Delivery) -> None:
        size = size_of(delivery.recording) + size_of(delivery.artifacts)
        if size > MOST_BYTES:
            problem = await self._deliver_alone(delivery)
        else:
            problem = await self._deliver_with_others(delivery, size)
        if problem is not None:
            raise problem

    async def _deliver_with_others(self, delivery: Delivery, size: int) -> Exception | None:
        is_full = self._next is not None and len(self._next[0]) == MOST_TOGETHER
        if self._next is None or is_full or self._bytes + size > MOST_BYTES:
            gathered: list[Delivery] = []
            self._next = gathered, asyncio.create_task(self._send(gathered))
            self._bytes = 0
        gathered, sending = self._next
        gathered.append(delivery)
        place, self._bytes = len(gathered) - 1, self._bytes + size
        # A caller that stops waiting stops no other; what it delivered may be stored.
        return (await asyncio.shield(sending))[place]

    async def _deliver_alone(self, delivery: Delivery) -> Exception | None:
        try:
            (problem,) = await self._client.deliver(self._node, [delivery])
        except Exception as error:
            return error
        return problem

    async def _send(self, gathered: list[Delivery]) -> list[Exception | None]:
        async with self._turn:
            if self._next is not None and self._next[0] is gathered:
                self._next = None
            try:
                return [*await self._client.deliver(self._node, gathered)]
            except Unavailable:
                raise
            except Exception:
                # One of them may be what cannot be sent, read or stored: the others must not fail with it.
                return [await self._deliver_alone(delivery) for delivery in gathered]


@dataclass(eq=False, slots=True)
class GrowingCapture:
    """The capture of a session under one lease: which parts of its file to send, and how much was sent."""

    lease: Lease
    path: Path
    grew: Callable[[GrowingCapture], None]
    """Called whenever there is something to send."""
    is_over: bool = False
    """Whether no more of it is sent."""
    sent: int = 0
    """How many bytes the server has."""
    _parts: list[Part] = field(default_factory=list)
    _end: int = 0
    """How long the file is."""
    _has_own: bool = False

    def add(self, completion: Completion, length: int) -> None:
        """Note that one more completion is in the file, which now has this length.

        A completion of an earlier attempt is not sent again. Completions of another session are sent with the
        first one that this session sampled: before that, a lost node loses nothing.
        """
        start, self._end = self._end, length
        if self.is_over or RESUMED in completion.extra:
            return
        if self._parts and self._parts[-1][1] == start:
            start, _ = self._parts.pop()
        self._parts.append((start, length))
        self._has_own = self._has_own or not completion.is_replayed
        if self._has_own:
            self.grew(self)

    @property
    def is_behind(self) -> bool:
        """Whether the server lacks a part of it."""
        return self._has_own and not self.is_over and bool(self.unsent(1))

    def unsent(self, most: int) -> list[Part]:
        """Where in the file the next bytes to send are; at most `most` of them."""
        found: list[Part] = []
        before = self.sent
        for start, end in self._parts:
            first, before = start + before, max(before - (end - start), 0)
            if first < end and most:
                found.append((first, min(end, first + most)))
                most -= found[-1][1] - first
        return found

    def take_answer(self, length: int | None) -> None:
        """Continue after the bytes that the server has; None: it takes no more."""
        if length is None:
            self.is_over = True
        else:
            self.sent = length


class CaptureUploader:
    """Sends additions to captures as soon as they are made, so that another node can continue their sessions.

    Nobody waits for it. What cannot be sent now is read from the files again and sent later.
    """

    def __init__(self, client: AsyncClient, node: str, *, is_on: bool = True) -> None:
        self._client = client
        self._node = node
        self._is_on = is_on
        self._turn = asyncio.Lock()
        self._grew = asyncio.Event()
        self._behind: dict[GrowingCapture, None] = {}
        """Captures of which the server lacks a part, in the order in which they are sent."""

    def follow(self, lease: Lease, path: Path) -> GrowingCapture:
        """The capture at this path, which need not exist yet."""
        return GrowingCapture(lease, path, self._note, is_over=not self._is_on)

    def drop(self, capture: GrowingCapture) -> None:
        """Stop sending a capture; its file may be removed."""
        capture.is_over = True
        self._behind.pop(capture, None)

    async def finish(self, capture: GrowingCapture) -> None:
        """Send the rest of a capture; raises the error if that fails."""
        while capture in self._behind:
            await self._send()

    async def run(self) -> None:
        """Send additions to captures until cancelled."""
        failures = 0
        while True:
            await self._grew.wait()
            self._grew.clear()
            try:
                await self._send()
            except Exception as error:
                failures += 1
                if failures == 1:
                    _tell(error)
            else:
                if failures:
                    log.info("captures are sent to the server again")
                failures = 0
            if self._behind:
                self._grew.set()
            await asyncio.sleep(TROUBLE.pause(failures) if failures else PAUSE_SECONDS)

    def _note(self, capture: GrowingCapture) -> None:
        self._behind[capture] = None
        self._grew.set()

    async def _send(self) -> None:
        """Send what the server lacks, as much as fits one request."""
        async with self._turn:
            grown = await self._next()
            if not grown:
                return
            async with asyncio.timeout(GROWTH_SECONDS):
                lengths = await self._client.ship_captures(self._node, list(grown.values()))
            for capture, length in zip(grown, lengths, strict=True):
                capture.take_answer(length)
                self._behind.pop(capture, None)
                if capture.is_behind:
                    self._behind[capture] = None

    async def _next(self) -> dict[GrowingCapture, CaptureGrowth]:
        """What the next request carries."""
        places: dict[GrowingCapture, list[Part]] = {}
        room = MOST_GROWTH
        for capture in islice(self._behind, MOST_TOGETHER):
            places[capture] = capture.unsent(room)
            room -= sum(end - start for start, end in places[capture])
            if not room:
                break
        read = await asyncio.to_thread(_read, places)
        for capture in places.keys() - read.keys():
            self.drop(capture)
        return {
            capture: CaptureGrowth(
                session_id=capture.lease.session_id, key=capture.lease.key, offset=capture.sent, data=data
            )
            for capture, data in read.items()
        }


def _read(places: Mapping[GrowingCapture, Sequence[Part]]) -> dict[GrowingCapture, bytes]:
    """The content of these parts; captures that cannot be read are left out."""
    found = {}
    for capture, parts in places.items():
        try:
            with capture.path.open("rb") as file:
                found[capture] = b"".join(os.pread(file.fileno(), end - at, at) for at, end in parts)
        except FileNotFoundError:
            continue  # Its session has been stored and cleared away.
        except OSError as error:
            log.warning("session %s: its capture cannot be sent: %s", capture.lease.session_id, error)
    return found


def _tell(error: Exception) -> None:
    """Log that captures are not sent; told once, until they are again."""
    log.warning(
        "captures cannot be sent to the server and are sent later; if this node dies now, its sessions lose"
        " what is missing: %s",
        str(error) or "no answer in time",
        exc_info=not isinstance(error, PolarError | TimeoutError),
    )
