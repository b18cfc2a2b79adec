"""Everything the control plane keeps: a database, recordings and artifacts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from polar.errors import NotFound, PolarError
from polar.models.session import LeaseKey, SessionResult, StageEntry
from polar.store.blobs import ARTIFACTS, RECORDINGS, BlobName, Blobs, open_blobs
from polar.store.callbacks import Callbacks
from polar.store.database import Database
from polar.store.delivery import Delivered
from polar.store.events import Events
from polar.store.leased import Retries
from polar.store.leases import Leases
from polar.store.listing import Listing
from polar.store.nodes import Nodes
from polar.store.overview import Overviews
from polar.store.policy import Policies
from polar.store.results import Results
from polar.store.sessions import Sessions
from polar.store.tasks import Tasks
from polar.store.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Package:
    """A result and, unless they were delivered before it, the bytes that belong to it."""

    delivered: Delivered
    recording: bytes | None = None
    artifacts: bytes | None = None

    @property
    def name(self) -> BlobName:
        return BlobName(self.delivered.session_id, self.delivered.key.fencing_token)


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
        self.leases = Leases(database)
        self.results = Results(database)
        self.events = Events(database)
        self.policy = Policies(database)
        self.nodes = Nodes(database)
        self.tokens = Tokens(database)
        self.callbacks = Callbacks(database)
        self.listing = Listing(database)
        self.overviews = Overviews(database)
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

    async def complete(
        self,
        session_id: str,
        key: LeaseKey,
        result: SessionResult,
        entered: Sequence[StageEntry] = (),
        retries: Retries = Retries(),
    ) -> bool:
        """Take a result whose recording and artifacts, if it says it has them, came under the same lease."""
        package = Package(Delivered(session_id, key, result, entered))
        (outcome,) = await self.deliver([package], retries)
        if isinstance(outcome, PolarError):
            raise outcome
        return outcome

    async def deliver(
        self, packages: Sequence[Package], retries: Retries = Retries()
    ) -> list[bool | PolarError]:
        """Store bytes, then results. Of each: whether it is new, or what is wrong with it alone."""
        keys = {package.delivered.session_id: package.delivered.key for package in packages}
        has_bytes = any(
            package.recording is not None or package.artifacts is not None for package in packages
        )
        held = await self.leases.held(keys) if has_bytes else frozenset()
        problems = await asyncio.gather(
            *(self._unpack(package, package.name.session_id in held) for package in packages)
        )
        sound = [package for package, problem in zip(packages, problems, strict=True) if problem is None]
        delivered = [package.delivered for package in sound]
        completed = await self.leases.complete_all(delivered, retries) if sound else []
        for package, outcome in zip(sound, completed, strict=True):
            # Only a session that was leased before has something to be cleared away.
            if outcome is True and package.name.fencing_token > 1:
                await self.recordings.keep_only(package.name)
                await self.artifacts.keep_only(package.name)
        rest = iter(completed)
        return [next(rest) if problem is None else problem for problem in problems]

    async def _unpack(self, package: Package, is_held: bool) -> PolarError | None:
        """Store the bytes of a package; what is wrong with it, if anything."""
        name, result = package.name, package.delivered.result
        delivered = (
            (self.recordings, package.recording, result.has_recording),
            (self.artifacts, package.artifacts, result.has_artifacts),
        )
        try:
            for blobs, data, is_claimed in delivered:
                if data is not None and is_held:
                    await blobs.put_whole(name, data)
                elif is_claimed and not await blobs.exists(name):
                    await self.leases.check(name.session_id, package.delivered.key)
                    raise NotFound(
                        f"{blobs.kind} of session {name.session_id!r} were not delivered before its result"
                    )
        except PolarError as error:
            return error
        return None

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
