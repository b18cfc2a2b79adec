"""The database: its engine, read and write transactions, and everything special to SQLite."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from polar.errors import PolarError, Unavailable
from polar.store.migrate import upgrade

BUSY_SECONDS = 30.0
"""How long a transaction waits for another process's write."""

_BEGIN = "polar_begin"


class Database:
    """Transactions on one database; a row read in `write` cannot change before it commits."""

    def __init__(self, engine: AsyncEngine, name: str, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._writer = engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        # SQLite has one writer and lets the others poll; queueing here first is fair and costs nothing.
        self._turn = asyncio.Lock()
        self._name = name
        self.now = clock
        """Unix seconds."""

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path, clock: Callable[[], float] = time.time) -> AsyncIterator[Database]:
        """The database in this file, made or migrated to the newest version."""
        engine = _sqlite_engine(path)
        database = cls(engine, str(path), clock)
        try:
            await database._use_wal()
            async with database.write() as connection:
                await connection.run_sync(upgrade, str(path))
            yield database
        finally:
            await engine.dispose()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that sees one state of the database and changes nothing."""
        with self._errors():
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that is stored whole when the block ends, or not at all if it raises."""
        with self._errors():
            async with self._turn, self._writer.begin() as connection:
                yield connection

    async def _use_wal(self) -> None:
        """Let readers read while one writes. Kept in the file, so it is asked for once.

        SQLite does not wait for a lock here as it does elsewhere: when two processes make the
        database at once, the later one has to try again.
        """
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                async with self._engine.connect() as connection:
                    await connection.run_sync(_use_wal)
                return
            except DBAPIError as error:
                if "locked" not in str(error.orig) or time.monotonic() > deadline:
                    raise self._explain(error) from error
                await asyncio.sleep(0.05)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise self._explain(error) from error
        except PoolTimeout as error:
            raise Unavailable(f"the database {self._name} is busy", hint="try again") from error

    def _explain(self, error: DBAPIError) -> PolarError:
        reason = str(error.orig)
        if "disk is full" in reason:
            return Unavailable(
                f"the disk that holds {self._name} is full; nothing was stored",
                hint="free some space and try again",
            )
        if "locked" in reason:
            return Unavailable(f"the database {self._name} is busy", hint="try again")
        if "not a database" in reason:
            return PolarError(
                f"{self._name} is not a Polar database", hint="move it away or choose another data_dir"
            )
        return Unavailable(f"the database {self._name} cannot be used: {reason}")


def _sqlite_engine(path: Path) -> AsyncEngine:
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=str(path)), connect_args={"timeout": BUSY_SECONDS}
    )
    event.listen(engine.sync_engine, "connect", _prepare)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _record: object) -> None:
    # The driver begins transactions by itself, too late for IMMEDIATE; `_begin` does it instead.
    connection.isolation_level = None
    _execute(connection, "PRAGMA foreign_keys=ON")
    # NORMAL would keep an acknowledged task through kill -9 but not through a power cut. FULL keeps it
    # through both for one fsync a commit, which is little beside sessions that run for seconds.
    _execute(connection, "PRAGMA synchronous=FULL")


def _use_wal(connection: Connection) -> None:
    # On the driver's connection, since the mode cannot change inside a transaction.
    _execute(connection.connection.dbapi_connection, "PRAGMA journal_mode=WAL")


def _begin(connection: Connection) -> None:
    # A writer takes the lock at once: one that read first could find its snapshot stale and fail.
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


def _execute(connection: Any, statement: str) -> None:
    cursor = connection.cursor()
    cursor.execute(statement)
    cursor.close()
