"""PostgreSQL by URL: many servers share it; what one transaction locks, others skip or wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from polar.errors import Backoff, InvalidInput, NotInstalled, PolarError, Unavailable
from polar.store.database import Clock, Database

T = TypeVar("T")

POOL = 10
"""Connections a server keeps; it opens as many again when they are all in use."""

WAIT_SECONDS = 30.0
"""How long a transaction waits for a connection, or for a row that another one has locked."""

ATTEMPTS = 5
"""How often a transaction is run that others keep getting in the way of."""

# Deadlock, serialisation failure, and the same id inserted by two at once: run again, it sees the other's.
_IN_THE_WAY = frozenset({"40P01", "40001", "23505"})


class PostgresDatabase(Database):
    """A database of a PostgreSQL server, version 14 or newer."""

    def __init__(self, address: str, clock: Clock) -> None:
        url = parsed(address)
        super().__init__(url.set(drivername="postgresql").render_as_string(hide_password=True), clock)
        self._engine = _engine(url)
        # Inside a transaction too, each statement sees all that is committed when it begins.
        self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._shares_clock = clock is time.time

    async def connect(self) -> None:
        await self.set_clock()

    async def close(self) -> None:
        await self._engine.dispose()

    async def read(self, look: Callable[[Connection], T]) -> T:
        with self.errors():
            async with self._reading.connect() as connection:
                return await connection.run_sync(look)

    async def write(self, change: Callable[[Connection], T]) -> T:
        for pause in (*Backoff(0.02, 0.1, attempts=ATTEMPTS).pauses(), None):
            try:
                with self.errors():
                    async with self._engine.begin() as connection:
                        return await connection.run_sync(change)
            except _InTheWay as error:
                if pause is None:
                    raise Unavailable(str(error), hint="try again") from error
                await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def explain(self, error: DBAPIError) -> PolarError:
        reason = _reason(error)
        match _state(error):
            case "28P01" | "28000":
                return PolarError(
                    f"the database {self.name} refused the user or the password: {reason}",
                    hint="check server.database_url",
                )
            case "3D000":
                return PolarError(f"the database {self.name} is not there", hint="make it with `createdb`")
            case "42501":
                return PolarError(f"the database {self.name} does not allow this: {reason}")
            case "53100":
                return Unavailable(
                    f"the disk that holds {self.name} is full; nothing was stored",
                    hint="free some space and try again",
                )
            case "22021":
                return InvalidInput("a NUL character cannot be stored or looked for")
            case "53300" | "57P03" | "55P03":
                return Unavailable(f"the database {self.name} is busy: {reason}", hint="try again")
            case state if state in _IN_THE_WAY:
                return _InTheWay(f"the database {self.name} is busy: {reason}")
            case _:
                return Unavailable(f"the database {self.name} cannot be used: {reason}")

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            with super().errors():
                yield
        except OSError as error:
            raise Unavailable(
                f"the database {self.name} cannot be reached: {error.strerror or error}",
                hint="is PostgreSQL running there?",
            ) from error

    async def set_clock(self) -> float:
        query = text("SELECT extract(epoch FROM clock_timestamp())::float8")
        before = self.now()
        theirs = await self.read(lambda connection: float(connection.execute(query).scalar_one()))
        if not self._shares_clock or before <= theirs <= self.now():
            return 0.0
        # By no more than is certain: the answer may have taken long.
        behind = min(theirs - before, 0.0) or theirs - self.now()
        self._ahead += behind
        return behind


class _InTheWay(Unavailable):
    """Another transaction was faster; running this one again helps."""


def parsed(url: str) -> URL:
    """A PostgreSQL URL with the driver that is used; InvalidInput for anything else."""
    try:
        given = make_url(url)
    except ArgumentError:
        raise InvalidInput(
            "server.database_url: not a URL", hint="postgresql://user@host:5432/database"
        ) from None
    if given.get_backend_name() not in ("postgresql", "postgres"):
        raise InvalidInput(
            f"server.database_url: {given.drivername!r} is not supported",
            hint="postgresql://…, or leave it out for SQLite in data_dir",
        )
    return given.set(drivername="postgresql+asyncpg")


def _engine(url: URL) -> AsyncEngine:
    try:
        return create_async_engine(
            url,
            pool_size=POOL,
            max_overflow=POOL,
            pool_timeout=WAIT_SECONDS,
            connect_args={
                "timeout": WAIT_SECONDS,
                "server_settings": {
                    "application_name": "polar",
                    "jit": "off",
                    "lock_timeout": f"{WAIT_SECONDS:.0f}s",
                },
            },
        )
    except ImportError:
        raise NotInstalled(
            "PostgreSQL needs the package asyncpg", hint="pip install 'polar-rl[postgres]'"
        ) from None


def _state(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")


def _reason(error: DBAPIError) -> str:
    """The server's own words, on one line and without the driver's."""
    cause: Any = getattr(error.orig, "__cause__", None) or error.orig
    return " ".join(str(cause).split())
