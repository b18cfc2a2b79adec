"""How far a feed may be read: never past a place that an open transaction may still fill.

SQLite has one writer at a time, so rows become visible in the order of their numbers. PostgreSQL
hands numbers out before commit, so a lower one may become visible after a higher one was read. There
each transaction that appends to a feed first takes a shared advisory lock that names the number the
feed had come to, and a reader goes no further than the lowest number so named. No one waits.
"""

from __future__ import annotations

from enum import Enum

from sqlalchemy import Connection, text


class Feed(Enum):
    """A table that is read from a cursor on; the value tells its locks from all others."""

    RESULTS = 0x50
    EVENTS = 0x51

    @property
    def end(self) -> str:
        """SQL for the number that was handed out last."""
        sequence = f"{self.name.lower()}_seq_seq"
        return f"(SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM {sequence})"

    @property
    def first_key(self) -> int:
        return self.value << 56


_KEY = "((classid::bigint << 32) | objid::bigint)"
_LOWEST_OPEN = text(
    f"SELECT min({_KEY}) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database"
    " WHERE locktype = 'advisory' AND objsubid = 1 AND datname = current_database()"
    f" AND {_KEY} BETWEEN :first AND :last"
)


def announce(connection: Connection, *feeds: Feed) -> None:
    """Say that this transaction is about to append; before it is given a number."""
    if connection.dialect.name == "postgresql":
        locks = ", ".join(f"pg_advisory_xact_lock_shared({feed.first_key} + {feed.end})" for feed in feeds)
        connection.execute(text(f"SELECT {locks}"))


def horizon(connection: Connection, feed: Feed) -> int | None:
    """The number up to which the feed is complete, for a query that comes after; None: all that is seen.

    The end is read before the locks: who takes a number up to it has its lock by then.
    """
    if connection.dialect.name != "postgresql":
        return None
    end = int(connection.execute(text(f"SELECT {feed.end}")).scalar_one())
    span = {"first": feed.first_key, "last": feed.first_key + (1 << 56) - 1}
    lowest = connection.execute(_LOWEST_OPEN, span).scalar_one()
    return end if lowest is None else min(end, int(lowest) - feed.first_key)
