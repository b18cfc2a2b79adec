"""The database: transactions as functions over one connection, whichever database it is.

A transaction is a plain function that is given a connection. It may be run again from the start
when another one got in its way, so it changes nothing but the database.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from polar.errors import PolarError, Unavailable
from polar.store.migrations import upgrade

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="Repository")

Clock = Callable[[], float]

BATCH = 500
"""Rows handled by one statement: well below every database's limit on parameters."""


def batches(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many rows at a time as one statement handles."""
    for start in range(0, len(rows), BATCH):
        yield rows[start : start + BATCH]


class Database(ABC):
    """One database; a row that `write` reads for update cannot change before it commits."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        """As people know it; never with a password."""
        # A machine's clock may be set while we run, and leases would end at once or not for hours: it is
        # read once, and counted on from there.
        self._steady = time.monotonic if clock is time.time else clock
        self._ahead = clock() - self._steady()

    @classmethod
    @asynccontextmanager
    async def open(cls, place: Path | str, clock: Clock = time.time) -> AsyncIterator[Database]:
        """The database in this file or at this PostgreSQL URL, made or migrated to the newest version."""
        database = _database(place, clock)
        try:
            await database.connect()
            await database.write(lambda connection: upgrade(connection, database.name))
            yield database
        finally:
            await database.close()

    def now(self) -> float:
        """Unix seconds, the same for all servers of one database."""
        return self._steady() + self._ahead

    async def set_clock(self) -> float:
        """Go by the clock that all servers of one database share; by how many seconds ours was behind it."""
        return 0.0

    @abstractmethod
    async def connect(self) -> None:
        """Make sure that it can be used."""

    @abstractmethod
    async def read(self, look: Callable[[Connection], T]) -> T:
        """Run a transaction that changes nothing."""

    @abstractmethod
    async def write(self, change: Callable[[Connection], T]) -> T:
        """Run a transaction; when this returns it is stored whole, and if it raises not at all."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def explain(self, error: DBAPIError) -> PolarError:
        """What a driver's error means to a person."""

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the driver's errors into ours."""
        try:
            yield
        except DBAPIError as error:
            raise self.explain(error) from error
        except PoolTimeout as error:
            raise Unavailable(f"the database {self.name} is busy", hint="try again") from error


class Repository:
    """Something that the database keeps; methods marked with `reads` or `writes` are its transactions."""

    def __init__(self, database: Database) -> None:
        self._database = database


def reads(
    transaction: Callable[Concatenate[S, Connection, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Run a method as a transaction that changes nothing."""

    @wraps(transaction)
    async def run(part: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await part._database.read(lambda connection: transaction(part, connection, *args, **kwargs))

    return run


def writes(
    transaction: Callable[Concatenate[S, Connection, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Run a method as a transaction: when it returns all is stored, and if it raises nothing is."""

    @wraps(transaction)
    async def run(part: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await part._database.write(lambda connection: transaction(part, connection, *args, **kwargs))

    return run


def _database(place: Path | str, clock: Clock) -> Database:
    if isinstance(place, Path):
        from polar.store.sqlite import SqliteDatabase

        return SqliteDatabase(place, clock)
    from polar.store.postgres import PostgresDatabase

    return PostgresDatabase(place, clock)
