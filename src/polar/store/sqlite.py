"""SQLite: one thread writes, transactions that wait together share a commit, others read beside it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

from polar.errors import PolarError, Unavailable
from polar.store.database import Clock, Database

T = TypeVar("T")

BUSY_SECONDS = 30.0
"""How long a transaction waits for another process's write."""

READERS = 4
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
        # A writer takes the lock at once: one that read first could find its snapshot stale and fail.
        self._writing = _engine(path, "BEGIN IMMEDIATE")
        self._readers = ThreadPoolExecutor(READERS, "sqlite-reader")
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_forever, name="sqlite-writer", daemon=True)

    @classmethod
    async def connect(cls, path: Path, clock: Clock) -> Self:
        database = cls(path, clock)
        with database.errors():
            await asyncio.to_thread(_use_wal, database._writing)
        database._writer.start()
        return database

    async def close(self) -> None:
        self._jobs.put(None)
        await asyncio.to_thread(self._writer.join)
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
        self._jobs.put(job)
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

    def _write_forever(self) -> None:
        while (first := self._jobs.get()) is not None:
            jobs = [first]
            is_last = False
            while len(jobs) < MOST_TOGETHER and not is_last:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is None:
                    is_last = True
                else:
                    jobs.append(job)
            self._write_all([job for job in jobs if job.done.set_running_or_notify_cancel()])
            if is_last:
                return

    def _write_all(self, jobs: list[_Job]) -> None:
        """One transaction for all; where the database gives that up, each gets its own."""
        if len(jobs) > 1:
            try:
                outcomes = self._commit_together(jobs)
            except DBAPIError:
                outcomes = []
            for job, outcome in zip(jobs, outcomes, strict=False):
                _settle(job, outcome)
            jobs = jobs[len(outcomes) :]
        for job in jobs:
            _settle(job, self._commit_alone(job))

    def _commit_together(self, jobs: list[_Job]) -> list[Any]:
        """What each returned or raised; a change that raises is undone by itself."""
        outcomes: list[Any] = []
        with self._writing.begin() as connection:
            for job in jobs:
                try:
                    with connection.begin_nested():
                        outcomes.append(job.change(connection))
                except DBAPIError:
                    raise
                except Exception as error:
                    outcomes.append(_Raised(error))
        return outcomes

    def _commit_alone(self, job: _Job) -> Any:
        try:
            with self._writing.begin() as connection:
                return job.change(connection)
        except Exception as error:
            return _Raised(error)


@dataclass(frozen=True, slots=True)
class _Raised:
    error: Exception


def _settle(job: _Job, outcome: Any) -> None:
    if isinstance(outcome, _Raised):
        job.done.set_exception(outcome.error)
    else:
        job.done.set_result(outcome)


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
        except engine.dialect.loaded_dbapi.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise DBAPIError("PRAGMA journal_mode=WAL", None, error) from error
        except engine.dialect.loaded_dbapi.Error as error:
            raise DBAPIError("PRAGMA journal_mode=WAL", None, error) from error
        time.sleep(0.05)
