"""What the database tells of sessions that have not ended, for whoever has to find out why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, select

from polar.store.database import Database
from polar.store.sessions import IS_OPEN
from polar.store.tables import events, nodes, policy_nodes, sessions

SECONDS = 30.0
LAST_EVENTS = 6
"""How many of a session's changes are told."""


async def describe_unended(place: Path | str) -> str:
    """Each session that has not ended, with its lease, its pause and what happened to it last, then each
    node. Times are in seconds from now; a server whose clock was off has stored them as it saw them."""
    try:
        async with asyncio.timeout(SECONDS), Database.open(place) as database:
            return "\n".join(await database.read(lambda connection: list(_lines(connection, time.time()))))
    except Exception as error:  # whoever asks is about to fail for a better reason
        return f"what they wait for is not known: {error!r}"


def _lines(connection: Connection, now: float) -> Iterator[str]:
    for row in connection.execute(select(sessions).where(IS_OPEN).order_by(sessions.c.seq)).all():
        yield (
            f"{row.id}: {row.status}, attempt {row.attempt}, lease {row.fencing_token} of {row.node} until"
            f" {_from(now, row.lease_expires_at)}, not before {_from(now, row.not_before)},"
            f" changed {_from(now, row.updated_at)}"
        )
        yield from (f"    {_event(event, now)}" for event in _last_events(connection, row.id))
    reports = {row.node: row for row in connection.execute(select(policy_nodes))}
    for row in connection.execute(select(nodes).order_by(nodes.c.name)):
        seen_at = reports[row.name].seen_at if row.name in reports else None
        yield f"{row.name}: reported {_from(now, seen_at)}, trouble: {row.trouble}"


def _last_events(connection: Connection, session_id: str) -> list[Row[Any]]:
    query = select(events).where(events.c.session_id == session_id).order_by(events.c.seq.desc())
    return list(connection.execute(query.limit(LAST_EVENTS)))[::-1]


def _event(row: Row[Any], now: float) -> str:
    told = f": {row.detail}" if row.detail else ""
    return f"{_from(now, row.at)} {row.status}, attempt {row.attempt}, {row.node}{told}"


def _from(now: float, at: float | None) -> str:
    return "-" if at is None else f"{at - now:+.1f} s"
