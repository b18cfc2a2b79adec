"""Everything the control plane keeps: a database, recordings and artifacts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from polar.errors import Conflict, InvalidInput, NotFound, PolarError
from polar.models.delivery import Delivery
from polar.models.views import SessionView
from polar.store.blobs import ARTIFACTS, RECORDINGS, BlobName, Blobs, open_blobs
from polar.store.branches import Branches
from polar.store.database import Database
from polar.store.delivery import Captures, Retries, complete_rows
from polar.store.feeds import Events, Results
from polar.store.leases import LeaseStore
from polar.store.listing import Listing
from polar.store.nodes import Nodes
from polar.store.policy import Policies
from polar.store.runs import Runs
from polar.store.sessions import Sessions
from polar.store.tasks import Tasks
from polar.store.tokens import TokenStore
from polar.store.webhooks import Webhooks


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that are there, and where."""

    blobs: Blobs
    name: BlobName

    @property
    def path(self) -> Path | None:
        return self.blobs.local_path(self.name)

    def chunks(self) -> AsyncIterator[bytes]:
        return self.blobs.read(self.name)


class Store:
    """The rooms of the database, and what spans more than one of them."""

    def __init__(self, database: Database, recordings: Blobs, artifacts: Blobs) -> None:
        self.database = database
        self.tasks = Tasks(database)
        self.sessions = Sessions(database)
        self.runs = Runs(database)
        self.branches = Branches(database)
        self.leases = LeaseStore(database)
        self.captures = Captures(database)
        self.results = Results(database)
        self.events = Events(database)
        self.policy = Policies(database)
        self.nodes = Nodes(database)
        self.tokens = TokenStore(database)
        self.webhooks = Webhooks(database)
        self.listing = Listing(database)
        self.recordings = recordings
        self.artifacts = artifacts

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        data_dir: Path,
        clock: Callable[[], float] = time.time,
        *,
        database_url: str | None = None,
        blobs_url: str | None = None,
    ) -> AsyncIterator[Store]:
        """The store in this directory, or partly at URLs; made if it is not there, migrated if it is old."""
        try:
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if database_url is None:
                # Not for others to read; what SQLite puts beside it has the same mode.
                (data_dir / "polar.db").touch(mode=0o600)
        except OSError as error:
            raise PolarError(f"the data directory {data_dir} cannot be made: {error.strerror}") from None
        recordings, artifacts = (open_blobs(kind, data_dir, blobs_url) for kind in (RECORDINGS, ARTIFACTS))
        async with Database.open(database_url or data_dir / "polar.db", clock) as database:
            yield cls(database, recordings, artifacts)

    async def deliver(
        self, deliveries: Sequence[Delivery], retries: Retries = Retries()
    ) -> list[bool | PolarError]:
        """Store recordings and artifacts, then results, each exactly once and all in one transaction.

        For each: whether its result is new, or what is wrong with it, which harms no other. Where a session's
        infrastructure failed, it is run again.
        """
        held = await self.leases.find_leased([(delivery.session_id, delivery.key) for delivery in deliveries])
        problems = await asyncio.gather(*map(self._put, deliveries, held))
        sound = [delivery for delivery, problem in zip(deliveries, problems, strict=True) if problem is None]
        completed = await self.database.write(
            lambda connection: complete_rows(connection, sound, self.database.now(), retries)
        )
        for delivery, outcome in zip(sound, completed, strict=True):
            # Only a session that was leased before has something to be cleared away.
            if outcome is True and delivery.key.fencing_token > 1:
                name = BlobName(delivery.session_id, delivery.key.fencing_token)
                await self.recordings.keep_only(name)
                await self.artifacts.keep_only(name)
        rest = iter(completed)
        return [next(rest) if problem is None else problem for problem in problems]

    async def _put(self, delivery: Delivery, is_held: bool) -> PolarError | None:
        """Store what belongs to a result; what is wrong with it, if anything. Without the lease, nothing is
        stored."""
        if not is_held:
            return None
        result, name = delivery.result, BlobName(delivery.session_id, delivery.key.fencing_token)
        parts = (
            (self.recordings, delivery.recording, result.has_recording),
            (self.artifacts, delivery.artifacts, result.has_artifacts),
        )
        try:
            for blobs, data, is_claimed in parts:
                if data is not None:
                    await blobs.put(name, data)
                elif is_claimed:
                    raise InvalidInput(
                        f"{blobs.kind} of session {name.session_id!r} were not delivered with its result"
                    )
        except PolarError as error:
            return error
        return None

    async def recorded(self, session_id: str, calls: int | None = None) -> SessionView:
        """A session whose recorded answers others can begin with, the first `calls` of them or all."""
        view = await self.sessions.get(session_id)
        if view.result is None:
            raise Conflict(
                f"session {session_id!r} is {view.status.value}: it has no recording before it has ended",
                hint="`polar sessions` says how far it is",
            )
        if not view.result.has_recording:
            raise Conflict(f"session {session_id!r} {view.status.value} without a recording")
        recorded = view.result.stats.completions
        if calls is not None and calls > recorded:
            raise InvalidInput(f"calls: session {session_id!r} has {recorded} model calls, not {calls}")
        await self.recording(session_id)
        return view

    async def recording(self, session_id: str) -> Blob:
        """The recording that belongs to a session's result."""
        return await self._delivered(session_id, self.recordings)

    async def artifact_archive(self, session_id: str) -> Blob:
        """The archive of a session's artifacts."""
        return await self._delivered(session_id, self.artifacts)

    async def _delivered(self, session_id: str, blobs: Blobs) -> Blob:
        token = await self.results.fencing_token(session_id)
        if token is None:
            await self.sessions.get(session_id)
            raise NotFound(f"session {session_id!r} has not ended: it has no {blobs.kind} yet")
        name = BlobName(session_id, token)
        if not await blobs.exists(name):
            raise NotFound(f"session {session_id!r} has no {blobs.kind}")
        return Blob(blobs, name)
