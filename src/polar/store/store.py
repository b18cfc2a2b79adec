"""Everything the control plane keeps: a database and recordings below one data directory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from polar.errors import NotFound, PolarError
from polar.models.session import SessionResult
from polar.store.blobs import FOLDER, Recordings
from polar.store.database import Database
from polar.store.leases import Leases
from polar.store.results import Results
from polar.store.sessions import Sessions
from polar.store.tasks import Tasks


class Store:
    """The rooms of the database, and what spans more than one of them."""

    def __init__(self, database: Database, recordings: Recordings) -> None:
        self.tasks = Tasks(database)
        self.sessions = Sessions(database)
        self.leases = Leases(database)
        self.results = Results(database)
        self.recordings = recordings

    @classmethod
    @asynccontextmanager
    async def open(cls, data_dir: Path, clock: Callable[[], float] = time.time) -> AsyncIterator[Store]:
        """The store in this directory, made if it is not there, migrated if it is old."""
        try:
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PolarError(f"the data directory {data_dir} cannot be made: {error.strerror}") from None
        async with Database.open(data_dir / "polar.db", clock) as database:
            yield cls(database, Recordings(data_dir / FOLDER))

    async def complete(self, session_id: str, fencing_token: int, result: SessionResult) -> bool:
        """Store a result whose recording, if it says it has one, was delivered under the same lease."""
        if result.has_recording and not await self.recordings.exists(session_id, fencing_token):
            await self.leases.check(session_id, fencing_token)
            raise NotFound(f"the recording of session {session_id!r} was not delivered before its result")
        is_new = await self.leases.complete(session_id, fencing_token, result)
        if is_new:
            await self.recordings.keep_only(session_id, fencing_token)
        return is_new

    async def recording(self, session_id: str) -> Path:
        """Where the recording that belongs to a session's result is."""
        view = await self.sessions.get(session_id)
        token = await self.results.fencing_token(session_id)
        if token is None or view.result is None or not view.result.has_recording:
            state = "has no recording" if view.status.ended else "has not ended"
            raise NotFound(f"session {session_id!r} {state}")
        path = self.recordings.path(session_id, token)
        if not path.is_file():
            raise NotFound(f"the recording of session {session_id!r} is gone from {path.parent}")
        return path
