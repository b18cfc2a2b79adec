"""Delivers what came of a node's sessions: one request at a time, with all that became ready meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from polar.client.async_client import AsyncClient
from polar.client.connection import error_of
from polar.errors import PolarError
from polar.models.session import LeaseKey, SessionResult, StageEntry
from polar.models.views import Deliveries, Delivery, ResultPost

MOST = 64
MOST_BYTES = 16 << 20
"""How much one request carries. A session with more than this goes alone, piece by piece."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What came of one session."""

    key: LeaseKey
    result: SessionResult
    recording: bytes | Path | None = None
    artifacts: bytes | Path | None = None
    """The recording and the archive, as bytes or as files that are read when they are sent."""
    entered: tuple[StageEntry, ...] = ()
    """Stages that no heartbeat has told of."""

    @property
    def parts(self) -> tuple[bytes, ...]:
        return tuple(part for part in (self.recording, self.artifacts) if isinstance(part, bytes))

    @property
    def size(self) -> int:
        return sum(map(_size, (self.recording, self.artifacts)))

    def read(self) -> Parcel:
        """The parcel with its files read into memory."""
        return replace(self, recording=_read(self.recording), artifacts=_read(self.artifacts))


class Courier:
    """`await courier.deliver(parcel)` returns when the parcel is stored, and raises if it is refused."""

    def __init__(self, client: AsyncClient, node: str) -> None:
        self._client = client
        self._node = node
        self._waiting: list[tuple[Parcel, asyncio.Future[None]]] = []
        self._turn = asyncio.Lock()

    async def deliver(self, parcel: Parcel) -> None:
        if parcel.size > MOST_BYTES:
            await self._deliver_alone(parcel)
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((parcel, mine))
        try:
            # Whoever has the turn takes along all that wait; the others find theirs delivered.
            async with self._turn:
                # Lets in those that became ready in the same moment.
                await asyncio.sleep(0)
                while not mine.done():
                    await self._deliver_waiting()
            await mine
        finally:
            mine.cancel()

    async def _deliver_waiting(self) -> None:
        taken = self._taken()
        try:
            parcels = await asyncio.to_thread(lambda: [parcel.read() for parcel, _ in taken])
            outcomes = await self._client.deliver(
                self._node,
                Deliveries(deliveries=tuple(map(_delivery, parcels))),
                [part for parcel in parcels for part in parcel.parts],
            )
        except PolarError as error:
            for _, done in taken:
                _settle(done, error)
        except BaseException:
            # Only this caller stops; delivering the others' again changes nothing.
            self._waiting[:0] = taken
            raise
        else:
            for (_, done), outcome in zip(taken, outcomes, strict=True):
                _settle(done, error_of(outcome.problem) if outcome.problem else None)

    def _taken(self) -> list[tuple[Parcel, asyncio.Future[None]]]:
        """As many as fit, without those whose caller has stopped waiting."""
        self._waiting = [(parcel, done) for parcel, done in self._waiting if not done.done()]
        count = size = 0
        for parcel, _ in self._waiting[:MOST]:
            size += parcel.size
            if size > MOST_BYTES:
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    async def _deliver_alone(self, parcel: Parcel) -> None:
        session_id, key = parcel.result.session_id, parcel.key
        if parcel.recording is not None:
            await self._client.put_recording(session_id, key, parcel.recording)
        if parcel.artifacts is not None:
            await self._client.put_artifacts(session_id, key, parcel.artifacts)
        post = ResultPost(key=key, result=parcel.result, entered=parcel.entered)
        await self._client.post_result(session_id, post)


def _delivery(parcel: Parcel) -> Delivery:
    return Delivery(
        session_id=parcel.result.session_id,
        key=parcel.key,
        result=parcel.result,
        entered=parcel.entered,
        recording_bytes=_size(parcel.recording) if parcel.recording is not None else None,
        artifacts_bytes=_size(parcel.artifacts) if parcel.artifacts is not None else None,
    )


def _size(part: bytes | Path | None) -> int:
    if part is None:
        return 0
    return part.stat().st_size if isinstance(part, Path) else len(part)


def _read(part: bytes | Path | None) -> bytes | None:
    return part.read_bytes() if isinstance(part, Path) else part


def _settle(done: asyncio.Future[None], error: PolarError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
