"""SQLite: one thread writes, transactions that wait together share a commit, others read beside it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

from polar.errors import PolarError, Unavailable
from polar.store.database import Clock, Database

T = TypeVar("T")

log = logging.getLogger(__name__)

BUSY_SECONDS = 30.0
"""How long a transaction waits for another process's write."""

READERS = 4
READER_CACHE_KIB = 256
"""How much of the file a reader keeps in its own memory. The system has the file in its memory too, and once
for all; with the 2 MiB that SQLite takes by itself a server grew by 8 while its readers came to know it."""
MOST_TOGETHER = 64
"""Transactions that may share one commit: the first waits for the last."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A transaction that waits for the writer, and who waits for it."""

    change: Callable[[Connection], Any]
    done: Future[Any] = field(default_factory=Future)


class SqliteDatabase(Database):
    """A file. Every acknowledged transaction is on the disk; one fsync serves all that waited for it."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(str(path), clock)
        self._reading = _engine(path, "BEGIN")
        event.listen(self._reading, "connect", _keep_little)
        # A writer takes the lock at once: one that read first could find its snapshot stale and fail.
        self._writing = _engine(path, "BEGIN IMMEDIATE")
        self._readers = ThreadPoolExecutor(READERS, "sqlite-reader")
        self._writer = ThreadPoolExecutor(1, "sqlite-writer")
        self._waiting: deque[_Job] = deque()

    async def connect(self) -> None:
        with self.errors():
            await asyncio.to_thread(_use_wal, self._writing)

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.shutdown)
        await asyncio.to_thread(self._readers.shutdown)
        self._reading.dispose()
        self._writing.dispose()

    async def read(self, look: Callable[[Connection], T]) -> T:
        def run() -> T:
            with self._reading.connect() as connection:
                return look(connection)

        with self.errors():
            return await asyncio.get_running_loop().run_in_executor(self._readers, run)

    async def write(self, change: Callable[[Connection], T]) -> T:
        job = _Job(change)
        self._waiting.append(job)
        self._writer.submit(self._write_waiting)
        with self.errors():
            result: T = await asyncio.wrap_future(job.done)
            return result

    def explain(self, error: DBAPIError) -> PolarError:
        reason = str(error.orig)
        if "disk is full" in reason:
            return Unavailable(
                f"the disk that holds {self.name} is full; nothing was stored",
                hint="free some space and try again",
            )
        if "locked" in reason:
            return Unavailable(f"the database {self.name} is busy", hint="try again")
        if "not a database" in reason:
            return PolarError(
                f"{self.name} is not a Polar database", hint="move it away or choose another data_dir"
            )
        return Unavailable(f"the database {self.name} cannot be used: {reason}")

    def _write_waiting(self) -> None:
        """Commit what waits; where a common commit fails, for whatever reason, each gets its own."""
        jobs: list[_Job] = []
        while self._waiting and len(jobs) < MOST_TOGETHER:
            jobs.append(self._waiting.popleft())
        running = [job for job in jobs if job.done.set_running_or_notify_cancel()]
        if len(running) > 1:
            try:
                self._commit_together(running)
                return
            except Exception:
                log.debug("%d transactions get a commit each, since one failed", len(running))
        for job in running:
            self._commit_alone(job)

    def _commit_together(self, jobs: Sequence[_Job]) -> None:
        """One transaction for all, in which a change that raises is undone by itself."""
        settle: list[Callable[[], None]] = []
        with self._writing.begin() as connection:
            for job in jobs:
                try:
                    with connection.begin_nested():
                        settle.append(partial(job.done.set_result, job.change(connection)))
                except DBAPIError:
                    raise
                except Exception as error:
                    settle.append(partial(job.done.set_exception, error))
        for each in settle:
            each()

    def _commit_alone(self, job: _Job) -> None:
        try:
            with self._writing.begin() as connection:
                result = job.change(connection)
        except Exception as error:
            job.done.set_exception(error)
        else:
            job.done.set_result(result)


def _engine(path: Path, begin: str) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
    )
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _prepare(connection: Any, _record: object) -> None:
    # The driver begins transactions by itself, too late for IMMEDIATE; the engine's listener does it instead.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys=ON")
    # NORMAL would keep an acknowledged task through kill -9 but not through a power cut. FULL keeps it
    # through both for one fsync a commit, which those that wait together share.
    connection.execute("PRAGMA synchronous=FULL")


def _keep_little(connection: Any, _record: object) -> None:
    connection.execute(f"PRAGMA cache_size=-{READER_CACHE_KIB}")


def _use_wal(engine: Engine) -> None:
    """Let readers read while one writes. Kept in the file, so it is asked for once.

    SQLite does not wait for a lock here as it does elsewhere: when two processes make the
    database at once, the later one has to try again.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            # On the driver's connection, since the mode cannot change inside a transaction.
            with closing(engine.raw_connection()) as connection:
                connection.cursor().execute("PRAGMA journal_mode=WAL")
            return
        except engine.dialect.loaded_dbapi.Error as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise DBAPIError("PRAGMA journal_mode=WAL", None, error) from error
        time.sleep(0.05)
